"""docs/security.md names what exists: tests, accounts, roles, secrets, settings and files, and leaves none out."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import yaml

from busbar.kube.contracts.keys import FRESH_S, STALE_S

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "security.md"
TEXT = PAGE.read_text()
TEMPLATES = ROOT / "charts" / "busbar" / "templates"
VALUES: dict[str, Any] = yaml.safe_load((ROOT / "charts" / "busbar" / "values.yaml").read_text())
NAMED = set(re.findall(r"`(tests/[\w/]+\.py)`", TEXT))


def templates(part: str = "") -> str:
    return "\n".join(file.read_text() for file in sorted((TEMPLATES / part).rglob("*.yaml")))


def section(title: str) -> str:
    return TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_every_test_named_exists_and_says_what_it_proves() -> None:
    assert len(NAMED) > 30
    for name in NAMED:
        path = ROOT / name
        assert path.is_file(), name
        assert ast.get_docstring(ast.parse(path.read_text())), name


def test_every_test_of_rights_and_logins_is_named() -> None:
    patterns = (
        "tests/cluster/test_admission_*.py",
        "tests/cluster/test_verbs*.py",
        "tests/api/access/test_*.py",
    )
    found = {str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern)}
    assert found - NAMED == set()


def test_the_accounts_and_roles_are_those_of_the_chart() -> None:
    accounts = set(re.findall(r"kind: ServiceAccount\nmetadata:\n  name: (\S+)", templates()))
    assert set(re.findall(r"^\| `([\w-]+)` \|", section("ServiceAccounts"), re.MULTILINE)) == accounts
    roles = {"busbar-admin"} | {
        f"busbar-tenant-{name}" for name in re.findall(r'\(dict "name" "(\w+)"', templates("rbac"))
    }
    assert set(re.findall(r"`(busbar-(?:tenant-\w+|admin))`", section("People"))) == roles


def test_every_secret_of_the_chart_has_its_commands() -> None:
    made = set(
        re.findall(r'(?:\(dict "name"|\$name :=) "([\w-]+)"', (TEMPLATES / "secrets.yaml").read_text())
    )
    rotate = section("Rotate a secret")
    assert set(re.findall(r"delete secret (\S+)", rotate)) == made
    assert made <= set(re.findall(r"^\| `([\w-]+)` \|", rotate, re.MULTILINE))
    users = {
        "busbar-workload-key": "operator",
        "busbar-power-key": "operator",
        "busbar-power-lease-key": "operator",
        "busbar-api-session": "api",
    }
    for name in made:
        block = next(b for b in re.findall(r"```sh\n(.*?)```", rotate, re.DOTALL) if name in b)
        assert f"rollout restart deploy/busbar-{users[name]}\n" in block
        assert f"secretName: {name}" in (TEMPLATES / f"{users[name]}.yaml").read_text()


def test_every_policy_named_is_in_the_chart() -> None:
    policies = set(re.findall(r'busbar\.policyMetadata" \(list \. "([\w-]+)"\)', templates("admission")))
    said = set(re.findall(r"polic(?:y|ies) `([\w-]+)`(?: and `([\w-]+)`)?", TEXT))
    assert {name for pair in said for name in pair if name} <= policies
    assert said


def test_every_setting_named_exists() -> None:
    for path in re.findall(r"`((?:api|admission|monitoring|networkPolicies)\.[A-Za-z.]+)", TEXT):
        node: Any = VALUES
        for step in path.rstrip(".").split("."):
            assert step in node, path
            node = node[step]


def test_the_times_are_those_of_the_code() -> None:
    assert (FRESH_S, STALE_S) == (60.0, 3600.0), "how long the gateway uses a key: say it on the page"
    assert "by the gateway within 60 s" in TEXT


def test_every_link_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert [link for link in links if not (PAGE.parent / link).is_file()] == []
