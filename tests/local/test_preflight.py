"""The preflight check of the machine: one sentence per missing requirement."""

from __future__ import annotations

from dataclasses import replace

import pytest

from busbar.local.preflight import GIB, Facts, complaints

GOOD = Facts(
    system="Linux",
    machine="x86_64",
    root=True,
    python=(3, 11),
    memory_bytes=8 * GIB,
    disk_free={"/home": 40 * GIB},
    disk_needed=30 * GIB,
)


def test_a_good_machine_has_no_complaints() -> None:
    assert complaints(GOOD) == []


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (replace(GOOD, system="Darwin"), "a Linux machine is needed"),
        (replace(GOOD, root=False), "root is needed"),
        (replace(GOOD, machine="riscv64"), "riscv64"),
        (replace(GOOD, python=(3, 9)), "Python 3.11 or newer is needed, and this is 3.9"),
        (replace(GOOD, memory_bytes=2 * GIB), "6 GiB of memory are needed, and there are 2.0"),
        (
            replace(GOOD, disk_free={"/home": 12 * GIB}),
            "30 GiB of disk are needed in /home, and 12.0 are free",
        ),
        (replace(GOOD, busy_ports=(30080,)), "port 30080 of 127.0.0.1"),
        (replace(GOOD, missing_features=("the cgroup controller pids",)), "lacks the cgroup controller pids"),
        (replace(GOOD, missing_packages=("runc",), has_apt=False), "runc"),
        (replace(GOOD, has_cryptography=False), "cryptography"),
    ],
)
def test_each_missing_thing_gets_one_sentence(facts: Facts, said: str) -> None:
    found = complaints(facts)
    assert len(found) == 1
    assert said in found[0]


def test_missing_packages_are_no_complaint_where_apt_can_install_them() -> None:
    assert complaints(replace(GOOD, missing_packages=("runc",))) == []


def test_everything_missing_is_told_at_once() -> None:
    assert len(complaints(replace(GOOD, root=False, memory_bytes=0, disk_free={"/": 0}))) == 3
