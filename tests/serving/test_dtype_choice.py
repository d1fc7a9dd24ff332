"""In which dtype weights are kept."""

from __future__ import annotations

import pytest
import torch

from busbar.workloads.serving.dtype_choice import choose_dtypes, faster, product_seconds, settled
from busbar.workloads.serving.errors import ModelCorrupt

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("float32", "bfloat16", "chosen"),
    [(2.0, 1.0, "bfloat16"), (1.2, 1.0, "bfloat16"), (1.19, 1.0, "float32"), (1.0, 3.0, "float32")],
)
def test_bfloat16_is_taken_where_it_is_worth_its_rounding(
    float32: float, bfloat16: float, chosen: str
) -> None:
    assert faster({"float32": float32, "bfloat16": bfloat16}) == chosen


def test_the_fastest_is_found_by_trying_it_on_this_processor() -> None:
    chosen, trials = settled("fastest", CPU)
    assert [trial.name for trial in trials] == ["float32 products", "bfloat16 products"]
    assert all(trial.microseconds > 0 for trial in trials)
    assert chosen == faster({t.name.split()[0]: t.microseconds for t in trials})
    assert product_seconds().keys() == {"float32", "bfloat16"}


def test_nothing_is_tried_unless_it_is_asked_for_and_never_on_a_gpu() -> None:
    assert settled("auto", CPU) == ("auto", [])
    assert settled("fastest", GPU) == ("auto", [])


@pytest.mark.parametrize(
    ("wanted", "device", "dtypes"),
    [
        ("auto", CPU, (torch.float32, torch.float32)),
        ("bfloat16", CPU, (torch.bfloat16, torch.float32)),
        ("auto", GPU, (torch.bfloat16, torch.bfloat16)),
        ("float32", GPU, (torch.float32, torch.float32)),
    ],
)
def test_keys_and_values_stay_in_float32_on_a_cpu(
    wanted: str, device: torch.device, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    assert choose_dtypes(wanted, "bfloat16", device) == dtypes


def test_a_checkpoint_of_another_dtype_is_refused_by_its_name() -> None:
    with pytest.raises(ModelCorrupt, match="float8"):
        choose_dtypes("auto", "float8", CPU)
