"""Fixtures of the API-server tier: one server for the session, with the CRDs installed.

Every test that asks for the server gets the marker `apiserver` by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
from tests.cluster.apiserver import ApiServer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "apiserver" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.apiserver)


@pytest.fixture(scope="session")
def apiserver() -> Iterator[ApiServer]:
    """A real API server with our kinds installed; shared, so a test makes its own namespace."""
    with ApiServer.start() as server:
        server.install_crds()
        yield server


_numbers = count(1)


@pytest.fixture
def namespace(apiserver: ApiServer) -> str:
    """A fresh namespace that belongs to no tenant."""
    name = f"test-{next(_numbers)}"
    apiserver.make_namespace(name)
    return name
