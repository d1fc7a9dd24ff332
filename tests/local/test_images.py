"""Image recipes: hashed locks without index addresses, small control side, tags that follow the content."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from busbar.local.errors import BuildError
from busbar.local.images import builder, recipe
from busbar.local.images.lock import check

PLATFORM, WORKLOADS = recipe.IMAGES


@pytest.mark.parametrize("image", recipe.IMAGES, ids=lambda image: image.name)
def test_every_package_of_a_lock_is_pinned_and_hashed(image: recipe.Image) -> None:
    blocks = re.split(r"\n(?=\S)", image.lock.read_text().strip())
    pinned = [block for block in blocks if not block.startswith("#")]
    assert len(pinned) > 20
    assert all(re.match(r"[\w.\[\],-]+==\S+", block) and "--hash=sha256:" in block for block in pinned)


@pytest.mark.parametrize("image", recipe.IMAGES, ids=lambda image: image.name)
def test_a_lock_holds_no_index_address(image: recipe.Image) -> None:
    assert "://" not in image.lock.read_text()


def test_the_platform_image_has_no_torch_and_the_engines_have() -> None:
    check(PLATFORM, PLATFORM.lock.read_text())
    assert re.search(r"^torch==", WORKLOADS.lock.read_text(), re.MULTILINE)


def test_torch_in_the_platform_lock_is_refused() -> None:
    with pytest.raises(BuildError, match="torch"):
        check(PLATFORM, "aiohttp==3\ntorch==2.15.0 \\\n")


def test_the_platform_image_carries_no_engine_source() -> None:
    folders = {name.split("/")[0] for name, _ in recipe.source_files(PLATFORM)}
    assert "workloads" not in folders
    assert {"operator", "api", "gateway"} <= folders


def test_byte_code_never_counts_as_source() -> None:
    assert not any(
        "__pycache__" in name or name.endswith(".pyc") for name, _ in recipe.source_files(WORKLOADS)
    )


def test_the_dependency_layer_does_not_change_with_our_source(monkeypatch: pytest.MonkeyPatch) -> None:
    before = recipe.dependencies_tag(PLATFORM), recipe.image_tag(PLATFORM)
    monkeypatch.setattr(recipe, "source_files", lambda image: [("kube/new.py", Path(__file__))])
    assert recipe.dependencies_tag(PLATFORM) == before[0]
    assert recipe.image_tag(PLATFORM) != before[1]


def test_the_engines_have_a_compiler_and_the_platform_has_none() -> None:
    assert "gcc" in WORKLOADS.debian
    assert not {"gcc", *WORKLOADS.debian} & {*recipe.DEBIAN_PACKAGES, *PLATFORM.debian}
    tags = [recipe.base_tag(image.debian) for image in recipe.IMAGES]
    assert tags[0] == recipe.base_tag() != tags[1]


def test_the_dependency_layer_changes_with_debian_packages_and_checks() -> None:
    before = recipe.dependencies_tag(WORKLOADS)
    assert recipe.dependencies_tag(replace(WORKLOADS, debian=("gcc",))) != before
    assert recipe.dependencies_tag(replace(WORKLOADS, check="")) != before


def test_the_staged_source_has_commands_metadata_and_byte_code(tmp_path: Path) -> None:
    builder.stage(PLATFORM, tmp_path / "busbar")
    root = tmp_path / "busbar"
    assert (root / "bin" / "busbar-operator").stat().st_mode & 0o111
    assert (root / "busbar" / "operator" / "main.py").exists()
    assert list(root.glob("busbar-*.dist-info/METADATA"))
    assert all(path.stat().st_mtime == 0 for path in root.rglob("*"))
    if builder.compiled_here():
        assert list((root / "busbar" / "operator" / "__pycache__").glob("main.*.pyc"))
