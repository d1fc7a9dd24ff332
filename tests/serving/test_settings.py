"""Settings from a pod's environment and their errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from busbar.kube.contracts.bearers import Role
from busbar.kube.contracts.workload import ReplicaRole
from busbar.workloads.serving.errors import SettingsError
from busbar.workloads.serving.pod import from_environment
from busbar.workloads.serving.quota import Quota
from busbar.workloads.serving.settings import AdapterSource, EngineSettings, ServerSettings, parse_bytes

SPEC = {"model": {"trainingJob": "j"}, "kvCacheMemory": "64Mi", "maxModelLen": 256, "drainSeconds": 12}
POD = {
    "BUSBAR_SPEC": json.dumps(SPEC),
    "BUSBAR_JOB_NAME": "chat",
    "BUSBAR_NAMESPACE": "demo",
    "BUSBAR_MODEL_DIR": "/artifacts/stdlib/model",
    "BUSBAR_PORT": "9400",
    "BUSBAR_MODE": "resident",
}


@pytest.fixture(autouse=True)
def bearers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the operator mounts."""
    for role in Role:
        (tmp_path / role).write_text(f"secret-{role}\n")
    monkeypatch.setitem(POD, "BUSBAR_BEARERS_DIR", str(tmp_path))
    return tmp_path


def test_a_pod_whose_bearers_are_not_all_there_does_not_start(bearers: Path) -> None:
    (bearers / "command").unlink()
    with pytest.raises(SettingsError, match="has no bearer for command"):
        from_environment(POD)


def test_a_pod_reads_its_spec() -> None:
    settings = from_environment(POD)
    assert settings.engine.model_dir == Path("/artifacts/stdlib/model")
    assert settings.engine.kv_bytes == 64 * 2**20
    assert settings.engine.max_model_len == 256
    assert (settings.model_id, settings.aliases) == ("chat", ("demo/chat",))
    assert (settings.host, settings.port, settings.drain_s) == ("0.0.0.0", 9400, 12.0)
    assert settings.bearers == {role: f"secret-{role}" for role in Role}
    assert "secret" not in repr(settings)


def test_the_model_id_of_the_spec_is_used_and_the_other_names_still_work() -> None:
    settings = from_environment(POD | {"BUSBAR_SPEC": json.dumps(SPEC | {"modelId": "my-model"})})
    assert settings.model_id == "my-model"
    assert settings.aliases == ("chat", "demo/chat", "demo/my-model")


def test_the_promised_time_per_token_reaches_the_engine() -> None:
    spec = SPEC | {"slo": {"tpotMilliseconds": 40, "percentile": 95}}
    assert from_environment(POD | {"BUSBAR_SPEC": json.dumps(spec)}).engine.tpot_ms == 40
    assert from_environment(POD).engine.tpot_ms is None


def test_the_role_of_a_replica_comes_from_the_operator() -> None:
    assert from_environment(POD).role is ReplicaRole.BOTH
    assert from_environment(POD | {"BUSBAR_ROLE": "prefill"}).role is ReplicaRole.PREFILL
    with pytest.raises(
        SettingsError, match="BUSBAR_ROLE is 'cook'; a replica has the role both, prefill, decode"
    ):
        from_environment(POD | {"BUSBAR_ROLE": "cook"})


def test_adapters_of_the_spec_are_below_their_claims() -> None:
    adapters = [{"name": "a", "uri": "pvc://stdlib/lora/a"}, {"name": "b", "uri": "pvc://other"}]
    engine = from_environment(
        POD | {"BUSBAR_SPEC": json.dumps(SPEC | {"adapters": adapters})}, ["--adapter-memory", "2Mi"]
    ).engine
    assert engine.adapters == (
        AdapterSource("a", Path("/artifacts/stdlib/lora/a")),
        AdapterSource("b", Path("/artifacts/other")),
    )
    assert (engine.adapter_bytes, engine.skip_bad_adapters) == (2 * 2**20, True)
    assert from_environment(POD).engine.adapters == ()


