"""Keys and values in 8 and 4 bits: errors, bytes, and answers that do not depend on company, preemption or sleep."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.serving.engines import generate, greedy_params, load_engine, tokens_of
from tests.serving.models import VOCAB, save_model

from busbar.workloads.serving.delta import Delta
from busbar.workloads.serving.kvcache import KvCache, KvShape
from busbar.workloads.serving.kvcodes import FORMS, INT4, INT8, KvForm, decode, encode
from busbar.workloads.serving.loader import Loaded
from busbar.workloads.serving.probe import LAYOUTS, try_blocks
from busbar.workloads.serving.report import table_report
from busbar.workloads.serving.sampling import SamplingParams, TokenLogprob
from busbar.workloads.serving.settings import EngineSettings, ServerSettings
from busbar.workloads.serving.sleeping import SleepLevel, fall_asleep, wake

if TYPE_CHECKING:
    from tests.serving.adapted import Family

LEVELS = {INT8: 254, INT4: 15}
"""Steps between the smallest and the largest code."""
BOTH = [pytest.param(form, id=form.name) for form in FORMS.values()]


def random_prompts(seed: int, count: int, longest: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, VOCAB) for _ in range(rng.randrange(9, longest))] for _ in range(count)]


def logprobs_of(deltas: Iterable[Delta]) -> list[TokenLogprob]:
    return [each for delta in deltas for each in delta.logprobs]


@pytest.mark.parametrize("form", BOTH)
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    width=st.sampled_from([2, 16, 20, 64, 128]),
    size=st.sampled_from([1e-3, 1.0, 300.0]),
    shift=st.sampled_from([0.0, 1.0, -40.0]),
)
def test_a_number_comes_back_within_half_a_step(
    form: KvForm, seed: int, width: int, size: float, shift: float
) -> None:
    """A step is the token's range in its head, divided by the codes; float16 terms cost a thousandth more, and
    4e-6 where they are subnormal."""
    x = torch.randn((7, width), generator=torch.Generator().manual_seed(seed)) * size + shift * size
    codes, terms = encode(x, form)
    assert (codes.element_size(), terms.dtype) == (1, torch.float16)
    assert codes.shape == (7, form.code_bytes(width))
    span = 2 * x.abs().amax(-1) if form is INT8 else x.amax(-1) - x.amin(-1)
    most = 0.5 * span / LEVELS[form] + x.abs().amax(-1) * 2e-3 + 4e-6
    assert ((decode(codes, terms, form, torch.float32) - x).abs().amax(-1) <= most).all()


@pytest.mark.parametrize("form", BOTH)
def test_equal_numbers_and_very_small_or_large_ones_stay_finite_and_close(form: KvForm) -> None:
    x = torch.tensor([[0.0] * 8, [3.0] * 8, [-3.0] * 8, [1e-9] * 8, [5e4, *[0.0] * 7]])
    back = decode(*encode(x, form), form, torch.float32)
    assert (back - x).abs().amax(-1).tolist() == pytest.approx([0, 0, 0, 0, 0], abs=20)
    assert torch.equal(back[0], x[0])
    assert torch.allclose(back[1:3], x[1:3], rtol=2e-3)


@pytest.mark.parametrize("form", BOTH)
def test_a_tokens_codes_do_not_depend_on_its_neighbours(form: KvForm) -> None:
    x = torch.randn((37, 20), generator=torch.Generator().manual_seed(3))
    codes, terms = encode(x, form)
    for first, stop in ((0, 1), (5, 12), (36, 37)):
        alone = encode(x[first:stop], form)
        assert torch.equal(alone[0], codes[first:stop])
        assert torch.equal(alone[1], terms[first:stop])
    assert torch.equal(
        decode(codes, terms, form, torch.float32)[5:6], decode(codes[5:6], terms[5:6], form, torch.float32)
    )


@pytest.mark.parametrize(("form", "most"), [(INT8, 0.53), (INT4, 0.29)], ids=["int8", "int4"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_block_takes_a_half_and_a_quarter_of_bfloat16(form: KvForm, most: float, head_dim: int) -> None:
    plain = KvShape(3, 2, head_dim, 64, torch.bfloat16)
    coded = replace(plain, form=form)
    assert coded.block_bytes <= most * plain.block_bytes
    cache = KvCache(coded, 4, torch.device("cpu"))
    assert cache.bytes == 5 * coded.block_bytes
    cache.release()
    assert cache.bytes == 0


@pytest.mark.parametrize("form", BOTH)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "layouts"),
    [
        (4, 2, LAYOUTS),
        (8, 2, [((1, 2, 3 + i), 9 + i % 3, 1) for i in range(5)] + [((1, 9), 6, 1), ((10, 11), 5, 1)]),
        (4, 2, [((1,), 2, 1), ((40,), 3, 1)]),  # far apart: gathered
        (4, 2, [((9, 2, 7), 8, 5)]),
    ],
    ids=["mixed", "shared", "far apart", "prompt with a past"],
)
def test_attention_in_place_is_that_of_float64_on_what_is_stored(
    form: KvForm, heads: int, kv_heads: int, layouts: list[tuple[tuple[int, ...], int, int]]
) -> None:
    assert try_blocks(KvShape(2, kv_heads, 16, 8, torch.float32, form), heads, layouts).max_error < 1e-5


@pytest.mark.parametrize("form", [None, *BOTH])
def test_what_is_read_is_written_elsewhere_and_no_blocks_are_no_bytes(form: KvForm | None) -> None:
    shape = KvShape(2, 3, 16, 4, torch.float32, form)
    one, other = KvCache(shape, 5, torch.device("cpu")), KvCache(shape, 5, torch.device("cpu"))
    keys, values = torch.randn((2, 3, 3, 16), generator=torch.Generator().manual_seed(0))
    one.store(1, one.slot_index(torch.tensor([2, 2, 4]), torch.tensor([0, 3, 1])), keys, values)
    other.write([1, 3], memoryview(one.read([2, 4])))
    assert torch.equal(other.contents(1, torch.tensor([1, 3])), one.contents(1, torch.tensor([2, 4])))
    before = other.read([0, 1, 2, 3, 4])
    assert one.read([]) == b""  # the last stage of a migration whose blocks are all at the other side
    other.write([], memoryview(b""))
    assert other.read([0, 1, 2, 3, 4]) == before


@pytest.mark.parametrize("form", BOTH)
def test_whole_contexts_and_single_blocks_hold_the_same_numbers(form: KvForm) -> None:
    shape = KvShape(2, 3, 16, 4, torch.float32, form)
    cache = KvCache(shape, 5, torch.device("cpu"))
    blocks, offsets = torch.tensor([2, 2, 4]), torch.tensor([0, 3, 1])
    keys, values = torch.randn((2, 3, 3, 16), generator=torch.Generator().manual_seed(0))
    cache.store(1, cache.slot_index(blocks, offsets), keys, values)
    whole = cache.contents(1, torch.tensor([2, 4]))  # [blocks, 2, heads, slots, dim]
    assert torch.equal(whole[[0, 0, 1], 0, :, offsets], cache.as_stored(keys))
    assert torch.equal(whole[[0, 0, 1], 1, :, offsets], cache.as_stored(values))
    assert cache.contents(0, torch.tensor([2, 4])).count_nonzero() == 0
    got = cache.gather(1, cache.run_index(torch.tensor([[2, 4]])), 1)
    for kv in (0, 1):
        assert torch.equal(got[kv].view(3, 2, 4, 16), whole[:, kv].transpose(0, 1))


def blocks_of(form: KvForm, blocks: int) -> int:
    """KV memory of so many usable blocks of the tiny model, 16 tokens each."""
    return (blocks + 1) * KvShape(2, 2, 16, 16, torch.float32, form).block_bytes


PROMPTS = random_prompts(3, 5, 90)
PARAMS = [
    SamplingParams(max_tokens=30, temperature=heat, seed=i, ignore_eos=True, logprobs=2)
    for i, heat in enumerate((0.0, 0.9, 0.0, 1.1, 0.0))
]


@pytest.mark.parametrize("form", BOTH)
def test_a_crowd_preemptions_shared_blocks_and_guesses_change_no_bit(
    form: KvForm, llama: tuple[Path, Any]
) -> None:
    alone = load_engine(llama[0], kv_dtype=form.name, deterministic=True, prefix_cache=False)
    assert alone.batch_invariant
    expected = [generate(alone, [p], q)[0] for p, q in zip(PROMPTS, PARAMS, strict=True)]
    small = load_engine(
        llama[0],
        kv_dtype=form.name,
        deterministic=True,
        kv_bytes=blocks_of(form, 14),
        max_batched_tokens=24,
        max_running=6,
        speculate=5,
    )
    assert small.core.scheduler.pool.total == 14
    for _ in range(2):  # the second time with cached blocks
        found = generate(small, PROMPTS, PARAMS)
        assert [tokens_of(d) for d in found] == [tokens_of(d) for d in expected]
        assert [logprobs_of(d) for d in found] == [logprobs_of(d) for d in expected]
    assert small.core.scheduler.preemption_count > 0
    again = generate(small, [PROMPTS[0]], PARAMS[0])[0], generate(small, [PROMPTS[0]], PARAMS[0])[0]
    assert again[1][0].cached > 0
    assert logprobs_of(again[1]) == logprobs_of(expected[0])


@pytest.mark.parametrize("form", BOTH)
def test_reading_in_place_and_gathering_agree_however_prompts_are_divided(
    form: KvForm, llama: tuple[Path, Any]
) -> None:
    """A prompt's own tokens are seen as they are stored, so the two ways differ by rounding and not by the codes."""
    found = []
    for changes in ({"deterministic": True}, {}, {"max_batched_tokens": 16}):
        loaded = load_engine(llama[0], kv_dtype=form.name, prefix_cache=False, **changes)
        assert loaded.core.runner.decoder.fixed_order is ("deterministic" in changes)
        deltas = generate(loaded, PROMPTS[:2], greedy_params(1, logprobs=VOCAB))
        found.append(torch.tensor([sorted(dict(d[0].logprobs[0].top).items()) for d in deltas])[..., 1])
    assert (found[0] - found[1]).abs().max() < 2e-3
    assert (found[0] - found[2]).abs().max() < 2e-3


