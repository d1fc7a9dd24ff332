"""Under API Priority and Fairness the operator's lease and admissions have levels of their own."""

from __future__ import annotations

import time

import pytest
from tests.cluster.apiserver import ApiServer, collection
from tests.cluster.harness import PATIENCE_S
from tests.cluster.rights import SYSTEM

LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases/busbar-operator"
STATUS = "/apis/busbar.dev/v1alpha1/namespaces/default/trainingjobs/none/status"
TENANTS = "/apis/busbar.dev/v1alpha1/tenants"


@pytest.mark.parametrize(
    ("method", "path", "flow"),
    [
        ("GET", LEASE, "busbar-lease"),
        ("PATCH", STATUS, "busbar-admissions"),
        ("GET", TENANTS, "service-accounts"),
    ],
)
def test_each_call_of_the_operator_meets_its_flow(
    platform: ApiServer, method: str, path: str, flow: str
) -> None:
    operator = platform.service_account(SYSTEM, "busbar-operator")
    wanted = platform.admin.get(f"{collection('FlowSchema')}/{flow}").expect()["metadata"]["uid"]
    end = time.monotonic() + PATIENCE_S
    while True:
        answer = operator.request(method, path, {}, content_type="application/merge-patch+json")
        if answer.flow == wanted:
            return
        assert time.monotonic() < end, f"{answer.flow} is not {flow}"
        time.sleep(0.05)  # a FlowSchema counts a moment after it was written
