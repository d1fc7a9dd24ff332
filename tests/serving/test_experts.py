"""Models with experts: the tokens of `transformers` whatever happens to a request, and every form of the weights."""

from __future__ import annotations

import copy
import random
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.serving.adapted import adapted_greedy, save_adapter
from tests.serving.engines import generate, greedy_params, load_engine, tokens_of
from tests.serving.models import VOCAB, greedy, save_model
from tests.serving.streamed import needs_of, streamed_settings
from tests.serving.test_adapters import run

from busbar.workloads.serving.architecture import Routing
from busbar.workloads.serving.errors import AdapterInvalid, MemoryTooSmall
from busbar.workloads.serving.experts import DenseMlp, EachExpert, ExpertMlp, StackedExperts
from busbar.workloads.serving.linear import PlainLinear
from busbar.workloads.serving.loader import Loaded
from busbar.workloads.serving.report import table_report
from busbar.workloads.serving.settings import AdapterSource, EngineSettings, ServerSettings
from busbar.workloads.serving.sleeping import SleepLevel, fall_asleep, wake
from busbar.workloads.serving.weightcodes import FORMS, INT8, WeightForm, code

FAMILIES = ("mixtral", "qwen3_moe")
FEW = {5: 50.0, 6: 50.0, 7: 50.0}
"""Added to their logits, leaves the model three tokens, so that guesses are right and wrong."""


@dataclass(frozen=True)
class Saved:
    folder: Path
    model: Any


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(request.param)
    return Saved(folder, save_model(folder, request.param, num_hidden_layers=3))


def prompts(seed: int, count: int = 5) -> list[list[int]]:
    """All begin alike."""
    rng = random.Random(seed)
    beginning = [rng.randrange(1, VOCAB) for _ in range(20)]
    return [beginning + [rng.randrange(1, VOCAB) for _ in range(rng.randrange(10, 50))] for _ in range(count)]


def answers(loaded: Loaded, asked: list[list[int]], params: Any) -> list[list[int]]:
    return [tokens_of(deltas) for deltas in generate(loaded, asked, params)]


