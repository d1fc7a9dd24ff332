"""Weights in 8 and 4 bits: errors, bytes, exact products with whole numbers, and answers of whole models."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.serving.engines import generate, greedy_params, load_engine, tokens_of
from tests.serving.models import VOCAB, save_model

from busbar.workloads.serving import integer_linear
from busbar.workloads.serving.errors import ModelUnsupported
from busbar.workloads.serving.integer_linear import (
    DecodedLinear,
    IntegerLinear,
    PackedCodes,
    can_multiply,
    coded_linear,
    digits_of,
)
from busbar.workloads.serving.report import table_report
from busbar.workloads.serving.settings import EngineSettings, ServerSettings
from busbar.workloads.serving.weightcodes import FORMS, INT4, INT8, CodedWeight, WeightForm, code, group_of

BOTH = [pytest.param(form, id=form.name) for form in FORMS.values()]
VNNI = "vnni" in Path("/proc/cpuinfo").read_text()
NOMINAL = {INT8: 1.0, INT4: 0.5}
PROMPTS = [[random.Random(i).randrange(1, VOCAB) for _ in range(30 + 11 * i)] for i in range(4)]


def normal(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("form", BOTH)
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    width=st.sampled_from([8, 48, 128, 320, 512]),
    size=st.sampled_from([1e-6, 0.02, 50.0]),
)
def test_a_weight_comes_back_within_half_a_step(form: WeightForm, seed: int, width: int, size: float) -> None:
    """In int4 a step is that of its group, rounded up to a fifteenth of the row's largest."""
    w = normal(5, width, seed=seed) * size
    coded = code(w, form)
    assert (coded.rows, coded.width) == w.shape
    if form is INT8:
        step = (w.abs().amax(1, keepdim=True) / 127).expand(w.shape)
    else:
        largest = w.view(5, -1, group_of(width)).abs().amax(2) / 7.5
        step = (largest + largest.amax(1, keepdim=True) / 15).repeat_interleave(group_of(width), 1)
    assert ((coded.decoded(0, 5, torch.float32) - w).abs() <= 0.501 * step).all()


@pytest.mark.parametrize("form", BOTH)
def test_rows_of_zeros_and_groups_of_zeros_stay_zeros(form: WeightForm) -> None:
    w = normal(3, 256)
    w[1] = 0
    w[2, 128:] = 0
    back = code(w, form).decoded(0, 3, torch.float32)
    assert torch.equal(back[1], w[1])
    assert torch.equal(back[2, 128:], w[2, 128:])


@pytest.mark.parametrize("form", BOTH)
def test_rows_are_coded_and_decoded_by_themselves(form: WeightForm, monkeypatch: pytest.MonkeyPatch) -> None:
    coded = code(normal(9, 256), form)
    monkeypatch.setattr("busbar.workloads.serving.weightcodes.CODED_AT_ONCE", 512)
    assert torch.equal(code(normal(9, 256), form).whole(0, 9), coded.whole(0, 9))
    whole = coded.whole(0, 9)
    assert whole.dtype is torch.int8
    assert torch.equal(coded.whole(4, 7), whole[4:7])


@pytest.mark.parametrize("form", BOTH)
@pytest.mark.parametrize(("rows", "width"), [(512, 512), (64, 1536), (96, 704)])
def test_bytes_are_within_a_tenth_of_the_nominal(form: WeightForm, rows: int, width: int) -> None:
    coded = code(normal(rows, width), form)
    assert coded.bytes <= 1.1 * NOMINAL[form] * rows * width
    assert coded_linear(code(normal(rows, width), form), None).bytes == coded.bytes


def test_the_start_finds_whether_the_processor_multiplies_whole_numbers_exactly() -> None:
    """With VNNI it does. Without it packed products saturate: those of other numbers than the start-up check's say so as
    well, and the slower form is used everywhere."""
    codes = torch.full((32, 256), 127, dtype=torch.int8)
    inputs = torch.cat([codes[:4], -codes[:4], codes[:4].clone().random_(-127, 128)])
    products = [
        product(inputs) for _, product in PackedCodes.of(CodedWeight(codes, None, torch.ones(32))).products()
    ]
    exact = all(torch.equal(each, (inputs.long() @ codes.long().T).float()) for each in products)
    assert can_multiply() is exact
    assert exact or not VNNI


def integers(w: torch.Tensor, bias: torch.Tensor, form: WeightForm) -> IntegerLinear:
    """As it is made where packed products are exact; elsewhere of weights that stay as they are, whose products are exact
    on other processors as well."""
    return IntegerLinear(code(w, form), bias, pack=can_multiply())