def peaked(logprobs: list[TokenLogprob]) -> torch.Tensor:
    """Probabilities of the whole vocabulary."""
    return torch.tensor([[dict(each.top)[t] for t in range(VOCAB)] for each in logprobs]).exp()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model whose answers do not hang on a hair."""
    folder = tmp_path_factory.mktemp("calm")
    save_model(folder, initializer_range=0.1)
    return folder


@pytest.mark.parametrize(("name", "most"), [("int8", 0.001), ("int4", 0.01)])
def test_answers_stay_close_to_the_float_cache(name: str, most: float, calm: Path) -> None:
    params = greedy_params(1, logprobs=VOCAB)
    exact, coded = (
        torch.cat([peaked(logprobs_of(d)) for d in generate(load_engine(calm, kv_dtype=kv), PROMPTS, params)])
        for kv in ("auto", name)
    )
    assert 0 < (exact - coded).abs().max() < most


def test_large_key_channels_do_not_drown_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose biases make one channel pair of every key head forty times larger, with and without the balance."""
    model = save_model(tmp_path, "qwen2", initializer_range=0.1)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.zero_().view(2, 16)[:, 7] = 40.0
    model.save_pretrained(tmp_path)
    params = greedy_params(1, logprobs=VOCAB)

    def answers(kv: str) -> torch.Tensor:
        deltas = generate(load_engine(tmp_path, kv_dtype=kv, deterministic=True), PROMPTS, params)
        return torch.cat([peaked(logprobs_of(d)) for d in deltas])

    exact, balanced = answers("auto"), answers("int4")
    monkeypatch.setattr("busbar.workloads.serving.loader.key_peaks", lambda *_: torch.ones((2, 2, 16)))
    plain = answers("int4")
    assert (balanced - exact).norm() < 0.3 * (plain - exact).norm()


