"""The layout of the repository: folders are packages, no folder shadows a standard module, imports run one way."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("scheduler", "kube", "operator", "api", "gateway", "workloads", "cli", "local", "charts")
PYTHON_PARTS = tuple(part for part in PARTS if part != "charts")


@pytest.mark.parametrize("part", PARTS)
def test_each_part_is_linked_into_the_package(part: str) -> None:
    link = ROOT / ".src" / "busbar" / part
    assert link.is_symlink()
    assert link.readlink() == Path("../..") / part
    assert link.resolve() == ROOT / part


def test_no_folder_shadows_pythons_operator() -> None:
    assert not (ROOT / "operator" / "__init__.py").exists()
    code = "import operator; print(operator.__file__); import operator as o; print(o.add(1, 2))"
    result = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    first, second = result.stdout.split()
    assert not first.startswith(str(ROOT)), f"`import operator` finds {first}"
    assert second == "3"


def test_the_wheel_holds_exactly_what_the_folders_hold(tmp_path: Path) -> None:
    """Built from a copy: files of an earlier build in the checkout would be packed, and the metadata that a build
    leaves there would hide the installed one from tests that run at the same time."""
    copy = tmp_path / "copy"
    for folder in (*PARTS, ".src/busbar"):
        shutil.copytree(
            ROOT / folder, copy / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, copy / name)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(tmp_path), str(copy)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("busbar/")}
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *PARTS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    expected = {f"busbar/{name}" for name in tracked if name and (ROOT / name).is_file()}
    assert packed == expected


def test_the_command_line_starts_without_the_heavy_packages() -> None:
    code = "import sys, busbar.cli.main; print(sorted(set(sys.modules) & set('torch kubernetes fastapi sqlalchemy kopf numpy transformers'.split())))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_lock_files_carry_hashes_and_no_addresses() -> None:
    for path in [
        ROOT / "requirements.lock",
        ROOT / "tools" / "uv.lock",
        *(ROOT / "local" / "images").glob("*.lock"),
    ]:
        text = path.read_text()
        assert "://" not in text, f"{path.name} records an address"
        pins = [line for line in text.splitlines() if "==" in line and not line.lstrip().startswith("#")]
        assert pins
        assert text.count("--hash=sha256:") >= len(pins)


def test_every_part_has_a_readme_and_a_place_in_the_import_contracts() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    named = {
        module
        for contract in contracts
        for key in ("source_modules", "forbidden_modules")
        for module in contract.get(key, [])
    }
    for part in PYTHON_PARTS:
        assert (ROOT / part / "README.md").is_file(), f"{part}/README.md is missing"
        assert f"busbar.{part}" in named, f"no import contract names busbar.{part}"
