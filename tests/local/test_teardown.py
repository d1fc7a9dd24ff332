"""Instances that start and end beside each other, a deletion that is interrupted, and settings that cannot be read."""

from __future__ import annotations

import fcntl
import shutil
import threading
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from busbar.local import build, instance, packages, preflight, supervisor, teardown, up
from busbar.local.errors import InstanceError, StartError
from busbar.local.instance import Instance, alone, load, load_or_create, names


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Instance:
    """An instance that was started once, the only one; its data lie under `tmp_path`."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    found = Instance("try", 64, 30080, 30081)
    found.save()
    return found


def test_down_waits_for_an_up_that_is_still_at_work(
    made: Instance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    waiting = threading.Event()

    def said(text: str) -> None:
        if text.startswith("waiting for another `busbar up`"):
            waiting.set()

    def sweep(instance: Instance) -> list[str]:
        return []

    monkeypatch.setattr(build, "say", said)
    monkeypatch.setattr(teardown, "stop", lambda found: happened.append("stopped"))
    monkeypatch.setattr(teardown, "sweep", sweep)
    down = threading.Thread(target=teardown.down, args=("try",), kwargs={"purge": True})
    with alone("try"):
        down.start()
        assert waiting.wait(20)
        happened.append("up ended")
    down.join(20)
    assert happened == ["up ended", "stopped"]
    assert list((tmp_path / "busbar").iterdir()) == []


def test_an_up_that_waited_for_a_deletion_begins_with_an_instance_of_its_own(
    made: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = threading.Event()
    brought_up: list[tuple[Instance, Instance | None]] = []

    def bring_up(found: Instance, wishes: up.Wishes, tag: str) -> None:
        brought_up.append((found, load("try")))

    monkeypatch.setattr(build, "say", lambda text: waiting.set())
    monkeypatch.setattr(preflight, "check", lambda name: None)
    monkeypatch.setattr(packages, "ensure", lambda wanted: None)
    monkeypatch.setattr(up, "prepare", lambda: "tag")
    monkeypatch.setattr(up, "bring_up", bring_up)
    starting = threading.Thread(target=up.up, args=(up.Wishes("try"),))
    with alone("try"):
        starting.start()
        assert waiting.wait(20)
        teardown.delete_data(made)
    starting.join(20)
    ((found, stored),) = brought_up
    assert found == stored


def test_who_waited_for_a_lock_whose_file_is_gone_waits_for_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, waiting, inside = tmp_path / "lock", threading.Event(), threading.Event()
    monkeypatch.setattr(build, "say", lambda text: waiting.set())

    def hold() -> None:
        with build.locked(file, "a test"):
            inside.set()

    other = threading.Thread(target=hold)
    with file.open("w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        other.start()
        assert waiting.wait(20)
        waiting.clear()
        file.unlink()
        second = file.open("w")
        fcntl.flock(second, fcntl.LOCK_EX)
    found = waiting.wait(5), inside.is_set()
    second.close()
    other.join(20)
    assert found == (True, False)
    assert inside.is_set()
    assert not file.exists()


def test_two_instances_that_are_made_at_once_get_ports_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    both = threading.Event()
    asked: list[None] = []

    def networks() -> list[IPv4Network]:
        asked.append(None)
        if len(asked) == 2:
            both.set()
        assert both.wait(20)
        return []

    monkeypatch.setattr(instance, "machine_networks", networks)
    monkeypatch.setattr(instance, "port_is_free", lambda port: True)
    monkeypatch.setattr(build, "say", lambda text: both.set())
    threads = [threading.Thread(target=load_or_create, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    found = [load(name) for name in ("one", "two")]
    ports = [port for one in found if one for port in (one.portal_port, one.gateway_port)]
    assert len(set(ports)) == 4


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        "{}",
        '{"name": "try", "octet": 64, "portal_port": 30080}',
        '{"name": "try", "octet": "64", "portal_port": 30080, "gateway_port": 30081}',
        '{"name": "try", "octet": 64, "portal_port": 30080, "gateway_port": 30081, "later": 1}',
    ],
)
def test_settings_of_another_version_are_refused_by_their_file(made: Instance, text: str) -> None:
    assert load("try") == made
    file = made.folder / "instance.json"
    file.write_text(text)
    said = f"{file} does not hold .* use the version that made"
    with pytest.raises(InstanceError, match=said):
        load_or_create("two")
    with pytest.raises(InstanceError, match=said):
        teardown.down("try", purge=True)
    assert file.exists()


def test_a_supervisor_that_cannot_start_is_told_with_its_log(tmp_path: Path) -> None:
    (tmp_path / "running.json").mkdir()  # cannot be replaced by a file
    with pytest.raises(StartError, match=r"ended with 1; see .*supervisor\.log"):
        supervisor.launch(tmp_path)
    assert "Error" in (tmp_path / "logs" / "supervisor.log").read_text()


def test_a_start_after_a_deletion_that_was_interrupted_meets_nothing_of_it(
    made: Instance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (made.folder / "volumes").mkdir()

    def interrupted(path: Path) -> None:
        (path / "volumes").rmdir()
        raise KeyboardInterrupt

    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            teardown.delete_data(made)
    assert load("try") is None
    assert names() == []
    assert not made.folder.exists()
    teardown.down("try", purge=True)
    assert list((tmp_path / "busbar").iterdir()) == []
