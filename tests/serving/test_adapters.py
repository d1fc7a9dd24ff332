"""LoRA adapters: PEFT's tokens in any company."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.serving.adapted import Family, adapted_greedy, make_family, merged, save_adapter
from tests.serving.engines import generate, greedy_params, load_engine, tokens_of
from tests.serving.models import greedy
from tests.serving.test_equality import random_prompts

from busbar.workloads.serving.adapter_files import read_adapter
from busbar.workloads.serving.adapter_pages import (
    MOST_TOGETHER,
    Alone,
    Form,
    Page,
    Place,
    Together,
    group_rows,
)
from busbar.workloads.serving.adapters import AdapterStore
from busbar.workloads.serving.architecture import read_architecture
from busbar.workloads.serving.delta import Delta
from busbar.workloads.serving.errors import Overloaded
from busbar.workloads.serving.loader import Loaded
from busbar.workloads.serving.sampling import SamplingParams
from busbar.workloads.serving.sequence import Pooling
from busbar.workloads.serving.settings import AdapterSource

CPU = torch.device("cpu")


def run(
    loaded: Loaded, prompts: list[list[int]], names: list[str | None], params: SamplingParams
) -> list[list[Delta]]:
    """All prompts together, each with its adapter."""
    core = loaded.core
    found: list[list[Delta]] = [[] for _ in prompts]
    for index, (prompt, name) in enumerate(zip(prompts, names, strict=True)):
        adapter = None if name is None else loaded.adapters.held(name)
        assert (adapter is None) is (name is None)
        core.submit(str(index), prompt, params, 0.0, adapter=adapter)
    while not core.idle:
        for delta in core.step():
            found[int(delta.request_id)].append(delta)
    return found


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
        ("mistral", {"sliding_window": 300}),
    ],
)
def test_each_row_of_a_mixed_batch_gets_the_tokens_of_peft(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Long prompts in chunks, and rows that decode; also in the deterministic order."""
    made = make_family(tmp_path, family, **changes)
    names = [None, *made.adapted, None, *made.adapted]
    prompts = random_prompts(5, len(names), 100)
    expected = [
        greedy(made.model, prompt, 12) if name is None else adapted_greedy(made.adapted[name], prompt, 12)
        for name, prompt in zip(names, prompts, strict=True)
    ]
    for deterministic in (False, True):
        loaded = load_engine(
            made.folder, max_batched_tokens=48, deterministic=deterministic, adapters=made.sources
        )
        found = run(loaded, prompts, names, greedy_params(12))
        assert [tokens_of(each) for each in found] == expected
        assert all(adapter.holders == 0 for adapter in loaded.adapters._resident.values())


def test_merged_models_give_the_same_tokens(tiny: Family) -> None:
    names = list(tiny.adapted)
    prompts = random_prompts(6, len(names), 60)
    loaded = load_engine(tiny.folder, adapters=tiny.sources)
    found = run(loaded, prompts, list(names), greedy_params(12))
    expected = [greedy(merged(tiny.adapted[n]), p, 12) for n, p in zip(names, prompts, strict=True)]
    assert [tokens_of(each) for each in found] == expected


def test_the_same_under_preemption(tiny: Family) -> None:
    block = 2 * 2 * 2 * 16 * 16 * 4
    loaded = load_engine(tiny.folder, kv_bytes=13 * block, max_batched_tokens=40, adapters=tiny.sources)
    names = [None, *tiny.adapted]
    prompts = random_prompts(7, len(names), 70)
    found = run(loaded, prompts, names, greedy_params(40))
    assert loaded.core.scheduler.preemption_count > 0
    assert [tokens_of(each) for each in found] == [
        greedy(tiny.model, p, 40) if n is None else adapted_greedy(tiny.adapted[n], p, 40)
        for n, p in zip(names, prompts, strict=True)
    ]


def test_rows_without_an_adapter_are_bit_equal_in_a_deterministic_crowd(tiny: Family) -> None:
    """And so is a row with one, alone and in company."""
    loaded = load_engine(tiny.folder, deterministic=True, prefix_cache=False, adapters=tiny.sources)
    prompts = random_prompts(8, 7, 50)
    names = [None, *tiny.adapted]
    params = greedy_params(8, logprobs=3)
    together = run(loaded, prompts, names, params)
    for prompt, name, found in zip(prompts, names, together, strict=True):
        alone = run(loaded, [prompt], [name], params)[0]
        assert [d.logprobs for d in alone] == [d.logprobs for d in found], name


