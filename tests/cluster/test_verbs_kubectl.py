"""Tenant A learns nothing of tenant B by any command of kubectl: the real one, as a member of A.

Each command is run twice, for B and for a tenant that does not exist: all that it prints, and its exit code, must be
the same. `test_verbs.py` covers requests that `kubectl` cannot make.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from tests.cluster.manifests import JSON, engine_job
from tests.cluster.neighbours import Neighbour
from tests.cluster.rule_row import edited
from tests.cluster.walk import ABSENT

READING = (
    "get pods", "get all", "get busbar", "get events,secrets,configmaps -o yaml", "get bbtj N -o json",
    "get pods -A", "get bbtj,bbms -A -o wide", "get pods --watch --request-timeout=2", "get ns N", "get nodes N",
    "get tenants N", "get acceleratorpools", "get bbperf N", "get bbpd N", "get pv N", "get rolebindings,roles,sa", "get leases -A",
    "get --raw /api/v1/namespaces/N/pods/N/log", "get --raw /metrics",
    "describe pod N", "describe bbtj N", "describe ns N", "describe node N", "describe tenant N",
    "logs N", "logs deploy/N", "events", "events -A", "cluster-info dump",
    "rollout status deploy/N", "rollout history sts/N", "wait --for=delete pod/N --timeout=1s",
    "diff -f FILE",
)  # fmt: skip

OPEN = (
    # Which kinds exist, and what the caller itself may do: these answers contain no object.
    "explain pods.spec", "api-resources", "auth whoami", "auth can-i --list", "auth can-i get pods",
)  # fmt: skip

CHANGING = (
    "apply -f FILE", "apply --server-side -f FILE", "apply -f FILE --dry-run=server", "create -f FILE",
    "replace -f FILE", "delete -f FILE", "delete pod N --now", "delete bbtj --all", "delete ns N",
    "patch bbtj N --type=merge -p {}", "label pod N a=b", "annotate bbms N a=b", "set image deploy/N main=x",
    "scale bbms/N --replicas=0", "scale deploy/N --replicas=0", "autoscale deploy/N --max=2", "expose pod N --port=80",
    "rollout restart deploy/N", "rollout undo deploy/N", "run N --image=x", "create token N", "create token default",
    "create secret generic x", "create rolebinding x --clusterrole=admin --user=alpha-member", "create ns N",
    "exec N -- ls", "attach N", "port-forward N 0:80", "cp N:/etc/passwd FILE.copy", "debug N --image=x",
    "debug node/N --image=x", "cordon N", "drain N", "taint node N a=b:NoSchedule", "certificate approve N",
)  # fmt: skip


def said(alpha: Neighbour, command: str, name: str, folder: Path) -> tuple[int, str]:
    """Exit code and all output of one command for a tenant, without its name."""
    file = folder / f"{name}.yaml"
    words = [word.replace("FILE", str(file)) for word in command.split()]
    words = [
        name if word == "N" else word.replace("N:", f"{name}:").replace("/N", f"/{name}") for word in words
    ]
    ran = alpha.server.kubectl("-n", name, *words, user=alpha.person_name("member"))
    return ran.returncode, f"{ran.stdout}\n{ran.stderr}".replace(ABSENT, name).replace(name, "NAME")


@pytest.mark.parametrize("commands", [READING, CHANGING, OPEN], ids=["reading", "changing", "open"])
def test_every_command_answers_as_if_b_did_not_exist(
    alpha: Neighbour, bravo: Neighbour, commands: tuple[str, ...], tmp_path: Path
) -> None:
    for name in ("bravo", ABSENT):
        document: JSON = edited(engine_job(), {"metadata/name": name, "metadata/namespace": name})
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(document))
    with ThreadPoolExecutor(3) as threads:
        theirs = threads.map(lambda c: said(alpha, c, "bravo", tmp_path), commands)
        absent = threads.map(lambda c: said(alpha, c, ABSENT, tmp_path), commands)
        for command, one, other in zip(commands, theirs, absent, strict=True):
            assert one == other, command
            code, output = one
            assert commands is OPEN or (code != 0 and "orbidden" in output), f"{command}: {output}"
