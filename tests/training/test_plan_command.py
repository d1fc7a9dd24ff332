"""`busbar plan`: the engine's layout and the scheduler's formulas, without a GPU and without torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from tests.training.small import LLAMA, engine, manifest
from transformers import AutoConfig, AutoModelForCausalLM

from busbar.scheduler.fit import (
    Accelerator,
    BatchShape,
    Gang,
    ModelShape,
    accelerator,
    memory,
    prior,
    tokens_per_s,
    unknown_patterns,
    workload_class,
)
from busbar.scheduler.fit.exchange import LATENCY_S, Link, Links, among_neighbours
from busbar.scheduler.fit.memory import (
    CPU_RUNTIME_BYTES,
    HOST_RUNTIME_BYTES,
    RUNTIME_BYTES,
    activations,
    copies_mib,
    forward_activations,
    swapped_activations,
)
from busbar.scheduler.fit.speed import micro_batch_times, step_seconds
from busbar.workloads.machine.limits import CUDA_RESERVE_BYTES, RESERVE_BYTES, SUPERVISOR_BYTES
from busbar.workloads.training.activations import peak_activation_bytes
from busbar.workloads.training.adapter import attach, merge_bytes
from busbar.workloads.training.adapter_size import parameters
from busbar.workloads.training.demand import COPIES, copy_bytes
from busbar.workloads.training.division import divide
from busbar.workloads.training.freeze import freeze
from busbar.workloads.training.gang_plan import GangMachine, Network, network_of
from busbar.workloads.training.groups import make_groups
from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.layouts import layouts
from busbar.workloads.training.plan import PREPARATION_BYTES, MemoryLimits, lay_out
from busbar.workloads.training.plan_command import answers_for, demand_of, machine_of, over_ranks, plan
from busbar.workloads.training.prediction import predict

CONFIG_13B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
TINY = {**LLAMA, "vocab_size": 512, "max_position_embeddings": 512}
BATCH = BatchShape(sequences=8, sequence_length=2048, micro_batch=1, dtype="bfloat16")


def job(folder: Path, **changes: Any) -> Path:
    document = manifest(
        tokenizer={"uri": "pvc://tokenizer"},
        dtype="bfloat16",
        batch={"sequences": 8, "microBatch": 1},
        **{
            "model": {"config": CONFIG_13B},
            "mode": "auto",
            "data": {"uri": "pvc://text", "sequenceLength": 2048},
            **changes,
        },
    )
    (folder / "job.yaml").write_text(yaml.safe_dump(document))
    return folder / "job.yaml"


def ask(folder: Path, *options: str, **changes: Any) -> tuple[int, dict[str, Any]]:
    ran = CliRunner().invoke(plan, [str(job(folder, **changes)), *options, "--json"])
    return ran.exit_code, json.loads(ran.output) if ran.exit_code == 0 or ran.output.startswith("{") else {}


def test_13_billion_parameters_on_an_h200_need_the_host(tmp_path: Path) -> None:
    code, answer = ask(tmp_path, "--gpu", "H200", "--hbm", "139Gi", "--host", "128Gi")
    assert code == 0
    assert answer["parameters"] == pytest.approx(13.0e9, rel=0.01)
    assert not answer["modes"]["resident"]["fits"]
    auto = answer["modes"]["auto"]
    assert 0.2 < auto["plan"]["offloadedFraction"] < 0.7
    assert auto["plan"]["hostBytes"] < 127 * 2**30
    assert 0 < auto["tokensPerSecond"] < 1e5


def test_a_mode_that_does_not_fit_says_what_would_help_and_exits_2(tmp_path: Path) -> None:
    file = job(tmp_path, mode="resident")
    ran = CliRunner().invoke(plan, [str(file), "--gpu", "H200", "--host", "128Gi"])
    assert ran.exit_code == 2
    assert re.search(r"resident \* +no +\d+\.\d\d GiB", ran.output)
    assert "optimizer-offload   yes" in ran.output
    assert "optimizer-offload would fit with" not in ran.output
    assert "parameter-offload would fit with scratchDisk: at least " in ran.output
    assert "What would help:\n  mode: auto (" in ran.output


def test_what_recomputing_activations_saves_and_costs_is_shown(tmp_path: Path) -> None:
    long = {"data": {"uri": "pvc://text", "sequenceLength": 16384}}
    options = ["--gpu", "H100", "--host", "256Gi"]
    code, answer = ask(tmp_path, *options, mode="optimizer-offload", **long)
    said = answer["activations"]
    assert said["recomputedBytes"] < said["keptBytes"] / 4
    assert said["computeRatio"] == pytest.approx(4 / 3, rel=0.02)
    assert (code, answer["modes"]["optimizer-offload"]["plan"]["activations"]) == (0, "recompute")
    refused = CliRunner().invoke(
        plan, [str(job(tmp_path, mode="optimizer-offload", activations="keep", **long)), *options]
    )
    assert refused.exit_code == 2
    assert "\n  activations: recompute (one more forward pass per step, equal results)" in refused.output
    roomy = ["--gpu", "H200", "--hbm", "400Gi", "--host", "256Gi"]
    times = [
        ask(tmp_path, *roomy, activations=each, **long)[1]["modes"]["resident"]["secondsPerStep"]
        for each in ("keep", "auto", "recompute")
    ]
    assert times[0] == times[1]
    assert times[2] / times[0] == pytest.approx(4 / 3, rel=0.02)


def test_the_plan_says_what_reduced_moments_would_need(tmp_path: Path) -> None:
    code, answer = ask(tmp_path, "--gpu", "H200", "--host", "96Gi", mode="optimizer-offload")
    sizes = answer["state"]["bytes"]
    assert answer["state"]["asked"] == "exact"
    assert (code, sizes["bf16"] * 10, sizes["int8"] * 10) == (2, sizes["exact"] * 6, sizes["exact"] * 4.03125)
    given = {"mode": "optimizer-offload", "state": "int8"}
    assert ask(tmp_path, "--gpu", "H200", "--host", "96Gi", **given)[0] == 0
    ran = CliRunner().invoke(plan, [str(job(tmp_path, **given)), "--gpu", "H200", "--host", "96Gi"])
    assert "The optimizer's state (now int8) takes " in ran.output
    zeroth = {"mode": "resident", "optimizer": {"name": "ZerothOrder", "learningRate": 1e-6}}
    ran = CliRunner().invoke(plan, [str(job(tmp_path, **zeroth)), "--gpu", "H200", "--host", "96Gi"])
    assert "The optimizer's state" not in ran.output


def test_the_longest_sequence_fits_and_one_token_more_does_not(tmp_path: Path) -> None:
    options = ["--gpu", "H100", "--host", "256Gi"]
    given = {**CONFIG_13B, "max_position_embeddings": 4096}
    _, answer = ask(tmp_path, *options, "--longest", model={"config": given})
    found = answer["longest"]
    assert found["resident"] == {"keep": 0, "recompute": 0, "swap": 0}
    assert found["auto"]["keep"] == found["optimizer-offload"]["keep"]
    assert found["parameter-offload"]["keep"] == 0
    assert found["auto"]["recompute"] == found["parameter-offload"]["recompute"]
    assert found["auto"]["recompute"] > 2 * found["optimizer-offload"]["recompute"]
    assert found["auto"]["swap"] > 1.3 * found["auto"]["recompute"]
    for way, tokens in found["auto"].items():
        codes = [
            ask(
                tmp_path,
                *options,
                activations=way,
                data={"uri": "pvc://text", "sequenceLength": tokens + more},
            )[0]
            for more in (0, 1)
        ]
        assert codes == [0, 2]
    assert found["auto"]["recompute"] > 3 * found["auto"]["keep"]
    ran = CliRunner().invoke(plan, [str(job(tmp_path, model={"config": given})), *options, "--longest"])
    assert re.search(r"\nresident +none +none +none\n", ran.output)
    assert f"{found['auto']['recompute']:,}" in ran.output
    assert "config stops at 4,096 positions" in ran.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpu", "X9"], "--gpu: X9 is not known"),
        (["--hbm", "lots"], "--hbm: lots"),
        (["--disk", "0"], "--disk: 0 is nothing"),
        (["--host", "0Gi"], "--host: 0Gi is nothing"),
        (["--pods", "99"], "not enough for 99 processes"),
        (["--network", "fast"], "--network: fast is no rate"),
        (["--network", "0Gbit"], "--network: 0Gbit moves nothing"),
    ],
)
def test_bad_options_are_named(options: list[str], said: str, tmp_path: Path) -> None:
    ran = CliRunner().invoke(plan, [str(job(tmp_path)), *options])
    assert ran.exit_code == 2
    assert said in ran.output


def test_a_model_whose_config_is_not_there_is_told_with_what_to_do(tmp_path: Path) -> None:
    path = job(tmp_path, model={"uri": "pvc://models/base"})
    options = ["--claims", str(tmp_path / "claims")]
    ran = CliRunner().invoke(plan, [str(path), *options])
    assert ran.exit_code == 2
    assert (
        "models/base/config.json: No such file or directory; put the model's config.json there" in ran.output
    )
    folder = tmp_path / "claims" / "models" / "base"
    folder.mkdir(parents=True)
    for content in ("[1]", "{", "[" * 5000):
        (folder / "config.json").write_text(content)
        ran = CliRunner().invoke(plan, [str(path), *options])
        assert ran.exit_code == 2
        assert "spec.engine.model.uri: has no size that is known" in ran.output


def test_pods_share_the_state(tmp_path: Path) -> None:
    """Everything else is whole on each; what a pod holds is that of the engine's own plan for its rank."""
    path = job(tmp_path)
    one, two = (answers_for(path, machine_of("cpu"), pods, tmp_path)[""] for pods in (1, 2))
    alone, shared = (answer["modes"]["resident"]["plan"]["device"] for answer in (one, two))
    assert shared["optimizer"] == pytest.approx(alone["optimizer"] / 2, rel=0.01)
    assert shared["parameters"] == pytest.approx(alone["parameters"], rel=0.01)
    assert alone.get("exchange", 0) == 0 < shared["exchange"]
    ran = CliRunner().invoke(plan, [str(path), "--pods", "2"])
    assert "that of one process of 2 pods: they divide the optimizer's state." in ran.output