@pytest.mark.parametrize("level", [SleepLevel.WEIGHTS_KEPT, SleepLevel.WEIGHTS_DROPPED])
def test_answers_are_the_same_after_sleep(llama: tuple[Path, Any], level: SleepLevel) -> None:
    loaded = load_engine(llama[0], kv_dtype="int4", weights_dtype="int8", deterministic=True)
    before = [logprobs_of(d) for d in generate(loaded, PROMPTS[:2], PARAMS[:2])]
    fall_asleep(loaded, level)
    assert loaded.core.runner.cache.bytes == 0
    wake(loaded)
    assert loaded.core.runner.cache.bytes == loaded.kv_bytes
    assert [logprobs_of(d) for d in generate(loaded, PROMPTS[:2], PARAMS[:2])] == before


def test_adapters_share_a_step_with_codes_and_change_nobody_elses_bits(tiny: Family) -> None:
    """Keys, values and weights in codes: what adapters add stays in float."""
    source = tiny.sources[0]

    def engine() -> Loaded:
        loaded = load_engine(
            tiny.folder, kv_dtype="int8", weights_dtype="int8", deterministic=True, adapters=(source,)
        )
        assert loaded.batch_invariant
        return loaded

    def ask(loaded: Loaded, number: int, adapted: bool) -> None:
        held = loaded.adapters.held(source.name) if adapted else None
        params = greedy_params(12, ignore_eos=True, logprobs=2)
        loaded.core.submit(f"{number} {adapted}", PROMPTS[number], params, 0.0, adapter=held)

    def finish(loaded: Loaded) -> dict[str, list[TokenLogprob]]:
        found: dict[str, list[TokenLogprob]] = {}
        while not loaded.core.idle:
            for delta in loaded.core.step():
                found.setdefault(delta.request_id, []).extend(delta.logprobs)
        return found

    loaded, alone = engine(), {}
    asked = [(0, True), (0, False), (1, True), (2, False)]
    for number, adapted in asked:
        ask(loaded, number, adapted)
        alone.update(finish(loaded))
    crowd = engine()
    for number, adapted in asked:
        ask(crowd, number, adapted)
    assert finish(crowd) == alone
    assert alone["0 True"] != alone["0 False"]


def test_the_same_memory_holds_more_and_the_report_says_as_what(llama: tuple[Path, Any]) -> None:
    totals = {}
    for name in ("auto", "int8", "int4"):
        loaded = load_engine(llama[0], kv_dtype=name, kv_bytes=2**20, max_running=4096)
        totals[name] = loaded.core.scheduler.pool.total
        report = table_report(loaded, ServerSettings(EngineSettings(llama[0]), "tiny"))
        assert report.kv_stored == ("float32" if name == "auto" else name)
        assert report.kv_bytes_per_token == loaded.core.runner.cache.shape.block_bytes // 16
        assert report.workload_class.startswith(
            "serve-llama-117.1k-float32-" + ("" if name == "auto" else f"kv-{name}-")
        )
        assert f'cache_dtype="{report.kv_stored}"' in loaded.core.metrics.render().decode()
    assert totals["int8"] == pytest.approx(totals["auto"] * 64 / 18, rel=0.02)
    assert totals["int4"] == pytest.approx(totals["auto"] * 64 / 12, rel=0.02)
