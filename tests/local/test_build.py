"""The builder: names, version keys, and pins."""

from __future__ import annotations

from pathlib import Path

import pytest

from busbar.local import build
from busbar.local.errors import BuildError


def test_links_lead_to_the_program_that_provides_them() -> None:
    assert build.program("kube-apiserver").file == "kube-control"
    assert build.program("kubelet").file == "kube-node"


def test_an_unknown_program_is_refused_with_the_known_names() -> None:
    with pytest.raises(BuildError, match="kube-apiserver"):
        build.binary("kube-apisever")


def test_programs_of_one_module_lie_in_one_folder_named_by_their_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.location("etcd").parent == build.location("kubectl").parent
    assert build.version_key("kubernetes") in str(build.location("etcd"))


def test_a_built_program_is_returned_without_building(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    there = build.location("helm")
    there.parent.mkdir(parents=True)
    there.touch()
    monkeypatch.setattr(build, "build", lambda program: pytest.fail("built again"))
    assert build.binary("helm") == there


@pytest.mark.parametrize("module", sorted({p.module for p in build.PROGRAMS}))
def test_every_module_is_pinned(module: str) -> None:
    folder = build.sources(module)
    assert (folder / "go.mod").exists()
    requires = "require" in (folder / "go.mod").read_text()
    assert (folder / "go.sum").exists() == requires


def test_the_kubernetes_that_is_pinned_is_the_one_it_calls_itself() -> None:
    text = (build.sources("kubernetes") / "go.mod").read_text()
    assert f"k8s.io/kubernetes {build.KUBERNETES}" in text
    assert f"=> k8s.io/api v0.{build.KUBERNETES.split('.', 1)[1]}" in text
