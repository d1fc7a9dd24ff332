"""Values of the chart that change how a Deployment is replaced: the API server takes each change and its way back.

The same object is applied with one render and then the other, as `helm upgrade` does. What Kubernetes has put into an
object by itself stays there when the next render leaves it out, and may contradict it.
"""

from __future__ import annotations

import itertools

import pytest
from tests.cluster.apiserver import ApiServer, render_chart
from tests.cluster.manifests import JSON

POSTGRES = ("--set", "api.databaseUrl.name=database", "--set", "api.databaseUrl.key=url")
STANDBY = ("--set", "operator.replicas=2")


def deployment(name: str, namespace: str, settings: tuple[str, ...]) -> JSON:
    found = [d for d in render_chart("busbar", *settings) if d["kind"] == "Deployment"]
    one: JSON = next(d for d in found if d["metadata"]["name"] == name)
    return {**one, "metadata": {**one["metadata"], "namespace": namespace}}


@pytest.mark.parametrize(
    ("name", "other"),
    [("busbar-api", POSTGRES), ("busbar-operator", STANDBY)],
    ids=["database", "standby"],
)
@pytest.mark.parametrize("first", [0, 1], ids=["from the default", "from the other"])
def test_a_deployment_changes_its_strategy_and_back(
    apiserver: ApiServer, namespace: str, name: str, other: tuple[str, ...], first: int
) -> None:
    renders = [deployment(name, namespace, settings) for settings in ((), other)]
    for wanted in itertools.islice(itertools.cycle(renders), first, first + 3):
        stored = apiserver.admin.apply(wanted).expect()
        assert stored["spec"]["strategy"] == wanted["spec"]["strategy"]
