"""What a pod of a job asks for."""

from __future__ import annotations

from typing import Any

import pytest
from tests.training.small import manifest

from busbar.kube.types import TrainingJob
from busbar.operator.training.claim import OTHER_FILES_MIB, asked


@pytest.mark.parametrize(
    ("scratch", "own", "mib"),
    [
        (None, None, 0),
        (None, "3Gi", 3 * 1024),
        ("200Gi", None, 200 * 1024 + OTHER_FILES_MIB),
        ("200Gi", "3Gi", 203 * 1024),
    ],
)
def test_the_disk_for_state_is_asked_for_beside_that_for_other_files(
    scratch: str | None, own: str | None, mib: int
) -> None:
    document: dict[str, Any] = manifest(mode="auto")
    document["spec"]["engine"] |= {} if scratch is None else {"scratchDisk": scratch}
    document["spec"]["shape"] = {"maxPods": 1} | ({} if own is None else {"ephemeralStorage": own})
    assert asked(TrainingJob.model_validate(document).spec).ephemeral_mib == mib