@pytest.mark.parametrize(
    ("said", "rate"),
    [
        ("400Gbit", 50e9),
        ("2.5gbps", 2.5e9 / 8),
        ("25Gi", 25 * 2**30),
        ("infiniband-ndr", 46e9),
        (None, 2.8e9),
    ],
)
def test_a_network_is_a_rate_in_bits_or_bytes_or_a_class(said: str | None, rate: float) -> None:
    assert network_of(said).bytes_per_s == rate
    assert network_of(said).assumed is (said is None)


def test_a_step_of_a_gang_has_the_time_of_its_exchanges(tmp_path: Path) -> None:
    """Of two exchanges of each group three quarters in bfloat16, most of which a faster network hides beside the passes."""
    options = ("--gpu", "H200", "--host", "800Gi", "--pods", "4", "--hbm", "400Gi")
    found = {}
    for network in ("1Gbit", "400Gbit", "40000Gbit"):
        _, answer = ask(tmp_path, *options, "--network", network, mode="resident")
        found[network] = answer["modes"]["resident"]
    groups, parameters = 42, answer["parameters"]
    assert found["1Gbit"]["sentBytes"] == pytest.approx(2 * 2 * parameters * 3 / 4, rel=1e-4)
    latency_s = 2 * groups * 3 * LATENCY_S
    over_s = [each["exchangeSeconds"] - latency_s for each in found.values()]
    assert over_s == pytest.approx([found["1Gbit"]["sentBytes"] / rate for rate in (0.125e9, 50e9, 5e12)])
    computed = [each["secondsPerStep"] - each["exposedSeconds"] for each in found.values()]
    assert computed[1:] == pytest.approx([computed[0]] * 2)
    slow, fast = found["1Gbit"], found["400Gbit"]
    assert slow["secondsPerStep"] > slow["exchangeSeconds"] > 0.9 * slow["secondsPerStep"]
    assert fast["exposedSeconds"] < 0.6 * fast["exchangeSeconds"]