def test_a_step_without_adapters_has_no_groups(tiny: Family) -> None:
    loaded = load_engine(tiny.folder, adapters=tiny.sources)
    loaded.core.submit("0", [1, 2, 3], greedy_params(2), 0.0)
    batch, _, _ = loaded.core.runner.batch(loaded.core.scheduler.plan())
    assert batch.adapters is None


def test_beginnings_are_shared_within_one_adapter_only(tiny: Family) -> None:
    loaded = load_engine(tiny.folder, adapters=tiny.sources)
    prompt = random_prompts(9, 1, 80)[0] * 3

    def cached(name: str | None) -> int:
        return run(loaded, [prompt], [name], greedy_params(1))[0][-1].cached

    assert [cached(name) for name in (None, "all", "odd")] == [0, 0, 0]
    whole = (len(prompt) - 1) // 16 * 16
    assert [cached(name) for name in (None, "all", "odd")] == [whole] * 3


def test_vectors_are_those_of_the_adapter(tiny: Family) -> None:
    loaded = load_engine(tiny.folder, adapters=tiny.sources)
    prompt = random_prompts(10, 1, 40)[0]
    vectors = []
    for adapter in (None, loaded.adapters.held("all")):
        loaded.core.embed("0", prompt, Pooling.LAST, 0.0, adapter=adapter)
        vectors.append(loaded.core.step()[0].vector)
    with torch.no_grad():
        states = tiny.adapted["all"].base_model.model.model(torch.tensor([prompt])).last_hidden_state[0, -1]
    assert vectors[0] != vectors[1]
    assert vectors[1] == pytest.approx(states.tolist(), abs=1e-4)


def test_a_running_request_keeps_its_adapter_when_it_is_unloaded(tiny: Family, tmp_path: Path) -> None:
    """And another adapter under its name does not touch it."""
    loaded = load_engine(tiny.folder, adapters=tiny.sources)
    prompt = random_prompts(11, 1, 40)[0]
    loaded.core.submit("0", prompt, greedy_params(12), 0.0, adapter=loaded.adapters.held("all"))
    deltas = loaded.core.step()
    assert loaded.adapters.remove("all")
    save_adapter(tiny.model, tmp_path, 99, rank=8)
    loaded.adapters.add(AdapterSource("all", tmp_path))
    while not loaded.core.idle:
        deltas += loaded.core.step()
    assert tokens_of(deltas) == adapted_greedy(tiny.adapted["all"], prompt, 12)
    assert not loaded.adapters._leaving


def test_an_engine_without_adapters_gives_the_tokens_it_gave(tiny: Family) -> None:
    prompts = random_prompts(12, 3, 60)
    plain = load_engine(tiny.folder)
    found = generate(plain, prompts, greedy_params(10))
    assert plain.adapters.bytes == 0
    assert [tokens_of(d) for d in found] == [greedy(tiny.model, p, 10) for p in prompts]


def product(x: torch.Tensor, a: torch.Tensor, *b: torch.Tensor) -> torch.Tensor:
    """What an adapter adds to the output of a row."""
    low = (x @ a).view(3, -1)
    return torch.cat([part @ each for part, each in zip(low, b, strict=True)])


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(
    "slots",
    [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [None, 3, None, 3, 0, 7, 0],
        [5] * (MOST_TOGETHER + 1) + [1, 5, 2],
        [None, None, 2],
    ],
)
def test_groups_add_the_product_of_each_rows_adapter(
    tiny: Family, slots: list[int | None], together: bool
) -> None:
    arch = read_architecture(tiny.folder)
    store = AdapterStore(arch, CPU, torch.float32, 2**24)
    store.add(tiny.sources[1])
    (page,) = store._pages
    generator = torch.Generator().manual_seed(0)
    factors = page.layers[1]["qkv"]
    factors.a.copy_(torch.randn(factors.a.shape, generator=generator))
    x = torch.randn((len(slots) + 1, 64), generator=generator)
    out = torch.zeros((len(x), sum(factors.widths)))
    expected, size = (torch.zeros(out.shape, dtype=torch.float64) for _ in range(2))
    for row, slot in enumerate(slots):
        if slot is not None:
            given = [
                t.double() for t in (x[row], factors.a[slot], *(b[slot] for b in factors.b if b is not None))
            ]
            expected[row] = product(*given)
            size[row] = product(*(t.abs() for t in given))
    groups = group_rows([None if s is None else Place(page, s) for s in [*slots, None]], CPU, together)
    for group in groups:
        group.add(1, "qkv", x, out)
    rounding = 16 * torch.finfo(torch.float32).eps * size  # of sums whose terms cancel out, for the most part
    assert bool(((out - expected).abs() <= rounding).all())
    assert together or all(isinstance(group, Alone) for group in groups)


