"""The run as the scheduler's formulas see it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.training.small import LLAMA, VOCABULARY, engine

from busbar.scheduler.fit import ModelShape
from busbar.workloads.training.job import parse_engine
from busbar.workloads.training.settings import Adapter
from busbar.workloads.training.sizing import batch_shape, class_of, flops_per_token

CONFIG: dict[str, Any] = {**LLAMA, "vocab_size": VOCABULARY}


def test_operations_per_token_count_nothing_twice() -> None:
    parameters = ModelShape.from_config(CONFIG).active_parameters
    plain = parse_engine(engine())
    assert flops_per_token(CONFIG, plain) == 6 * parameters
    again = parse_engine(engine(activations="recompute", loss="tiled", mlp="tiled"))
    assert flops_per_token(CONFIG, again) == 6 * parameters
    alone = parse_engine(engine(mode="auto", optimizer={"name": "ZerothOrder"}))
    assert flops_per_token(CONFIG, alone) == 4 * parameters
    frozen = flops_per_token(CONFIG, parse_engine(engine(freeze=["model.layers.*"])))
    assert frozen is not None
    assert frozen < 6 * parameters


def test_of_an_adapter_and_of_an_unknown_architecture_they_are_not_told() -> None:
    spec = parse_engine(engine())
    adapter = Adapter(8, 8.0, 0.0, None, False, False, False)
    assert flops_per_token(CONFIG, replace(spec, adapter=adapter)) is None
    assert class_of(CONFIG, replace(spec, adapter=adapter)) == f"{class_of(CONFIG, spec)}-adapter"
    assert flops_per_token({"model_type": "other"}, spec) is None
    assert class_of({"model_type": "other"}, spec) == "other-unsized"


@pytest.mark.parametrize(
    ("field", "left_out", "other"),
    [("loss", "whole", "tiled"), ("mlp", "whole", "tiled"), ("gradientSums", "weights", "float32")],
)
def test_what_changes_roundings_is_a_part_of_a_runs_identity_where_it_is_asked_for(
    field: str, left_out: str, other: str
) -> None:
    plain, named, asked = (
        parse_engine(engine(**changes)) for changes in ({}, {field: left_out}, {field: other})
    )
    assert plain.identity == named.identity != asked.identity
    assert class_of(CONFIG, plain) == class_of(CONFIG, named)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("loss", "tiled"),
        ("mlp", "tiled"),
        ("activations", "recompute"),
        ("dtype", "bfloat16"),
        ("freeze", ["lm_head.*"]),
        ("data", {**engine()["data"], "packing": "within-documents"}),
    ],
)
def test_a_class_knows_what_decides_the_speed(field: str, value: object) -> None:
    spec, other = parse_engine(engine()), parse_engine(engine(**{field: value}))
    assert batch_shape(spec) != batch_shape(other)
    assert class_of(CONFIG, spec) != class_of(CONFIG, other)
