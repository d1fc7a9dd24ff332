"""Logging in: a pod's service account, and the error when there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from busbar.kube.errors import ConfigError, Conflict, Gone, ServerError, api_error
from busbar.kube.login import find_login, in_cluster
from busbar.kube.resources import NODES, PODS, TRAINING_JOBS


def test_a_pod_logs_in_with_its_service_account(tmp_path: Path) -> None:
    for name, text in (("token", "abc\n"), ("ca.crt", "PEM"), ("namespace", "ns\n")):
        (tmp_path / name).write_text(text)
    login = in_cluster({"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}, tmp_path)
    assert (login.server, login.credential().token, login.namespace, login.ca_pem) == (
        "https://[fd00::1]:6443",
        "abc",
        "ns",
        "PEM",
    )


def test_without_any_login_it_is_said_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="KUBECONFIG"):
        find_login({"KUBECONFIG": str(tmp_path / "none")})


def test_paths_follow_the_api() -> None:
    assert PODS.path("ns", "p", "status") == "/api/v1/namespaces/ns/pods/p/status"
    assert NODES.path(None, "n") == "/api/v1/nodes/n"
    assert TRAINING_JOBS.path() == "/apis/busbar.dev/v1alpha1/trainingjobs"
    with pytest.raises(ValueError, match="namespace"):
        PODS.path(None, "p")


def test_answers_become_typed_errors() -> None:
    assert type(api_error(409, {"reason": "Conflict"}, "x")) is Conflict
    assert isinstance(api_error(200, {"reason": "Expired"}, "x"), Gone)
    assert isinstance(api_error(502, "bad gateway", "x"), ServerError)
    assert "bad gateway" in str(api_error(502, "bad gateway", "GET /y"))