def test_arguments_of_the_spec_turn_parts_of_the_engine_on_and_off() -> None:
    settings = from_environment(POD, ["--deterministic", "--no-prefix-cache", "--stall-seconds", "5"])
    assert from_environment(POD, ["--speculate", "6"]).engine.speculate == 6
    assert (settings.engine.deterministic, settings.engine.prefix_cache, settings.stall_s) == (
        True,
        False,
        5.0,
    )
    settings = from_environment(POD)
    assert (settings.engine.deterministic, settings.engine.prefix_cache, settings.stall_s) == (
        False,
        True,
        30.0,
    )


def test_a_draft_is_named_by_the_address_of_its_claim() -> None:
    engine = from_environment(POD, ["--speculate", "4", "--draft", "pvc://stdlib/small"]).engine
    assert engine.draft_dir == Path("/artifacts/stdlib/small")
    for other in ("./small", "pvc://stdlib/../small", "pvc://../stdlib"):
        with pytest.raises(SettingsError, match="must be pvc://CLAIM/FOLDER"):
            from_environment(POD, ["--speculate", "4", "--draft", other])
    with pytest.raises(SettingsError, match="add --speculate 4"):
        from_environment(POD, ["--draft", "pvc://stdlib/small"])


def test_the_operators_model_id_wins() -> None:
    assert from_environment(POD | {"BUSBAR_MODEL_ID": "other"}).model_id == "other"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"BUSBAR_BEARERS_DIR": ""}, "BUSBAR_BEARERS_DIR is not set"),
        ({"BUSBAR_MODEL_DIR": ""}, "BUSBAR_MODEL_DIR is not set"),
        ({"BUSBAR_JOB_NAME": ""}, "BUSBAR_JOB_NAME is not set"),
        ({"BUSBAR_SPEC": "{"}, "BUSBAR_SPEC is not JSON"),
        ({"BUSBAR_SPEC": "[]"}, "must hold the spec"),
        ({"BUSBAR_MODE": "fp8"}, "runs in the modes resident, int8, int4, stream"),
        ({"BUSBAR_PORT": "http"}, "BUSBAR_PORT must be a positive whole number"),
        ({"BUSBAR_SPEC": json.dumps(SPEC | {"kvCacheMemory": "lots"})}, "not an amount of memory"),
        ({"BUSBAR_SPEC": json.dumps(SPEC | {"maxModelLen": "x"})}, "maxModelLen must be"),
        ({"BUSBAR_SPEC": json.dumps(SPEC | {"maxModelLen": 0})}, "at least 1"),
        ({"BUSBAR_SPEC": json.dumps(SPEC | {"adapters": ["a"]})}, "a list of name and uri"),
        ({"BUSBAR_SPEC": json.dumps(SPEC | {"adapters": [{"name": "a"}]})}, "a list of name and uri"),
        (
            {"BUSBAR_SPEC": json.dumps(SPEC | {"adapters": [{"name": "a:b", "uri": "pvc://c"}]})},
            "no name for an adapter",
        ),
        (
            {"BUSBAR_SPEC": json.dumps(SPEC | {"access": {"tenants": [{"maxKv": 0.5}]}})},
            "a list of name, guaranteedKv and maxKv",
        ),
        ({"BUSBAR_SPEC": json.dumps(SPEC | {"drainSeconds": "x"})}, "drainSeconds must be"),
        ({"BUSBAR_SPEC": json.dumps(SPEC | {"shape": {"cpu": "many"}})}, "not an amount of cores"),
    ],
)
def test_a_bad_environment_is_named(change: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        from_environment(POD | change)


def test_the_specs_arguments_set_what_has_no_field() -> None:
    words = ["--max-running", "8", "--dtype", "bfloat16", "--max-waiting", "1", "--block-tokens", "16"]
    settings = from_environment(POD, words)
    assert (settings.engine.max_running, settings.engine.dtype, settings.max_waiting) == (8, "bfloat16", 1)
    assert settings.engine.block_tokens == 16
    assert from_environment(POD).max_waiting == 256
    settings = from_environment(POD, ["--weights-dtype", "int8", "--kv-dtype", "int4"])
    assert (settings.engine.weights_dtype, settings.engine.kv_dtype) == ("int8", "int4")
    assert (from_environment(POD).engine.weights_dtype, from_environment(POD).engine.kv_dtype) == (
        "auto",
        "auto",
    )


@pytest.mark.parametrize(
    ("mode", "kept"),
    [
        ("", ("resident", "auto")),
        ("resident", ("resident", "auto")),
        ("int8", ("resident", "int8")),
        ("int4", ("resident", "int4")),
        ("stream", ("stream", "auto")),
    ],
)
def test_the_engine_mode_says_how_weights_are_kept(mode: str, kept: tuple[str, str]) -> None:
    engine = from_environment(POD | {"BUSBAR_MODE": mode}).engine
    assert (engine.weights, engine.weights_dtype) == kept
    engine = from_environment(
        POD | {"BUSBAR_MODE": mode}, ["--weights", "auto", "--weights-dtype", "int8"]
    ).engine
    assert (engine.weights, engine.weights_dtype) == ("auto", "int8")


def test_the_specs_arguments_set_how_weights_are_streamed() -> None:
    engine = from_environment(POD, ["--weights", "stream", "--memory", "2Gi", "--stream-depth", "0"]).engine
    assert (engine.weights, engine.memory_bytes, engine.stream_depth) == ("stream", 2 * 2**30, 0)
    engine = from_environment(POD, ["--weights", "stream", "--stream-unit", "layers"]).engine
    assert engine.stream_unit == "layers"
    for alone in (["--stream-depth", "1"], ["--stream-unit", "experts"]):
        with pytest.raises(SettingsError, match="add --weights stream, or leave them out"):
            from_environment(POD, alone)
    with pytest.raises(SettingsError, match="stream_unit must be one of auto, layers, experts, not 'rows'"):
        EngineSettings(Path("m"), weights="stream", stream_unit="rows")
    with pytest.raises(SettingsError, match="stream_depth must be 0 to 7, not 8"):
        EngineSettings(Path("m"), weights="stream", stream_depth=8)


def test_the_specs_arguments_keep_weights_in_the_pods_memory() -> None:
    assert from_environment(POD, ["--keep-weights"]).engine.keep_dir == Path("/dev/shm/busbar-weights")
    assert from_environment(POD).engine.keep_dir is None


def test_the_specs_arguments_set_the_host_tier_and_quotas() -> None:
    words = ["--host-kv-memory", "2Mi", "--kv-quota", "research=25:50", "--kv-quota", "sales=0:20"]
    engine = from_environment(POD, words).engine
    assert engine.host_kv_bytes == 2 * 2**20
    assert engine.kv_quotas == (("research", Quota(0.25, 0.5)), ("sales", Quota(0.0, 0.2)))
    assert (from_environment(POD).engine.host_kv_bytes, from_environment(POD).engine.kv_quotas) == (0, ())


def test_tenants_of_the_spec_have_their_parts_of_the_kv_cache() -> None:
    tenants = [
        {"name": "a", "weight": 2.0},
        {"name": "b", "guaranteedKv": 0.25},
        {"name": "c", "maxKv": 0.5},
        {"name": "d", "guaranteedKv": 0, "maxKv": 1},
    ]
    pod = POD | {"BUSBAR_SPEC": json.dumps(SPEC | {"access": {"tenants": tenants}})}
    given = (("b", Quota(0.25, 1.0)), ("c", Quota(0.0, 0.5)), ("d", Quota(0.0, 1.0)))
    assert from_environment(pod).engine.kv_quotas == given
    more = from_environment(pod, ["--kv-quota", "e=5:10"]).engine.kv_quotas
    assert more == (*given, ("e", Quota(0.05, 0.1)))
    with pytest.raises(SettingsError, match="tenant 'b' has two KV quotas"):
        from_environment(pod, ["--kv-quota", "b=5:10"])


@pytest.mark.parametrize(
    "words",
    [
        ["--host-kv-memory", "much"],
        ["--keep-weights", "/tmp"],
        ["--kv-quota", "research"],
        ["--kv-quota", "a=1:2", "--kv-quota", "a=1:2"],
        ["--no-such"],
        ["--max-running", "x"],
        ["--max-running", "0"],
        ["--max-waiting", "0"],
        ["--stall-seconds", "nan"],
        ["--stall-seconds", "inf"],
        ["word"],
        ["--max-run", "3"],
        ["--kv-dtype", "bfloat16"],
        ["--weights-dtype", "int3"],
    ],
)
def test_arguments_that_are_not_understood_are_refused(words: list[str]) -> None:
    with pytest.raises(SettingsError):
        from_environment(POD, words)


@pytest.mark.parametrize(
    ("shape", "threads"),
    [({}, 1), ({"acceleratorsPerPod": 3}, 3), ({"cpu": "500m"}, 1), ({"cpu": "1500m"}, 2), ({"cpu": "3"}, 3)],
)
def test_threads_follow_the_cores_asked_for_within_those_there(
    shape: dict[str, object], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = POD | {"BUSBAR_SPEC": json.dumps(SPEC | {"shape": shape})}
    monkeypatch.setattr("busbar.workloads.serving.pod.usable_processors", lambda: 8)
    assert from_environment(env).engine.threads == threads
    monkeypatch.setattr("busbar.workloads.serving.pod.usable_processors", lambda: 1)
    assert from_environment(env).engine.threads == 1


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("1k", 1000),
        ("1e3", 1000),
        ("1Pi", 2**50),
        ("1500m", 2),
        ("256Mi", 256 * 2**20),
        ("1.5Gi", 3 * 2**29),
        (4096, 4096),
        ("2G", 2 * 10**9),
    ],
)
def test_quantities(text: object, size: int) -> None:
    assert parse_bytes(text, "x") == size


