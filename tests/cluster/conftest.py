"""Fixtures of the API-server tier: one server for the session, with the CRDs installed.

Every test that asks for the server gets the marker `apiserver` by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import pytest
from tests.cluster import admission_rows as rows
from tests.cluster.apiserver import ApiServer, Client, render_chart
from tests.cluster.attempts import eventually_accepted
from tests.cluster.harness import Cluster, with_the_charts_rights
from tests.cluster.manifests import JSON
from tests.cluster.neighbours import Neighbour, move_in, move_out
from tests.cluster.rights import SYSTEM, give_role, wait_for_bindings
from tests.cluster.served import Served, served


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if {"apiserver", "platform"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.apiserver)
        module = getattr(item, "module", None)
        if any(
            value in (Cluster, with_the_charts_rights) for value in vars(module).values() if callable(value)
        ):
            # `Cluster.stop` kills the operator: its clients leave half-open sockets behind, and so does Kopf where it
            # is ended while it connects. That is the point of these tests, not a leak of the product.
            item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))


@pytest.fixture(scope="session")
def apiserver() -> Iterator[ApiServer]:
    """A real API server with our kinds installed; shared, so a test makes its own namespace."""
    with ApiServer.start() as server:
        server.install_crds()
        yield server


@pytest.fixture(scope="session")
def platform() -> Iterator[ApiServer]:
    """Another server, with the whole chart installed: service accounts, rights and admission policies.

    It is not `apiserver`, where tests act as an administrator in every role. RBAC is in effect when a test begins;
    policies take effect shortly after they are written, so a test repeats its request until it sees the first effect.
    """
    with ApiServer.start() as server:
        server.install_crds()
        server.make_namespace("busbar-system")
        documents = render_chart("busbar")
        for document in documents:
            server.admin.apply(document).expect()
        wait_for_bindings(server, documents)
        yield server


_numbers = count(1)


@pytest.fixture
def namespace(apiserver: ApiServer) -> str:
    """A fresh namespace that belongs to no tenant."""
    name = f"test-{next(_numbers)}"
    apiserver.make_namespace(name)
    return name


@pytest.fixture(scope="module")
def tenancy(platform: ApiServer) -> ApiServer:
    """A tenant's namespace as the operator makes it, one without a tenant, pools and priority classes.

    Each module makes them anew where another has removed them.
    """
    labels = {
        "busbar.dev/tenant": "team-a",
        "pod-security.kubernetes.io/enforce": "restricted",
        "pod-security.kubernetes.io/enforce-version": "latest",
    }
    for name, marks in ((rows.TENANT_NAMESPACE, labels), (rows.OPEN_NAMESPACE, {})):
        if platform.admin.get(f"/api/v1/namespaces/{name}").status == 404:
            platform.make_namespace(name, marks)
    for document in (*rows.pools(), *rows.priority_classes()):
        platform.admin.apply(document).expect()
    for person, role in (("alice", "member"), ("victor", "viewer"), ("adele", "admin")):
        give_role(platform, "team-a", rows.TENANT_NAMESPACE, role, person)
    return platform


@pytest.fixture
def alice(tenancy: ApiServer) -> Client:
    """A member of the tenant."""
    return tenancy.client("alice")


@pytest.fixture
def admin(tenancy: ApiServer) -> Client:
    """The cluster's administrator, who has every right."""
    return tenancy.admin


@pytest.fixture
def operator(tenancy: ApiServer) -> Client:
    """The operator's service account, with the chart's rights."""
    return tenancy.service_account(SYSTEM, "busbar-operator")


@pytest.fixture
def kept(admin: Client) -> Iterator[Callable[..., JSON]]:
    """Creates an object, as the administrator unless another is named, and deletes it after the test."""
    made: list[JSON] = []

    def create(document: JSON, by: Client = admin) -> JSON:
        made.append(document)
        return eventually_accepted(lambda **p: by.create(document, **p))

    yield create
    for document in reversed(made):
        admin.delete(document, gracePeriodSeconds="0")


@pytest.fixture(scope="module")
def resources(platform: ApiServer) -> tuple[Served, ...]:
    """Every resource that the server serves."""
    return served(platform)


@pytest.fixture(scope="module")
def alpha(platform: ApiServer, resources: tuple[Served, ...]) -> Iterator[Neighbour]:
    """Tenant A, with one object of every kind."""
    yield move_in(platform, "alpha", resources)
    move_out(platform, "alpha")


@pytest.fixture(scope="module")
def bravo(platform: ApiServer, resources: tuple[Served, ...]) -> Iterator[Neighbour]:
    """Tenant B, about which A must learn nothing."""
    yield move_in(platform, "bravo", resources)
    move_out(platform, "bravo")