def test_what_is_assumed_of_the_network_is_said(tmp_path: Path) -> None:
    path = str(job(tmp_path))
    options = ["--gpu", "H200", "--host", "400Gi", "--pods", "2"]
    said = CliRunner().invoke(plan, [path, *options]).output
    assert "In each step a process hands over" in said
    assert "move 2.8 GB/s each way for a pod (ethernet-25), as --network says nothing." in said
    said = CliRunner().invoke(plan, [path, *options, "--network", "100Gbit"]).output
    assert "move 12.5 GB/s each way for a pod, as stated." in said
    assert ask(tmp_path, *options)[1]["network"] == {
        "bytesPerSecond": 2_800_000_000,
        "name": "ethernet-25",
        "assumed": True,
    }
    assert ask(tmp_path)[1]["network"] is None


def test_processes_of_one_pod_are_joined_by_the_link_to_the_host(tmp_path: Path) -> None:
    path = job(tmp_path)
    document = yaml.safe_load(path.read_text())
    document["spec"]["shape"] = {"acceleratorsPerPod": 4}
    document["spec"]["engine"] |= {"mode": "resident", "parallelism": {"processesPerPod": 4}}
    path.write_text(yaml.safe_dump(document))
    machine = machine_of("H100", hbm="400Gi", host="800Gi", network="1Gbit")
    one, two = (answers_for(path, machine, pods, tmp_path)[""] for pods in (1, 2))
    assert one["network"] is None
    assert one["modes"]["resident"]["exchangeSeconds"] < two["modes"]["resident"]["exchangeSeconds"] / 100
    ran = CliRunner().invoke(plan, [str(path), "--gpu", "H100", "--hbm", "400Gi"])
    assert "Inside a pod exchanges are taken to go over the link to the host" in ran.output