@pytest.mark.parametrize("text", ["", "Mi", "-1", "1 Mi", "1KB", "0", "9Ei", "9" * 400, None])
def test_bad_quantities_are_refused_with_their_place(text: object) -> None:
    with pytest.raises(SettingsError, match="--kv-memory"):
        parse_bytes(text, "--kv-memory")


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_a_drain_that_never_ends_is_refused(seconds: float) -> None:
    assert ServerSettings(EngineSettings(Path("m")), "m", drain_s=0.0).drain_s == 0.0
    with pytest.raises(SettingsError, match="drain_s must be a finite number of at least 0"):
        ServerSettings(EngineSettings(Path("m")), "m", drain_s=seconds)


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("block_tokens", 48, 64),
        ("block_tokens", 512, 256),
        ("max_running", 0, 1),
        ("max_batched_tokens", 0, 1),
        ("device", "tpu", "cpu"),
        ("dtype", "int8", "bfloat16"),
        ("weights_dtype", "fp8", "int4"),
        ("weights", "disk", "stream"),
        ("memory_bytes", 0, 1),
        ("tpot_ms", float("nan"), 50.0),
        ("tpot_ms", float("inf"), None),
        ("kv_dtype", "int2", "int8"),
    ],
)
def test_engine_settings_are_checked(name: str, bad: object, good: object) -> None:
    with pytest.raises(SettingsError):
        EngineSettings(Path("m"), **{name: bad})  # type: ignore[arg-type]
    EngineSettings(Path("m"), **{name: good})  # type: ignore[arg-type]