@pytest.mark.parametrize("form", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_decoded_weights(form: WeightForm, dtype: torch.dtype) -> None:
    w, bias = normal(200, 384), normal(200, seed=1).to(dtype)
    x = (normal(140, 384, seed=2) * torch.logspace(-6, 3, 140)[:, None]).to(dtype)
    exact = x.double() @ code(w, form).decoded(0, 200, torch.float32).double().T + bias.double()
    size = exact.abs().amax(1, keepdim=True)
    tolerance = 2e-4 if dtype is torch.float32 else 2e-2
    made = coded_linear(code(w, form), bias)
    assert isinstance(made, IntegerLinear if can_multiply() else DecodedLinear)
    for linear in (made, integers(w, bias, form), DecodedLinear(code(w, form), bias)):
        got = linear(x)
        assert (got.dtype, got.shape) == (dtype, (140, 200))
        assert ((got.double() - exact).abs() <= tolerance * size).all()


@pytest.mark.parametrize("form", BOTH)
def test_a_rows_product_is_bit_for_bit_its_own(form: WeightForm) -> None:
    linear = integers(normal(300, 256), normal(300, seed=1), form)
    x = normal(400, 256, seed=2)
    whole = linear(x)
    for first, stop in ((0, 1), (3, 7), (127, 260), (399, 400)):
        assert torch.equal(linear(x[first:stop]), whole[first:stop])


@pytest.mark.parametrize("form", BOTH)
def test_weights_that_move_are_the_same_and_those_packed_for_a_cpu_stay(form: WeightForm) -> None:
    w, bias, x = normal(20, 256), normal(20, seed=1), normal(3, 256, seed=2)
    linear, moved = DecodedLinear(code(w, form), bias), []

    def move(tensor: torch.Tensor) -> torch.Tensor:
        moved.append(tensor)
        return tensor.clone()

    assert torch.equal(linear.moved(move)(x), linear(x))
    assert sum(each.numel() * each.element_size() for each in moved) == linear.bytes
    packed = integers(w, bias, form)
    assert packed.moved(move) is packed


def test_two_digits_hold_fifteen_bits_of_a_row() -> None:
    x = torch.cat((normal(6, 64) * torch.logspace(-20, 20, 6)[:, None], torch.zeros(1, 64)))
    digits, scale = digits_of(x)
    back = (digits[:7].double() + digits[7:].double() / integer_linear.LOWER) * scale.double()
    assert ((back - x.double()).abs() <= x.abs().amax(1, keepdim=True) * 2**-15).all()


def test_a_width_that_groups_do_not_fit_is_refused_with_the_way_out(tmp_path: Path) -> None:
    save_model(tmp_path, intermediate_size=101)
    with pytest.raises(ModelUnsupported, match=r"101\. Serve it with --weights-dtype int8 or auto"):
        load_engine(tmp_path, weights_dtype="int4")
    assert load_engine(tmp_path, weights_dtype="int8").weights_stored == "int8"


@pytest.fixture
def no_integers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A processor whose products of whole numbers saturate."""
    can_multiply.cache_clear()
    times = integer_linear._times

    def saturating(weight: torch.Tensor, scale: torch.Tensor, digits: torch.Tensor) -> torch.Tensor:
        return times(weight, scale, digits).clamp(-32768, 32767)

    monkeypatch.setattr(integer_linear, "_times", saturating)
    yield
    can_multiply.cache_clear()


@pytest.mark.usefixtures("no_integers")
def test_a_saturating_processor_is_noticed_and_gets_decoded_weights() -> None:
    assert not can_multiply()
    assert isinstance(coded_linear(code(normal(8, 64), INT8), None), DecodedLinear)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model whose answers do not hang on a hair."""
    folder = tmp_path_factory.mktemp("calm")
    save_model(folder, "qwen2", initializer_range=0.1, hidden_size=128, intermediate_size=192)
    return folder


def probabilities(folder: Path, **changes: Any) -> torch.Tensor:
    params = greedy_params(1, logprobs=VOCAB)
    found = generate(load_engine(folder, **changes), PROMPTS, params)
    return torch.tensor([[dict(d[0].logprobs[0].top)[t] for t in range(VOCAB)] for d in found]).exp()


@pytest.mark.parametrize(("name", "most"), [("int8", 0.002), ("int4", 0.03)])
def test_answers_stay_close_to_float_weights(name: str, most: float, calm: Path) -> None:
    exact = probabilities(calm)
    assert 0 < (probabilities(calm, weights_dtype=name) - exact).abs().max() < most
    assert 0 < (probabilities(calm, weights_dtype=name, dtype="bfloat16") - exact).abs().max() < most + 0.01


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_report_shows_the_bytes_saved_and_a_class_of_its_own(name: str, calm: Path) -> None:
    plain, coded = load_engine(calm), load_engine(calm, weights_dtype=name)
    weights = coded.core.runner.decoder.weights
    layers = plain.core.runner.decoder.weights.layer_bytes
    assert weights.layer_bytes <= 1.13 * NOMINAL[FORMS[name]] * layers / 4  # narrow rows, and groups of 64
    assert plain.weight_bytes - coded.weight_bytes == layers - weights.layer_bytes
    assert weights.embedding.dtype is torch.float32
    report = table_report(coded, ServerSettings(EngineSettings(calm), "tiny"))
    assert (report.weights_stored, report.weight_bytes) == (name, weights.bytes)
    assert f"-{name}-" in report.workload_class


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_tokens_alone_and_in_a_crowd_are_the_same(name: str, calm: Path) -> None:
    loaded = load_engine(calm, weights_dtype=name, deterministic=True, max_batched_tokens=40)
    assert loaded.batch_invariant
    params = greedy_params(20, ignore_eos=True, logprobs=2)
    alone = [generate(loaded, [p], params)[0] for p in PROMPTS]
    crowd = generate(load_engine(calm, weights_dtype=name, deterministic=True), PROMPTS, params)
    assert [tokens_of(d) for d in crowd] == [tokens_of(d) for d in alone]
    assert [[d.logprobs for d in each] for each in crowd] == [[d.logprobs for d in each] for each in alone]
