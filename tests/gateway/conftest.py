"""A gateway with test servers in place of the API, the operator and the engines, all on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.gateway.parts import House, started


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    """API, operator and a started gateway; engines are added by the test."""
    async with started(House(tmp_path)) as house:
        yield house
