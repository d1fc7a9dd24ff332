"""Logging in: a pod's service account, kubeconfig files, tokens that rotate, and what is said when there is none."""

from __future__ import annotations

import base64
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from busbar.kube.errors import ConfigError, Conflict, Gone, ServerError, api_error
from busbar.kube.login import TokenFile, find_login, from_kubeconfig, in_cluster
from busbar.kube.resources import NODES, PODS, TRAINING_JOBS


def kubeconfig(folder: Path, user: dict[str, Any], **cluster: Any) -> Path:
    path = folder / "config"
    body = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
        "clusters": [{"name": "c", "cluster": {"server": "https://host:6443/", **cluster}}],
        "users": [{"name": "u", "user": user}],
    }
    path.write_text(yaml.safe_dump(body))
    return path


def test_a_pod_logs_in_with_its_service_account(tmp_path: Path) -> None:
    for name, text in (("token", "abc\n"), ("ca.crt", "PEM"), ("namespace", "ns\n")):
        (tmp_path / name).write_text(text)
    login = in_cluster({"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}, tmp_path)
    assert (login.server, login.bearer(), login.namespace, login.ca_pem) == (
        "https://[fd00::1]:6443",
        "abc",
        "ns",
        "PEM",
    )


def test_a_rotated_token_is_read_again_and_a_vanished_one_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("one")
    token = TokenFile(path, check_s=0.0)
    assert token.read() == "one"
    path.write_text("two")
    os.utime(path, (1, 1))
    assert token.read() == "two"
    path.unlink()
    assert token.read() == "two"
    with pytest.raises(ConfigError, match="token"):
        TokenFile(path).read()


def test_a_kubeconfig_gives_tokens_and_certificates(tmp_path: Path) -> None:
    data = base64.b64encode(b"PEM").decode()
    login = from_kubeconfig(kubeconfig(tmp_path, {"token": "t"}, **{"certificate-authority-data": data}))
    assert (login.server, login.bearer(), login.ca_pem, login.namespace) == (
        "https://host:6443",
        "t",
        "PEM",
        "team",
    )
    (tmp_path / "cert").write_text("CERT")
    user = {"client-certificate": "cert", "client-key-data": data}
    login = from_kubeconfig(kubeconfig(tmp_path, user))
    assert (login.client_cert_pem, login.client_key_pem, login.bearer()) == ("CERT", "PEM", None)
    assert "PEM" not in repr(login)


def test_an_exec_plugin_gives_the_token(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin"
    plugin.write_text("#!/bin/sh\necho '" + json.dumps({"status": {"token": "from-plugin"}}) + "'\n")
    plugin.chmod(plugin.stat().st_mode | stat.S_IXUSR)
    login = from_kubeconfig(kubeconfig(tmp_path, {"exec": {"command": str(plugin)}}))
    assert login.bearer() == "from-plugin"
    plugin.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(ConfigError, match="plug-in"):
        from_kubeconfig(kubeconfig(tmp_path, {"exec": {"command": str(plugin)}}))


@pytest.mark.parametrize("text", ["", "[]", "current-context: nowhere"])
def test_an_unusable_kubeconfig_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    with pytest.raises(ConfigError, match="config"):
        from_kubeconfig(path)


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
