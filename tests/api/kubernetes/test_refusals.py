"""What the API makes of Kubernetes' refusals."""

from __future__ import annotations

import pytest

from busbar.api.errors import Forbidden
from busbar.api.kubernetes.client import translated
from busbar.kube.errors import api_error


def refusal(quota: str) -> str:
    said = (
        f'trainingjobs.busbar.dev "x" is forbidden: exceeded quota: {quota}, requested: pods=1, used: pods=2'
    )
    with pytest.raises(Forbidden) as caught, translated("TrainingJob x"):
        raise api_error(403, {"reason": "Forbidden", "message": said}, "POST trainingjobs")
    assert said in caught.value.message
    return caught.value.message


def test_a_limit_of_the_tenant_that_is_reached_says_what_to_do() -> None:
    assert "raise spec.limits of the Tenant" in refusal("busbar-tenant-limits")
    assert "raise" not in refusal("people-own-it")
