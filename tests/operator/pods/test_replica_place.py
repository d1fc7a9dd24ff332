"""The placement that a replica's pod carries."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.operator.builders import running

from busbar.operator.pods.replica_place import place_of


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '"x"',
        "[" * 5000,
        '{"pool": "p", "accelerator": "a", "mode": "m", "node": "n", "perPod": []}',
        '{"pool": "p", "accelerator": "a", "mode": "m", "node": "n", "perPod": {"cpu_m": 1e999}}',
    ],
)
def test_a_placement_that_is_none_is_no_placement(text: str) -> None:
    assert place_of(replace(running(0), placement=text)) is None