@pytest.mark.parametrize("mode", ["resident", "optimizer-offload"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("way", ["keep", "recompute"])
def test_a_gangs_step_without_exchanges_is_that_of_as_many_accelerators(
    way: str, mode: str, gated: bool
) -> None:
    """As the scheduler's formula has it, which takes the model in even pieces; each process updates its part of the state."""
    shape, device = ModelShape.from_config(CONFIG_13B), accelerator("H200")
    assert device is not None
    batch = replace(BATCH, activations=way)
    for ranks in (1, 2):
        division = divide(batch.sequences, batch.micro_batch, ranks, "fast")
        demand = replace(demand_of(shape, batch), schedule="gated" if gated else "blocking")
        demand = over_ranks(demand, division, "optimizer")
        count = len(demand.groups) if mode == "optimizer-offload" else 0
        made = lay_out(demand, MemoryLimits(None, None, False), mode, count, activations=way)
        probed = GangMachine(device, Network(1e18, ""), 1).probe(shape, batch, made)
        nothing = Link(0.0, 1e18)
        found = predict(made, demand, replace(probed, links=Links(nothing, nothing)), division)
        share = made.offloaded_fraction
        one = step_seconds(shape, batch, mode, device, 1, share, made.slots, gated=gated)
        passes = step_seconds(shape, replace(batch, sequences=batch.sequences // ranks), mode, device)
        if ranks == 1:
            assert found.step_s == pytest.approx(one, rel=0.03)
        else:
            assert found.compute_s == pytest.approx(found_compute(shape, batch, device) / ranks, rel=0.01)
            assert found.step_s < min(one, passes)


def found_compute(shape: ModelShape, batch: BatchShape, device: Accelerator) -> float:
    times = micro_batch_times(shape, batch, device, 0.0)
    one = shape.layers * (times.block_forward_s + times.block_backward_s)
    whole = one + times.around_forward_s + times.around_backward_s
    return whole * batch.sequences / batch.micro_batch


def test_a_group_that_shares_sequences_uses_the_link_that_it_has() -> None:
    """Eight processes, four in a pod: of groups of two none leaves its pod, of eight each sends four sevenths to the other."""
    network, host = 1e9, 24e9
    assert among_neighbours(network, host, 2, 4).bytes_per_s == host
    assert among_neighbours(network, host, 8, 4).bytes_per_s == pytest.approx(1e9 / (4 * 4 / 7))
    assert among_neighbours(network, host, 2, 1).bytes_per_s == network
    assert among_neighbours(None, host, 4, 4).bytes_per_s == host


def test_copies_in_memory_and_the_room_for_snapshots_are_those_of_a_pod(tmp_path: Path) -> None:
    path = job(tmp_path, model={"config": GPT2})
    document = yaml.safe_load(path.read_text())
    document["spec"]["shape"] = {"minPods": 4, "maxPods": 4}
    document["spec"]["checkpoint"] = {"memory": {"everySteps": 10}}
    path.write_text(yaml.safe_dump(document))
    plans = [
        answers_for(path, machine_of("H100", host="64Gi"), pods, tmp_path)[""]["modes"]["resident"]
        for pods in (1, 4)
    ]
    alone, four = (each["plan"]["host"]["copies"] for each in plans)
    assert four == pytest.approx(alone / 4 * 4 / 3, rel=0.01)  # a quarter each, and a third of that of parity
    assert not any(each["checkpointBlocks"] for each in plans)  # 64 GiB have room
    ran = CliRunner().invoke(plan, [str(path), "--gpu", "H100", "--host", "64Gi", "--pods", "4"])
    assert re.search(
        r"\(checkpoint\.memory\) take .* of a process's host, and 1 of 4 pods may be lost\.", ran.output
    )
    assert "no room" not in ran.output


def test_the_micro_batch_that_hides_the_link_is_named_where_weights_are_on_the_host(tmp_path: Path) -> None:
    def asked(tokens: int) -> tuple[dict[str, Any], float]:
        options = ["--gpu", "H100", "--host", "512Gi"]
        _, answer = ask(tmp_path, *options, data={"uri": "pvc://text", "sequenceLength": tokens})
        return answer, answer["modes"]["parameter-offload"]["tokensPerSecond"]

    answer, _ = asked(1024)
    enough = answer["hidingTokens"]
    assert 1_000 < enough < 20_000
    assert asked(enough)[1] == pytest.approx(asked(2 * enough)[1], rel=0.12)  # but for what the update takes
    assert asked(enough // 4)[1] < 0.6 * asked(enough)[1]
    ran = CliRunner().invoke(plan, [str(job(tmp_path)), "--gpu", "H100", "--host", "512Gi"])
    assert (
        f"In parameter-offload a micro-batch of {enough:,} tokens hides the link to the host." in ran.output
    )
    assert ask(tmp_path)[1]["hidingTokens"] == 0  # a CPU


def test_it_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from busbar.workloads.training.plan_command import plan\n"
        f"plan([{str(job(tmp_path))!r}, '--gpu', 'H100', '--host', '200Gi'])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "auto *" in done.stdout


@pytest.mark.parametrize("config", [CONFIG_13B, GPT2], ids=["13b", "gpt2"])
@pytest.mark.parametrize("mode", ["resident", "optimizer-offload", "parameter-offload"])
@pytest.mark.parametrize(
    ("dtype", "sums"), [("float32", "weights"), ("bfloat16", "weights"), ("bfloat16", "float32")]
)
@pytest.mark.parametrize("freeze", [(), ("*.[012345].*",)], ids=["all", "frozen"])
def test_the_scheduler_says_the_number_of_the_engines_plan(
    config: dict[str, Any], mode: str, dtype: str, sums: str, freeze: tuple[str, ...]
) -> None:
    shape = ModelShape.from_config(config)
    batch = BatchShape(8, 1024, 1, dtype, freeze=freeze, gradient_sums=sums)
    demand = demand_of(shape, batch)
    least = layouts(demand, MemoryLimits(None, 0, False), mode)[0]
    admitted = memory(shape, batch, mode)
    assert admitted.device_bytes - RUNTIME_BYTES == pytest.approx(least.device_bytes, rel=0.01)
    assert admitted.host_bytes == pytest.approx(max(least.host_bytes, 0), rel=0.01)


@pytest.mark.parametrize("mode", ["resident", "parameter-offload"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("freeze", [(), ("*.[012345].*",)], ids=["all", "frozen"])
def test_the_scheduler_says_the_number_of_the_plan_without_a_backward_pass(
    mode: str, dtype: str, freeze: tuple[str, ...]
) -> None:
    for config in (CONFIG_13B, GPT2):
        shape = ModelShape.from_config(config)
        batch = BatchShape(8, 1024, 1, dtype, freeze=freeze, optimizer="ZerothOrder")
        least = layouts(demand_of(shape, batch), MemoryLimits(None, 0, False), mode)[0]
        admitted = memory(shape, batch, mode)
        assert admitted.device_bytes - RUNTIME_BYTES == pytest.approx(least.device_bytes, rel=0.01)
        assert admitted.host_bytes == pytest.approx(least.host_bytes, rel=0.01)
        assert workload_class(shape, batch) != workload_class(shape, replace(batch, optimizer="AdamW"))


def test_13_billion_parameters_train_on_24_gib_without_a_backward_pass(tmp_path: Path) -> None:
    code, answer = ask(
        tmp_path, "--gpu", "L4", "--host", "52Gi", optimizer={"name": "ZerothOrder", "learningRate": 1e-6}
    )
    assert (code, answer["modes"]["auto"]["plan"]["mode"]) == (0, "parameter-offload")
    made = answer["modes"]["auto"]["plan"]
    assert made["deviceBytes"] < 8 * 2**30
    assert "ZerothOrder is not possible here" in answer["modes"]["optimizer-offload"]["why"]
    assert ask(tmp_path, "--gpu", "L4", "--host", "64Gi")[0] == 2


@pytest.mark.parametrize(("allowed", "error"), [(2**40, 0.01), (40 * 2**30, 0.15)], ids=["all", "a part"])
def test_the_scheduler_says_the_number_of_the_plan_with_state_on_disk(allowed: int, error: float) -> None:
    """A part goes there by whole groups, which the formula does not know."""
    shape = ModelShape.from_config(CONFIG_13B)
    batch = BatchShape(8, 1024, 1, "bfloat16", scratch_disk_bytes=allowed)
    limits = MemoryLimits(None, 0, False, disk_bytes=allowed)
    every = layouts(demand_of(shape, batch), limits, "parameter-offload")
    least = min((each for each in every if each.disk_bytes <= allowed), key=lambda plan: plan.host_bytes)
    assert least.on_disk
    admitted = memory(shape, batch, "parameter-offload").host_bytes
    assert admitted == pytest.approx(least.host_bytes, rel=error)
    assert workload_class(shape, batch) != workload_class(shape, replace(batch, scratch_disk_bytes=0))


def test_state_on_disk_trains_what_the_host_has_no_room_for_and_says_so(tmp_path: Path) -> None:
    host = "--gpu", "H200", "--host", "64Gi"
    code, answer = ask(tmp_path, *host, mode="parameter-offload")
    assert code == 2
    code, answer = ask(tmp_path, *host, mode="parameter-offload", scratchDisk="130Gi")
    made = answer["modes"]["parameter-offload"]["plan"]
    assert (code, made["hostBytes"] < 63 * 2**30, made["diskBytes"] > 60 * 2**30) == (0, True, True)
    file = job(tmp_path, mode="auto", scratchDisk="130Gi")
    ran = CliRunner().invoke(plan, [str(file), "--gpu", "L4", "--host", "64Gi"])
    assert ran.exit_code == 0
    assert "of state are on disk: each step reads them and writes them back, in a time that the" in ran.output


def test_a_disk_of_a_known_rate_is_timed_and_refused_where_it_is_hopeless(tmp_path: Path) -> None:
    given: dict[str, Any] = {"mode": "parameter-offload", "scratchDisk": "130Gi"}
    code, answer = ask(tmp_path, "--gpu", "H200", "--host", "64Gi", "--disk", "3G", **given)
    chosen = answer["modes"]["parameter-offload"]
    assert code == 0
    assert chosen["diskSecondsPerStep"] == pytest.approx(2 * chosen["plan"]["diskBytes"] / 3e9)
    assert chosen["checkpointSeconds"] == pytest.approx(chosen["plan"]["checkpointBytes"] / 3e9)
    path = str(job(tmp_path, **given))
    ran = CliRunner().invoke(plan, [path, "--gpu", "H200", "--host", "64Gi", "--disk", "3G"])
    assert re.search(r"writes them back, in \d+(\.\d)? s if nothing hides them, on top of", ran.output)
    assert re.search(r"A checkpoint has .*, which the disk takes in \d+(\.\d)? s\.", ran.output)
    code, answer = ask(tmp_path, "--gpu", "H200", "--host", "64Gi", "--disk", "50M", **given)
    assert (code, answer["fits"]) == (2, False)
    assert "more than 600 s are refused" in answer["modes"]["parameter-offload"]["why"]
    assert answer["modes"]["resident"].get("diskSecondsPerStep") is None


@pytest.mark.parametrize("sharding", ["optimizer", "gradients", "parameters"])
@pytest.mark.parametrize("order", ["fast", "fixed"])
@pytest.mark.parametrize("mode", ["resident", "optimizer-offload"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_scheduler_says_the_number_of_the_plan_of_each_pod_of_a_gang(
    ranks: int, mode: str, order: str, sharding: str
) -> None:
    for sequences, config in ((8, CONFIG_13B), (24, GPT2)):
        sums = "weights" if config is GPT2 else "float32"
        shape = ModelShape.from_config(config)
        batch = BatchShape(sequences, 1024, 1, "bfloat16", gradient_sums=sums)
        division = divide(sequences, 1, ranks, order)
        demand = over_ranks(demand_of(shape, batch), division, sharding)
        least = layouts(demand, MemoryLimits(None, 0, False), mode)[0]
        admitted = memory(shape, batch, mode, Gang(ranks, sharding, order == "fixed"))
        assert admitted.device_bytes - RUNTIME_BYTES == pytest.approx(least.device_bytes, rel=0.01)
        assert admitted.host_bytes == pytest.approx(least.host_bytes, rel=0.01)


@pytest.mark.parametrize(
    ("layers", "dtype", "tokens"),
    [(2, "float32", 512), (4, "bfloat16", 512), (4, "float32", 128), (6, "float32", 2048)],
)
def test_the_formula_of_activations_is_near_what_fake_tensors_say(
    layers: int, dtype: str, tokens: int
) -> None:
    config = {
        **LLAMA,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": layers,
        "vocab_size": 8192,
    }
    given = {**config, "max_position_embeddings": 2048}
    made: Any = AutoModelForCausalLM.from_config
    model, peaks = peak_activation_bytes(
        lambda: made(AutoConfig.for_model(**given), dtype=getattr(torch, dtype)),
        2,
        tokens,
        torch.device("cpu"),
    )
    shape, batch = ModelShape.from_config(config), BatchShape(2, tokens, 2, dtype)
    assert activations(shape, batch) == pytest.approx(peaks.kept, rel=0.12)
    _, alone = peak_activation_bytes(
        lambda: made(AutoConfig.for_model(**given), dtype=getattr(torch, dtype)),
        2,
        tokens,
        torch.device("cpu"),
        backward=False,
    )
    assert forward_activations(shape, batch) == pytest.approx(alone.kept, rel=0.06)
    assert activations(shape, replace(batch, activations="recompute")) == pytest.approx(
        peaks.recomputed, rel=0.06
    )
    assert activations(shape, replace(batch, activations="swap")) == pytest.approx(peaks.swapped, rel=0.06)
    assert swapped_activations(shape, batch) == pytest.approx(peaks.on_host, rel=0.001)
    sizes = [group.size.parameters for group in make_groups(model)]
    assert [group.parameters for group in demand_of(shape, batch).groups] == pytest.approx(sizes, rel=0.01)


def test_offload_costs_the_time_of_its_state_on_the_link() -> None:
    """All of it in the blocking schedule; in the gated one what neither the next forward pass nor slots hide."""
    device, shape, mode = accelerator("H200"), ModelShape.from_config(CONFIG_13B), "optimizer-offload"
    assert device is not None
    link_s = 10 * shape.parameters / (device.link_gb_per_s * 1e9)
    resident = step_seconds(shape, BATCH, "resident", device)
    blocking = step_seconds(shape, BATCH, mode, device, gated=False)
    gated, with_slots = (step_seconds(shape, BATCH, mode, device, slots=slots) for slots in (3, 40))
    assert blocking - resident == pytest.approx(link_s, rel=0.05)
    assert resident < with_slots < gated < blocking
    first = 1 / (BATCH.sequences * 3)  # of the computation: the forward pass of the first micro-batch
    assert gated == pytest.approx(resident * (1 - first) + link_s, rel=0.05)
    assert BATCH.tokens / tokens_per_s(shape, BATCH, mode, device) == pytest.approx(gated)


def test_the_answer_says_which_schedule_its_seconds_are_of(tmp_path: Path) -> None:
    options = ("--gpu", "H100", "--host", "192Gi")
    found = {}
    for schedule in ("auto", "blocking"):
        code, answer = ask(tmp_path, *options, mode="optimizer-offload", schedule=schedule)
        chosen = answer["modes"]["optimizer-offload"]
        assert code == 0
        found[chosen["plan"]["schedule"]] = chosen["secondsPerStep"]
    assert found["gated"] < found["blocking"]


ADAPTERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (LLAMA, {"rank": 8, "targets": ["q_proj", "self_attn.o_proj"]}),
    "all layers": (LLAMA, {"rank": 4, "dora": True, "merge": True}),
    "gpt2": ({**GPT2, "n_embd": 48, "n_layer": 2, "n_head": 4}, {"rank": 8, "targets": ["c_proj"]}),
}


@pytest.mark.parametrize(("config", "adapter"), ADAPTERS.values(), ids=ADAPTERS.keys())
def test_an_adapters_size_is_that_of_the_engines_own_groups(
    config: dict[str, Any], adapter: dict[str, Any]
) -> None:
    given = {"vocab_size": 320, "bos_token_id": 0, "eos_token_id": 0, **config}
    spec = parse_engine(engine(model={"uri": "pvc://base"}, tokenizer=None, adapter=adapter))
    assert spec.adapter is not None
    made: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        model = attach(made(AutoConfig.for_model(**given)), spec.adapter, 0)
    shape, batch = ModelShape.from_config(given), BatchShape(2, 32, 2)
    demand = demand_of(shape, batch, adapter=spec.adapter)
    assert demand.groups == tuple(group.size for group in make_groups(model))
    assert demand.merge_bytes == (merge_bytes(model) if spec.adapter.merge else 0)
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert parameters(shape, spec.adapter) == trained
    assert demand.frozen_bytes == pytest.approx(4 * (model_parameters(model) - trained), rel=0.05)


FROZEN: dict[str, tuple[dict[str, Any], list[str], dict[str, int]]] = {
    "embedding and a block": (
        LLAMA,
        ["model.embed_tokens.*", "model.layers.[0-0].*"],
        {"block-1": 0, "head": 0},
    ),
    "a tied head": (LLAMA, ["lm_head.*"], {"block-0": 0, "block-1": 0, "head": 0}),
    "an untied end": (
        {**LLAMA, "tie_word_embeddings": False},
        ["lm_head.*", "model.norm.*"],
        {"embedding": 0, "block-0": 0, "block-1": 0},
    ),
    "matrices of gpt2": (
        {**GPT2, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
        ["*.h.0.*.c_*.weight", "transformer.wte.*"],
        {"embedding": 64 * 64, "block-0": 64 * 11, "block-1": 64 * 11, "head": 64},
    ),
}
"""Patterns, and by group how many parameters (biases, positions) the size of a shape does not have."""


@pytest.mark.parametrize(("config", "patterns", "unsized"), FROZEN.values(), ids=FROZEN.keys())
def test_what_is_left_beside_frozen_parts_is_that_of_the_engines_own_groups(
    config: dict[str, Any], patterns: list[str], unsized: dict[str, int]
) -> None:
    given = {"vocab_size": 320, "bos_token_id": 0, "eos_token_id": 0, **config}
    made: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        model = made(AutoConfig.for_model(**given))
    freeze(model, patterns)
    shape, batch = ModelShape.from_config(given), BatchShape(2, 32, 2, freeze=tuple(patterns))
    demand = demand_of(shape, batch)
    ours = {group.name: group.parameters for group in demand.groups}
    theirs = {
        group.name: sum(member.parameter.numel() for member in group.members) for group in make_groups(model)
    }
    assert set(theirs) == set(unsized)
    assert set(ours) <= set(theirs)
    for name, size in theirs.items():
        assert 0 <= ours.get(name, 0) - (size - unsized[name]) < 1024
    frozen = sum(each.numel() for each in model.parameters() if not each.requires_grad)
    assert demand.frozen_bytes == 4 * frozen
    assert demand.result_bytes == demand.model_bytes
    assert unknown_patterns(shape, patterns) == []


def test_frozen_parts_fit_where_training_everything_does_not(tmp_path: Path) -> None:
    options = ["--gpu", "H100", "--host", "64Gi"]
    patterns = ["model.embed_tokens.*", "model.layers.[0-9].*", "model.layers.[12]?.*"]
    whole, _ = ask(tmp_path, *options)
    code, answer = ask(tmp_path, *options, freeze=patterns)
    assert (whole, code) == (2, 0)
    frozen = answer["parameters"] - answer["trainableParameters"]
    assert answer["modes"]["auto"]["plan"]["device"]["base"] == 2 * frozen
    assert frozen == pytest.approx(0.75 * answer["parameters"], rel=0.02)
    ran = CliRunner().invoke(plan, [str(job(tmp_path, freeze=[*patterns, "model.bias_*"])), *options])
    assert "million are trained (frozen: model.bias_*, model.embed_tokens.*, " in ran.output
    assert "What model.bias_* matches is not known without the model, and counts as trained" in ran.output
    ran = CliRunner().invoke(plan, [str(job(tmp_path, freeze=["*"])), *options])
    assert ran.exit_code == 2
    assert "spec.engine.freeze: leaves nothing to train, as" in ran.output
    given = {**CONFIG_13B, "model_type": "qwen2"}  # which has biases
    code, answer = ask(tmp_path, *options, model={"config": given}, freeze=["*.weight"])
    assert (code, answer["trainableParameters"]) == (0, 0)  # as far as sizes are known


def test_patterns_of_an_architecture_that_is_not_known_by_names_count_as_trained(tmp_path: Path) -> None:
    given = {**CONFIG_13B, "model_type": "gpt_neox"}
    options = ["--gpu", "H200", "--host", "400Gi"]
    _, whole = ask(tmp_path, *options, model={"config": given})
    _, answer = ask(tmp_path, *options, model={"config": given}, freeze=["gpt_neox.layers.0.*"])
    assert answer["unknownPatterns"] == ["gpt_neox.layers.0.*"]
    assert answer["trainableParameters"] == answer["parameters"]
    assert answer["modes"] == whole["modes"]


def model_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_an_adapter_fits_where_training_everything_does_not(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text(json.dumps(CONFIG_13B))
    options = ["--gpu", "H100", "--host", "64Gi", "--claims", str(tmp_path)]
    whole, _ = ask(tmp_path, *options, model={"uri": "pvc://base"})
    code, answer = ask(tmp_path, *options, model={"uri": "pvc://base"}, adapter={"rank": 16})
    assert (whole, code) == (2, 0)
    assert answer["trainableParameters"] == pytest.approx(answer["parameters"] / 200, rel=0.2)
    assert answer["modes"]["auto"]["plan"]["device"]["base"] == 2 * answer["parameters"]
    file = job(tmp_path, model={"uri": "pvc://base"}, adapter={"rank": 16, "targets": ["query_key_value"]})
    ran = CliRunner().invoke(plan, [str(file), *options])
    assert ran.exit_code == 2
    assert "query_key_value has no size that is known without the model" in ran.output
    ran = CliRunner().invoke(plan, [str(job(tmp_path, model={"uri": "pvc://base"}, adapter={})), *options])
    assert "million are trained (LoRA of rank 16 on all linear layers)" in ran.output


@pytest.mark.parametrize("config", [TINY, GPT2, CONFIG_13B], ids=["tiny", "gpt2", "13b"])
@pytest.mark.parametrize(
    ("mode", "pods", "each"),
    [
        ("resident", 1, 1),
        ("resident", 4, 1),
        ("resident", 1, 4),
        ("optimizer-offload", 1, 1),
        ("optimizer-offload", 4, 1),
        ("optimizer-offload", 2, 2),
        ("parameter-offload", 1, 1),
    ],
)
@pytest.mark.parametrize("copied", [False, True], ids=["", "copied"])
@pytest.mark.parametrize("gpu", ["H200", "cpu"])
def test_a_pod_with_the_memory_that_the_scheduler_asks_for_has_room_for_the_plan(
    config: dict[str, Any], mode: str, pods: int, each: int, copied: bool, gpu: str, tmp_path: Path
) -> None:
    """`each` are the processes of a pod."""
    data, parallelism = {"uri": "pvc://text", "sequenceLength": 512}, {"processesPerPod": each}
    path = job(tmp_path, mode=mode, model={"config": config}, data=data, parallelism=parallelism)
    document = yaml.safe_load(path.read_text())
    document["spec"]["shape"] = {"minPods": pods, "maxPods": pods, "acceleratorsPerPod": each}
    document["spec"]["checkpoint"] = {"memory": {"everySteps": 10} if copied else None}
    path.write_text(yaml.safe_dump(document))
    shape, batch = ModelShape.from_config(config), BatchShape(8, 512, 1, "bfloat16")
    gang = Gang(pods * each, per_pod=each)
    host_mib = prior(shape, batch, mode, gpu, gang=gang).host_memory_mib
    host_mib += copies_mib(shape, batch, gang, min(1, pods - 1) * each) if copied else 0
    options = ["--gpu", gpu, "--host", f"{host_mib}Mi", "--pods", str(pods)]
    options += [] if gpu == "cpu" else ["--hbm", "400Gi"]
    ran = CliRunner().invoke(plan, [str(path), *options])
    assert ran.exit_code == 0, ran.output


def test_both_keep_as_much_free_for_python_the_driver_and_the_supervisor() -> None:
    assert HOST_RUNTIME_BYTES == CUDA_RESERVE_BYTES + PREPARATION_BYTES
    assert CPU_RUNTIME_BYTES == RESERVE_BYTES + PREPARATION_BYTES
    shape, batch = ModelShape.from_config(GPT2), BatchShape(8, 512, 1, "bfloat16")
    demand = replace(demand_of(shape, batch), memory_copies=COPIES)
    assert copies_mib(shape, batch, Gang(), 0) == pytest.approx(
        (copy_bytes(demand) + SUPERVISOR_BYTES) / 2**20, abs=1.0
    )