@pytest.mark.parametrize("swap", [False, True], ids=["recomputed", "swapped"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["in place", "deterministic"])
def test_tokens_under_pressure_are_those_of_transformers(
    saved: Saved, deterministic: bool, swap: bool
) -> None:
    """Prompts in chunks, guesses, preemptions with and without a host tier, and a prefix cache that is full."""
    block = needs_of(EngineSettings(saved.folder, block_tokens=16)).block_bytes
    loaded = load_engine(
        saved.folder,
        deterministic=deterministic,
        kv_bytes=13 * block,
        host_kv_bytes=200 * block if swap else 0,
        max_model_len=150,
        max_batched_tokens=24,
        speculate=5,
    )
    plain, few = prompts(1), [each[:25] + [5, 6, 7] * 6 for each in prompts(2, 3)]
    params = [greedy_params(40)] * len(plain) + [greedy_params(40, logit_bias=tuple(FEW.items()))] * len(few)
    bias = {(token,): more for token, more in FEW.items()}
    expected = [greedy(saved.model, p, 40) for p in plain]
    expected += [greedy(saved.model, p, 40, sequence_bias=bias) for p in few]
    for _ in range(2):
        assert answers(loaded, plain + few, params) == expected
    scheduler, speculation = loaded.core.scheduler, loaded.core.speculation
    assert scheduler.preemption_count > 0
    assert scheduler.cache_hits > 0
    assert speculation is not None
    assert 0 < speculation.accepted_total < speculation.proposed_total
    assert (scheduler.pool.host.moves_total[False] > 0) is swap
    assert scheduler.pool.used == 0


def test_log_probabilities_are_bit_equal_alone_and_in_a_crowd(saved: Saved) -> None:
    loaded = load_engine(saved.folder, deterministic=True, max_batched_tokens=40, prefix_cache=False)
    assert loaded.batch_invariant
    params, asked = greedy_params(12, ignore_eos=True, logprobs=2), prompts(3)
    alone = [generate(loaded, [each], params)[0] for each in asked]
    crowd = generate(load_engine(saved.folder, deterministic=True), asked, params)
    assert [[(d.tokens, d.logprobs) for d in each] for each in crowd] == [
        [(d.tokens, d.logprobs) for d in each] for each in alone
    ]


def log_probabilities(folder: Path, asked: list[list[int]], **changes: Any) -> torch.Tensor:
    found = generate(load_engine(folder, **changes), asked, greedy_params(1, logprobs=VOCAB))
    return torch.tensor([[dict(d[0].logprobs[0].top)[t] for t in range(VOCAB)] for d in found]).double()


@pytest.mark.parametrize("family", FAMILIES)
def test_in_bfloat16_the_error_is_no_larger_than_that_of_transformers(family: str, tmp_path: Path) -> None:
    """Against float64 with the same rounded weights, in sum over prompts."""
    model = save_model(tmp_path, family, initializer_range=0.1).bfloat16()
    model.save_pretrained(tmp_path)
    asked = prompts(4, 12)

    def of(model: Any) -> torch.Tensor:
        with torch.no_grad():
            rows = [model(torch.tensor([each])).logits[0, -1].double() for each in asked]
        return torch.stack(rows).log_softmax(-1)

    theirs = of(model)
    model.config._experts_implementation = "eager"  # torch's grouped product knows no float64
    exact = of(model.double())
    ours = log_probabilities(tmp_path, asked, dtype="bfloat16")
    error, their_error = ((each - exact).pow(2).mean().sqrt() for each in (ours, theirs))
    assert 0 < error <= their_error


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_experts_in_codes_are_those_of_the_decoded_weights(
    form: WeightForm, saved: Saved, tmp_path: Path
) -> None:
    """Resident and streamed; the router stays in float."""
    decoded = copy.deepcopy(saved.model)
    with torch.no_grad():
        for name, weight in decoded.named_parameters():
            if name.endswith(("proj", "proj.weight")):
                rows = code(weight.reshape(-1, weight.shape[-1]), form)
                weight.copy_(rows.decoded(0, rows.rows, torch.float32).view_as(weight))
    asked, params = prompts(5, 3), greedy_params(8, ignore_eos=True, logprobs=2)
    changes: dict[str, Any] = {"weights_dtype": form.name, "deterministic": True}
    resident = load_engine(saved.folder, **changes)
    assert resident.batch_invariant
    plain = load_engine(saved.folder).core.runner.decoder.weights.layer_bytes
    assert resident.core.runner.decoder.weights.layer_bytes < plain / (3 if form is INT8 else 5)
    streamed = load_engine(saved.folder, **streamed_settings(saved.folder, 0, tmp_path, **changes))
    assert streamed.streaming is not None
    assert streamed.streaming.plan.places == 2 * streamed.arch.routing.per_token  # type: ignore[union-attr]
    found, same = (generate(loaded, asked, params) for loaded in (resident, streamed))
    assert [tokens_of(d) for d in found] == [greedy(decoded, p, 8, eos_token_id=None) for p in asked]
    assert [[d.logprobs for d in each] for each in same] == [[d.logprobs for d in each] for each in found]
    assert streamed.weight_bytes == resident.weight_bytes


def test_a_layer_may_be_streamed_with_all_its_experts(saved: Saved, tmp_path: Path) -> None:
    loaded = load_engine(saved.folder, **streamed_settings(saved.folder, 0, tmp_path, stream_unit="layers"))
    asked = prompts(7, 3)
    assert answers(loaded, asked, greedy_params(12)) == [greedy(saved.model, p, 12) for p in asked]
    resident = load_engine(saved.folder)
    report = table_report(loaded, ServerSettings(EngineSettings(saved.folder), "tiny"))
    assert (report.mode, report.weight_bytes) == ("stream", resident.weight_bytes)
    assert report.streamed_bytes == 3 * needs_of(EngineSettings(saved.folder)).layer_bytes
    least = needs_of(EngineSettings(saved.folder)).least_bytes
    with pytest.raises(MemoryTooSmall, match="even with its layers streamed"):
        load_engine(saved.folder, weights="stream", memory_bytes=least // 2, stream_unit="layers")


@pytest.mark.parametrize("level", [SleepLevel.WEIGHTS_KEPT, SleepLevel.WEIGHTS_DROPPED])
def test_answers_are_the_same_after_sleep(saved: Saved, level: SleepLevel) -> None:
    loaded, asked = load_engine(saved.folder), prompts(8, 2)
    before = answers(loaded, asked, greedy_params(12))
    fall_asleep(loaded, level)
    assert (loaded.core.runner.decoder.weights.bytes == 0) is (level is SleepLevel.WEIGHTS_DROPPED)
    wake(loaded)
    assert answers(loaded, asked, greedy_params(12)) == before


def test_adapters_of_attention_are_those_of_peft_and_others_are_refused(saved: Saved, tmp_path: Path) -> None:
    """PEFT's `all-linear` means experts and routers, too."""
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    adapted = {"all": save_adapter(saved.model, tmp_path / "all", 1, target_modules=attention)}
    adapted["two"] = save_adapter(saved.model, tmp_path / "two", 2, target_modules=["q_proj", "o_proj"])
    sources = tuple(AdapterSource(name, tmp_path / name) for name in adapted)
    names, asked = ["all", None, "two", "all"], prompts(9, 4)
    loaded = load_engine(saved.folder, adapters=sources, max_batched_tokens=48)
    found = [tokens_of(each) for each in run(loaded, asked, names, greedy_params(12))]
    assert found == [
        greedy(saved.model, p, 12) if n is None else adapted_greedy(adapted[n], p, 12)
        for n, p in zip(names, asked, strict=True)
    ]
    save_adapter(save_model(tmp_path / "dense", "llama", num_hidden_layers=3), tmp_path / "mlp", 3)
    with pytest.raises(AdapterInvalid, match="adapters of experts are not served"):
        load_engine(saved.folder, adapters=(AdapterSource("mlp", tmp_path / "mlp"),))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own, about the patterns that it made itself
        save_adapter(saved.model, tmp_path / "inside", 4)
    with pytest.raises(AdapterInvalid, match=r"target_parameters.*is not served"):
        load_engine(saved.folder, adapters=(AdapterSource("inside", tmp_path / "inside"),))


def test_shards_are_read_and_the_report_counts_what_a_token_uses(saved: Saved, tmp_path: Path) -> None:
    saved.model.save_pretrained(tmp_path, max_shard_size="100KB")
    (tmp_path / "tokenizer.json").write_bytes((saved.folder / "tokenizer.json").read_bytes())
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    whole, loaded = load_engine(saved.folder), load_engine(tmp_path)
    assert answers(loaded, prompts(10, 2), greedy_params(8)) == answers(
        whole, prompts(10, 2), greedy_params(8)
    )
    report = table_report(loaded, ServerSettings(EngineSettings(tmp_path), "tiny"))
    counted = [
        p.numel() for n, p in saved.model.named_parameters() if "q_norm" not in n and "k_norm" not in n
    ]
    assert report.parameters == sum(counted)
    routing = loaded.arch.routing
    assert routing is not None
    idle = 3 * (routing.experts - routing.per_token) * 3 * 64 * loaded.arch.intermediate
    assert report.active_parameters == report.parameters - idle


# -- the layer itself ----------------------------------------------------------------------------------

EXPERTS, HIDDEN, INNER = 7, 24, 16


def layer_of(per_token: int, normalised: bool, stacked: bool) -> tuple[ExpertMlp, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    router = torch.randn((EXPERTS, HIDDEN), generator=generator)
    gate_up = torch.randn((EXPERTS, 2 * INNER, HIDDEN), generator=generator)
    down = torch.randn((EXPERTS, HIDDEN, INNER), generator=generator)
    each = [DenseMlp(PlainLinear(g, None), PlainLinear(d, None)) for g, d in zip(gate_up, down, strict=True)]
    experts = StackedExperts(gate_up, down) if stacked else EachExpert(each)
    return ExpertMlp(Routing(EXPERTS, per_token, normalised), router, experts), [router, gate_up, down]


@pytest.mark.parametrize("stacked", [False, True], ids=["one by one", "grouped product"])
@pytest.mark.parametrize(("per_token", "normalised"), [(1, True), (3, False), (3, True), (EXPERTS, False)])
@pytest.mark.parametrize("rows", [1, 2, 33])
def test_each_row_is_the_weighted_sum_of_its_experts(
    rows: int, per_token: int, normalised: bool, stacked: bool
) -> None:
    """Also where some experts have no row; the grouped product is that of a GPU."""
    layer, tensors = layer_of(per_token, normalised, stacked)
    router, gate_up, down = (each.double() for each in tensors)
    x = torch.randn((rows, HIDDEN), generator=torch.Generator().manual_seed(1))
    found = layer(x, least_rows=4)
    for row, got in zip(x.double(), found, strict=True):
        scores = (router @ row).softmax(-1)
        best = scores.topk(per_token)
        total = best.values.sum() if normalised else 1.0
        expected = torch.zeros(HIDDEN, dtype=torch.float64)
        for score, expert in zip(best.values, best.indices, strict=True):
            gate, up = (gate_up[expert] @ row).chunk(2)
            expected += score / total * (down[expert] @ (torch.nn.functional.silu(gate) * up))
        assert torch.allclose(got.double(), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    sizes = sum(each.numel() * each.element_size() for each in tensors)
    assert layer.bytes == sizes
    assert torch.equal(layer.moved(torch.clone)(x, least_rows=4), found)


def test_an_expert_that_nobody_chose_is_not_computed() -> None:
    layer, _ = layer_of(2, True, stacked=False)
    x = torch.randn((1, HIDDEN), generator=torch.Generator().manual_seed(1))
    _, chosen = layer.choose(x)

    class Unread:
        bytes = 0

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("computed")

        def moved(self, move: object) -> Unread:
            return self

    assert isinstance(layer.experts, EachExpert)
    each = [
        expert if index in chosen else DenseMlp(Unread(), Unread())
        for index, expert in enumerate(layer.experts._experts)
    ]
    assert torch.equal(ExpertMlp(layer.routing, layer.router, EachExpert(each))(x), layer(x))
