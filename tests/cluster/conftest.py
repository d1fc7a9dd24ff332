"""Fixtures of the API-server tier: one server for the session, with the CRDs installed.

Every test that asks for the server gets the marker `apiserver` by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
from tests.cluster.apiserver import ApiServer, render_chart


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if {"apiserver", "platform"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.apiserver)


@pytest.fixture(scope="session")
def apiserver() -> Iterator[ApiServer]:
    """A real API server with our kinds installed; shared, so a test makes its own namespace."""
    with ApiServer.start() as server:
        server.install_crds()
        yield server


@pytest.fixture(scope="session")
def platform() -> Iterator[ApiServer]:
    """Another server, with the whole chart installed: service accounts, rights and admission policies.

    It is not `apiserver`, where tests act as an administrator in every role. Policies act a moment after they are
    written, so a test asks until it sees the first effect.
    """
    with ApiServer.start() as server:
        server.install_crds()
        server.make_namespace("busbar-system")
        for document in render_chart("busbar"):
            server.admin.apply(document).expect()
        yield server


_numbers = count(1)


@pytest.fixture
def namespace(apiserver: ApiServer) -> str:
    """A fresh namespace that belongs to no tenant."""
    name = f"test-{next(_numbers)}"
    apiserver.make_namespace(name)
    return name
