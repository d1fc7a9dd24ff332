"""kubectl's calls, with a program in its place that answers as the API server did."""

from __future__ import annotations

from pathlib import Path

import pytest

from busbar.local import kubectl
from busbar.local.errors import StartError

LATE = "Error from server: etcdserver: request timed out"
ITEM = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "sim-0"}}


@pytest.fixture
def tries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with what was given to each try; the program fails as long as there is a line in `fails`."""
    program = tmp_path / "kubectl"
    program.write_text(
        f"""#!/bin/sh
cat >> {tmp_path}/tries; echo >> {tmp_path}/tries
line=$(head -n 1 {tmp_path}/fails); sed -i 1d {tmp_path}/fails
[ -z "$line" ] || {{ echo "$line" >&2; exit 1; }}
"""
    )
    program.chmod(0o755)
    monkeypatch.setattr(kubectl, "binary", lambda name: program)
    monkeypatch.setattr(kubectl, "LATE_PAUSE_S", 0.0)
    (tmp_path / "tries").touch()
    return tmp_path / "tries"


def fail(tries: Path, *lines: str) -> None:
    tries.with_name("fails").write_text("".join(f"{line}\n" for line in lines))


def test_objects_are_applied_again_where_etcd_was_late(tries: Path) -> None:
    fail(tries, LATE, LATE)
    kubectl.Kubectl(tries.with_name("kubeconfig")).apply([ITEM])
    given = tries.read_text().splitlines()
    assert len(given) == 3
    assert len(set(given)) == 1
    assert "sim-0" in given[0]


def test_what_stays_late_or_is_refused_ends_with_what_kubectl_said(tries: Path) -> None:
    late = kubectl.LATE_TRIES
    fail(tries, *[LATE] * (late + 1))
    with pytest.raises(StartError, match="request timed out"):
        kubectl.Kubectl(tries.with_name("kubeconfig")).apply([ITEM])
    assert len(tries.read_text().splitlines()) == late
    fail(tries, "The Node is invalid")
    with pytest.raises(StartError, match="The Node is invalid"):
        kubectl.Kubectl(tries.with_name("kubeconfig")).apply([ITEM])
    assert len(tries.read_text().splitlines()) == late + 1
