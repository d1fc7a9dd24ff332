"""Copies are those of `dataclasses.replace`."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given, settings

from busbar.scheduler import Job, Snapshot
from busbar.scheduler.model.copies import copier

from ..strategies import snapshots

changed = copier(Job)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(snapshots())
def test_a_copy_has_the_changed_fields_and_all_others(snapshot: Snapshot) -> None:
    for job in snapshot.jobs:
        assert changed(job) == job
        again = changed(job, remaining_work=7.0, run=None)
        assert again == replace(job, remaining_work=7.0, run=None)
        assert hash(again) == hash(replace(job, remaining_work=7.0, run=None))


def test_a_copy_is_frozen_and_a_field_that_is_none_is_refused() -> None:
    job = Job("uid", "name", "ns", "a")  # type: ignore[arg-type]
    with pytest.raises(FrozenInstanceError):
        changed(job).name = "other"  # type: ignore[misc]
    with pytest.raises(KeyError):
        changed(job, nodes=())
