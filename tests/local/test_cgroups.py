"""Cgroups, on a copy of both layouts in a temporary folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from busbar.local import cgroups


@pytest.fixture
def v2(tmp_path: Path) -> Path:
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory hugetlb pids rdma\n")
    (tmp_path / "cgroup.procs").write_text("")
    (tmp_path / "cgroup.subtree_control").write_text("")
    return tmp_path


@pytest.fixture
def v1(tmp_path: Path) -> Path:
    for name in ("cpu", "cpuset", "memory", "pids"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cgroup.procs").write_text("")
    return tmp_path


def test_version_2_hands_the_needed_controllers_down(v2: Path) -> None:
    cgroups.create("busbar.x", v2)
    assert (v2 / "busbar.x").is_dir()
    handed = set((v2 / "cgroup.subtree_control").read_text().split())
    assert {"+cpu", "+cpuset", "+memory", "+pids"} <= handed
    assert "+rdma" not in handed


def test_version_1_makes_the_cgroup_in_every_tree(v1: Path) -> None:
    cgroups.create("busbar.x", v1)
    assert all((v1 / name / "busbar.x").is_dir() for name in cgroups.NEEDED)


def test_remove_takes_everything_below_and_is_harmless_twice(v1: Path) -> None:
    cgroups.create("busbar.x/kubepods/pod1", v1)
    assert cgroups.remove("busbar.x", v1) == []
    assert cgroups.remove("busbar.x", v1) == []
    assert not any((v1 / name / "busbar.x").exists() for name in cgroups.NEEDED)


def test_a_container_that_holds_processes_in_its_root_cannot_hand_out_cgroups(v2: Path) -> None:
    assert cgroups.may_have_children(v2)
    (v2 / "cgroup.type").write_text("domain\n")
    (v2 / "cgroup.procs").write_text("1\n")
    assert not cgroups.may_have_children(v2)


@pytest.mark.parametrize(
    ("usage", "key"), [("memory.current", "inactive_file"), ("memory.usage_in_bytes", "total_inactive_file")]
)
def test_the_working_set_leaves_out_what_can_be_dropped(tmp_path: Path, usage: str, key: str) -> None:
    (tmp_path / usage).write_text("1000\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\n{key} 300\n")
    assert cgroups.working_set(tmp_path) == 700


def test_pods_weigh_two_busy_processes_per_core_in_both_versions(
    v1: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (v1 / "cpu" / "busbar.x").mkdir()
    cgroups.weigh("busbar.x", 2, v1)
    assert (v1 / "cpu" / "busbar.x" / "cpu.shares").read_text() == "4096"
    v2 = tmp_path_factory.mktemp("v2")
    (v2 / "cgroup.controllers").touch()
    (v2 / "busbar.x").mkdir()
    cgroups.weigh("busbar.x", 2, v2)
    assert (v2 / "busbar.x" / "cpu.weight").read_text() == "400"
