"""Rules for every tier.

On CI a skipped test is a failure, because a check that did not run proves nothing.  No test depends on a time:
hypothesis' own limits on time are off, because a busy machine is not a defect.  On CI its examples are the same in
every run of the same test; elsewhere it looks for new ones.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants
from tools.tiers import TIERS, UNIT

settings.register_profile(
    "busbar",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
    print_blob=True,
)
settings.load_profile("busbar")

# hypothesis also draws numbers that stand in the project's modules, of those that are imported at that moment.  So
# `derandomize` alone gives other examples after each change of any module, and in another order of the tests.  It has
# no setting for this (6.170); `tests/house/test_examples.py` fails if the name below means something else one day.
providers._get_local_constants = Constants


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse a test whose tier looks in other folders, which would never run, and one of two tiers."""
    for item in items:
        folder = item.path.relative_to(config.rootpath).parent
        marks = {mark.name for mark in item.iter_markers()}
        found = [tier for tier in TIERS if tier.marker in marks and tier.without not in marks] or [UNIT]
        if len(found) > 1:
            raise pytest.UsageError(
                f"{item.nodeid} would run in the tiers {' and '.join(tier.name for tier in found)}: "
                "say in tools/tiers.py which of them leaves it out"
            )
        if not found[0].looks_in(folder):
            raise pytest.UsageError(
                f"{item.nodeid} is a test of the tier {found[0].name}, which does not look in {folder}: "
                "give it another marker, or add its folder to tools/tiers.py"
            )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip into a failure where ``CI`` is set."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("CI"):
        report.outcome = "failed"
        report.longrepr = f"skipped on CI, where a skip is a failure: {report.longrepr}"
    return report