def test_slots_far_apart_are_not_computed_together(tiny: Family) -> None:
    store = AdapterStore(read_architecture(tiny.folder), CPU, torch.float32, 2**24)
    store.add(tiny.sources[1])
    page: Page = store._pages[0]
    groups = group_rows([Place(page, 0), Place(page, 3), Place(page, 7)], CPU)
    assert [(g.first, g.stop) for g in groups if isinstance(g, Together)] == [(0, 4), (7, 8)]


@dataclass
class Churned:
    """An engine with memory for two adapters of one form, and what each of four answers."""

    loaded: Loaded
    sources: dict[str, AdapterSource]
    prompt: list[int]
    expected: dict[str, list[int]]

    def step(self, answers: dict[str, list[int]]) -> None:
        for delta in self.loaded.core.step():
            answers[delta.request_id] += delta.tokens


@pytest.fixture(scope="module")
def churned(tiny: Family, tmp_path_factory: pytest.TempPathFactory) -> Churned:
    root, prompt = tmp_path_factory.mktemp("churned"), random_prompts(13, 1, 40)[0]
    sources, expected = {}, {}
    for seed in range(4):
        name = f"c{seed}"
        adapted = save_adapter(tiny.model, root / name, 60 + seed)
        sources[name], expected[name] = AdapterSource(name, root / name), adapted_greedy(adapted, prompt, 6)
    form = Form.of(read_adapter(root / "c0", read_architecture(tiny.folder), torch.float32))
    slot = form.slot_bytes(read_architecture(tiny.folder), torch.float32)
    loaded = load_engine(tiny.folder, adapter_bytes=2 * slot, prefix_cache=False)
    return Churned(loaded, sources, prompt, expected)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.data())
def test_nothing_stays_behind_after_loads_unloads_and_cancels(churned: Churned, data: st.DataObject) -> None:
    """Memory for two adapters, of which four are known; every answer is that of its adapter alone."""
    loaded, store = churned.loaded, churned.loaded.adapters
    core = loaded.core
    running: dict[str, str] = {}
    answers: dict[str, list[int]] = {}
    for number in range(data.draw(st.integers(10, 30))):
        action = data.draw(st.sampled_from(("ask", "ask", "step", "step", "cancel", "forget")))
        name = data.draw(st.sampled_from(sorted(churned.sources)))
        if action == "ask":
            if name not in store:
                with contextlib.suppress(Overloaded):
                    store.add(churned.sources[name])
            with contextlib.suppress(Overloaded):
                if store.bring(name):
                    adapter = store.held(name)
                    assert adapter is not None
                    core.submit(str(number), churned.prompt, greedy_params(6), 0.0, adapter=adapter)
                    running[str(number)], answers[str(number)] = name, []
        elif action == "forget":
            store.remove(name)
        elif action == "cancel" and running:
            gone = data.draw(st.sampled_from(sorted(running)))
            core.cancel(gone)
            del running[gone]
        else:
            churned.step(answers)
        assert store.bytes <= store.most_bytes
    while not core.idle:
        churned.step(answers)
    assert all(answers[each] == churned.expected[name] for each, name in running.items())
    for name in store.names:
        store.remove(name)
    assert (store.bytes, store._pages, store._leaving, core.scheduler.pool.used) == (0, [], [], 0)
