"""An SGLang as its metrics tell it, and its pod, by what the source of 0.5.23 says. No SGLang has run for these.

The three answers were written by that release's own collectors (`metrics_collector.py`, with `prometheus_client`), which were
given made values: a server with two accelerators, whose second process counts its own passes, under eight streams of
decoding passes of 16 ms, held up by passes of 20 ms for prompts of 160 tokens. Lines that explain a metric are left out, and
of the later two also buckets. The readings are 2 s apart.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.operator.builders import RENDERING, placement, pool, service
from tests.operator.pods.answering import answering
from tests.operator.pods.test_manifests import ADAPTERS, stored

from busbar.kube.contracts import bearers
from busbar.kube.contracts.bearers import Role
from busbar.kube.types.engines import FOREIGN, SGLANG
from busbar.operator.errors import ProbeRefused
from busbar.operator.pods import replica_pods
from busbar.operator.pods.model_server import Exposition, ModelServer
from busbar.operator.pods.model_server_stop import pre_stop
from busbar.operator.watch.projections import project_pod

RECORDED = [
    (Path(__file__).parent / f"recorded/sglang_{SGLANG.version}_{i}.txt").read_bytes() for i in range(3)
]
AT_S = (0.0, 2.0, 4.0)


def test_a_written_answer_is_read() -> None:
    found = Exposition.parsed(SGLANG, RECORDED[0])
    assert (found.engines, found.running, found.sleep_level) == (1, 8, 0)
    assert found.waiting == 3, "two in the queue, and one whose grammar is compiled"
    assert (found.cache_tokens, found.block_tokens, found.cache_used) == (65536, 16, 0.05)
    assert (found.steps, found.decode_steps) == (530, 500), "of the first process alone"
    assert (found.computed, found.ended) == (30 * 160, 58)
    assert found.generated == 500 * 6 + 8 * 8, "with the first token of each of eight times eight prompts"
    assert found.gaps == 3000
    assert found.gaps_s == pytest.approx(60.0)


def test_the_status_of_written_answers() -> None:
    server = ModelServer(SGLANG, "uid-1")
    for answer, at_s in zip(RECORDED, AT_S, strict=True):
        status = server.take(answer, at_s)
    assert status.ready
    assert (status.running, status.waiting, status.requests_total) == (7, 0, 83)
    assert (status.kv_blocks_total, status.kv_blocks_free) == (4096, 4096 - 225)
    assert status.report is not None
    assert status.report.cache_tokens == 65536
    assert status.report.workload_class.startswith("serve-sglang-")


def test_its_intervals_of_passes_are_rows_of_the_step_model_though_prompts_have_passes_of_their_own() -> None:
    server = ModelServer(SGLANG, "uid-1")
    for answer, at_s in zip(RECORDED, AT_S, strict=True):
        server.take(answer, at_s)
    assert server.speed.model.steps == 2
    assert server.speed.decode_s + server.speed.prefill_s == pytest.approx(4.0)


def gauges(**values: int) -> bytes:
    of = 'engine_type="unified",model_name="m",pp_rank="0",priority="",tp_rank="0"'
    lines = [f"sglang:max_total_num_tokens{{{of}}} 1000", f"sglang:page_size{{{of}}} 1"]
    return "\n".join(
        [*lines, *(f"sglang:{name}{{{of}}} {value}" for name, value in values.items()), ""]
    ).encode()


def test_with_priorities_the_total_counts_and_not_its_parts_again() -> None:
    whole = gauges(num_running_reqs=5)
    parts = whole.replace(b'priority=""', b'priority="0"') + whole.replace(b'priority=""', b'priority="7"')
    tokens = b'sglang:num_requests_total{priority="0"} 3\nsglang:num_requests_total{priority="7"} 4\n'
    found = Exposition.parsed(SGLANG, whole + parts + tokens)
    assert (found.running, found.ended) == (5, 7)


def test_the_engines_of_a_data_parallel_server_are_added_up_by_their_first_processes() -> None:
    ranks = [(0, 0), (0, 1), (1, 2), (1, 3)]
    answer = b"".join(
        gauges(num_running_reqs=2).replace(b'tp_rank="0"', f'dp_rank="{dp}",tp_rank="{tp}"'.encode())
        for dp, tp in ranks
    )
    found = Exposition.parsed(SGLANG, answer)
    assert (found.engines, found.running, found.cache_tokens, found.block_tokens) == (2, 4, 2000, 1)


def test_one_that_has_computed_nothing_yet_runs_nothing() -> None:
    found = Exposition.parsed(SGLANG, gauges())
    assert (found.running, found.waiting, found.cache_tokens) == (0, 0, 1000)


@pytest.mark.parametrize("answer", [b"", b"vllm:num_requests_running 1\n", b"sglang:num_running_reqs 1\n"])
def test_what_is_no_exposition_of_an_sglang_is_refused(answer: bytes) -> None:
    with pytest.raises(ProbeRefused, match=r"no sglang:max_total_num_tokens, which SGLang 0\.5\.23 has"):
        Exposition.parsed(SGLANG, answer)


def sglang(*, accelerators: int = 1, **spec: Any) -> dict[str, Any]:
    spec = {"engine": "sglang", "image": "sglang", "shape": {"acceleratorsPerPod": accelerators}, **spec}
    return replica_pods.service_pod(
        service(**spec),
        index=0,
        model_uri="pvc://claim/model",
        placement=placement(),
        pool=pool(resourceName="nvidia.com/gpu"),
        rendering=RENDERING,
    )


def container(body: dict[str, Any]) -> dict[str, Any]:
    main: dict[str, Any] = body["spec"]["containers"][0]
    return main


def test_it_is_started_with_its_own_flags_and_its_key_in_a_file() -> None:
    main = container(sglang(maxModelLen=4096, args=["--mem-fraction-static", "0.8"]))
    assert main["command"] == ["python3", "-m", "sglang.launch_server"]
    assert main["args"] == [
        *("--model-path", "/artifacts/claim/model", "--served-model-name", "web", "--port", "9400"),
        *("--config", "/var/run/secrets/busbar/sglang.yaml", "--host", "0.0.0.0", "--enable-metrics"),
        *("--enable-cache-report", "--context-length", "4096", "--mem-fraction-static", "0.8"),
    ]
    of = service(engine="sglang", image="sglang")
    key = bearers.bearer_for(RENDERING.workload_key, of.metadata.uid, Role.INFER)
    assert stored(of)["sglang.yaml"] == f'api-key: "{key}"\n'
    assert key not in str(sglang())


def test_its_pod_is_known_as_one_that_is_read_by_its_metrics() -> None:
    for name, engine in FOREIGN.items():
        assert project_pod(sglang(engine=name.value)).engine is engine


def test_it_takes_requests_when_it_says_so_and_is_alive_while_it_computes() -> None:
    main = container(sglang())
    assert main["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert main["livenessProbe"]["httpGet"]["path"] == "/health"


@pytest.mark.parametrize(
    ("args", "added"),
    [
        ([], ["--tensor-parallel-size", "4"]),
        (["--schedule-policy", "lpm"], ["--tensor-parallel-size", "4"]),
        (["--tp", "2"], []),
        (["--dp-size=4"], []),
        (["--pipeline-parallel-size", "4"], []),
    ],
)
def test_it_uses_all_accelerators_of_its_pod(args: list[str], added: list[str]) -> None:
    found = container(sglang(accelerators=4, args=args or None))["args"]
    assert found[found.index("--enable-cache-report") + 1 :] == [*added, *args]


def test_it_knows_adapters_by_the_name_behind_the_colon() -> None:
    found = container(sglang(adapters=ADAPTERS))["args"]
    assert found[-4:] == ["--enable-lora", "--lora-paths", "a=/artifacts/claim/a", "b=/artifacts/other/b"]


def test_its_stop_is_held_back_while_requests_run_or_wait() -> None:
    idle = gauges(num_running_reqs=0, num_queue_reqs=0, num_grammar_queue_reqs=0)
    answers = [
        gauges(num_running_reqs=2, num_queue_reqs=0),
        gauges(num_running_reqs=0, num_queue_reqs=1),
        gauges(num_running_reqs=0, num_queue_reqs=0, num_grammar_queue_reqs=1),
        idle,
    ]
    with answering(answers) as port:
        command = pre_stop(SGLANG, port, 60)["preStop"]["exec"]["command"]
        command = [sys.executable, *command[1:4], "0.1", "20"]
        assert subprocess.run(command, timeout=30, capture_output=True, check=True).stderr == b""
    assert answers == [idle]
