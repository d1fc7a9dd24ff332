"""pyproject.toml names what the code uses: no dependency that nothing needs, no import that nothing declares."""

from __future__ import annotations

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASE = "base"
PARTS = {
    BASE: ("cli", "kube"),
    "operator": ("operator", "scheduler", "kube"),
    "api": ("api", "kube"),
    "gateway": ("gateway", "kube"),
    "scheduler": ("scheduler",),
    "workloads": ("workloads", "scheduler/fit", "kube"),
    "grammar": ("workloads/serving",),
    "local": ("local",),
    "dev": ("tests", "tools", "benchmarks", "examples", "scheduler"),
}
"""The folders whose imports each extra serves; the base serves all."""
NOT_IMPORTED = {
    "aiosqlite": "SQLAlchemy loads it for sqlite+aiosqlite URLs",
    "asyncpg": "SQLAlchemy loads it for postgresql+asyncpg URLs",
    "isal": "checkpoints load it by name, and take zlib where it is missing",
    "itsdangerous": "Starlette signs session cookies with it",
    "nvidia-ml-py": "the node agent loads it by name, and does without",
    "python-multipart": "FastAPI reads forms with it",
    "uv": "a program: builds images, makes lock files",
    "build": "a program: makes the wheel",
    "import-linter": "a program of make check",
    "mypy": "a program of make check",
    "ruff": "a program of make check",
    "pytest-asyncio": "pytest loads it",
    "pytest-xdist": "pytest loads it",
    "setuptools": "builds the wheel without isolation",
    "types-pyyaml": "mypy reads it",
}
PART_OF = {
    "pydantic-core": "pydantic",
    "starlette": "fastapi",
    "multidict": "aiohttp",
    "h11": "uvicorn",
    "triton": "torch",
}
"""Packages that a declared one is built on and hands out in its interface."""


def project() -> dict[str, list[str]]:
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = {BASE: told["dependencies"], **told["optional-dependencies"]}
    names = {
        extra: [re.split(r"[\[><=~! ]", one)[0].lower() for one in lines] for extra, lines in lists.items()
    }
    return {extra: [name for name in found if name != "busbar"] for extra, found in names.items()}


@functools.cache
def modules(folder: str) -> set[str]:
    """The top-level modules that a folder imports, also inside functions."""
    found: set[str] = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found


distributions = functools.cache(packages_distributions)


@functools.cache
def packages(folder: str) -> frozenset[str]:
    """The distributions that a folder imports, ours and Python's own left out."""
    return frozenset(_packages(folder))


def _packages(folder: str) -> Iterator[str]:
    known = distributions()
    for module in modules(folder) - sys.stdlib_module_names - {"busbar", "_typeshed"}:
        if not (ROOT / module).is_dir():
            yield from (name.lower().replace("_", "-") for name in known.get(module, [module]))


@pytest.mark.parametrize("extra", sorted(PARTS))
def test_every_dependency_is_imported_or_says_who_needs_it(extra: str) -> None:
    used = {name for part in PARTS[extra] for name in packages(part)}
    assert set(project()[extra]) - used - NOT_IMPORTED.keys() == set()


@pytest.mark.parametrize("extra", sorted(PARTS))
def test_every_import_of_an_extras_parts_is_declared_by_it(extra: str) -> None:
    declared = set(project()[BASE]) | set(project()[extra])
    if extra == "dev":
        declared = {name for names in project().values() for name in names}
    if extra == "grammar":  # it only adds to the engines
        declared |= set(project()["workloads"])
    # The client of the API server, sealing a key, drawing, and grammars are imported by functions that need them; a vLLM
    # that is a peer has an environment of its own.
    elsewhere = {
        BASE: {"aiohttp", "cryptography"},
        "local": set(),
        "dev": {"vllm"},
        "workloads": {"matplotlib", "llguidance"},
    }.get(extra, {"matplotlib"})
    used = {PART_OF.get(name, name) for part in PARTS[extra] for name in packages(part)}
    assert used - declared - elsewhere == set()


def test_the_lock_file_pins_every_declared_package() -> None:
    pinned = set(
        re.findall(r"^([a-z0-9.-]+)(?:\[\w+\])?==", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    )
    assert {name for names in project().values() for name in names} - pinned == set()
