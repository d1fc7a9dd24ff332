"""The file of `busbar backup`, the sealed key, and what of each object is restored; without a cluster."""

from __future__ import annotations

import hashlib
import json
import stat
import zipfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest
from tests.cli.conftest import Site, run_busbar

from busbar.cli import sealed_key
from busbar.cli.backup_file import DATABASE, KEY, MANIFEST, OBJECTS, BackupWriter, open_backup, whole
from busbar.cli.errors import BusbarError, UsageProblem
from busbar.cli.restored_objects import RESTORING, kept, stored
from busbar.cli.restoring import Restoring
from busbar.kube.resources import (
    ACCELERATOR_POOLS,
    MODEL_SERVICES,
    PERFORMANCE_PROFILES,
    POWER_DOMAINS,
    TENANTS,
    TRAINING_JOBS,
)
from busbar.kube.resources import Resource as Kind

AT = datetime(2026, 3, 1, 12, tzinfo=UTC)
LINE = b'{"busbar":"database","revision":"0002"}\n'
DUMP = [LINE, json.dumps({"rows": 0, "sha256": hashlib.sha256(LINE).hexdigest()}).encode() + b"\n"]
PASSPHRASE = "correct horse battery staple"


def write(path: Path, *, key: bool = False, force: bool = False) -> None:
    with BackupWriter(path, force=force) as out:
        out.add(DATABASE, whole(DUMP))
        out.add(OBJECTS, [b'{"kind":"Tenant"}\n'])
        if key:
            out.add(KEY, [b"{}"])
        out.finish(version="0.1.0", server="https://busbar.test", made_at=AT)


# -- the file ------------------------------------------------------------------------------------------------


def test_a_file_is_for_its_owner_only_and_its_parts_come_back(tmp_path: Path) -> None:
    path = tmp_path / "b.zip"
    write(path, key=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = open_backup(path)
    assert (found.version, found.server, found.made_at) == ("0.1.0", "https://busbar.test", AT.isoformat())
    assert b"".join(found.pieces(DATABASE)) == b"".join(DUMP)
    assert (found.objects(), found.key()) == ([{"kind": "Tenant"}], {})
    assert [each.name for each in tmp_path.iterdir()] == ["b.zip"]


def test_texts_with_characters_that_end_lines_elsewhere_come_back(tmp_path: Path) -> None:
    document = {"kind": "Tenant", "spec": {"displayName": "a\u2028b\u2029c\x85d\x0b\x1c"}}
    with BackupWriter(tmp_path / "b.zip") as out:
        out.add(DATABASE, whole(DUMP))
        out.add(OBJECTS, [json.dumps(document, ensure_ascii=False).encode() + b"\n"] * 2)
        out.finish(version="0.1.0", server="https://busbar.test", made_at=AT)
    assert open_backup(tmp_path / "b.zip").objects() == [document, document]


def test_an_existing_file_is_replaced_only_on_request(tmp_path: Path) -> None:
    path = tmp_path / "b.zip"
    path.write_text("mine")
    with pytest.raises(UsageProblem, match="--force"):
        write(path)
    assert path.read_text() == "mine"
    write(path, force=True)
    assert open_backup(path).key() is None


def test_a_backup_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "b.zip"
    write(path)
    before = path.read_bytes()
    with pytest.raises(BusbarError, match="cut short"), BackupWriter(path, force=True) as out:
        out.add(DATABASE, whole(DUMP[:1]))
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["b.zip"]


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="cannot be written: No such file"):
        write(tmp_path / "no" / "b.zip")


def test_every_shorter_file_is_refused(tmp_path: Path) -> None:
    path, cut = tmp_path / "b.zip", tmp_path / "cut.zip"
    write(path)
    whole_file = path.read_bytes()
    for size in range(len(whole_file)):
        cut.write_bytes(whole_file[:size])
        with pytest.raises(BusbarError):
            open_backup(cut)
    cut.write_bytes(whole_file)
    open_backup(cut)


def test_no_changed_byte_gives_other_content(tmp_path: Path) -> None:
    path, changed = tmp_path / "b.zip", tmp_path / "changed.zip"
    write(path)
    good, original = path.read_bytes(), open_backup(path)
    for at in range(0, len(good), 3):
        changed.write_bytes(good[:at] + bytes([good[at] ^ 0x40]) + good[at + 1 :])
        try:
            found = open_backup(changed)
        except BusbarError:
            continue
        assert b"".join(found.pieces(DATABASE)) == b"".join(original.pieces(DATABASE))
        assert found.objects() == original.objects()


def rewritten(path: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """The file with another manifest."""
    other = path.with_name("other.zip")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(other, "w") as new:
        for name in (DATABASE, OBJECTS):
            new.writestr(name, old.read(name))
        about = json.loads(old.read(MANIFEST))
        edit(about)
        new.writestr(MANIFEST, json.dumps(about))
    return other


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda about: about.update(format=2), "has the format 2, and this version reads 1"),
        (lambda about: about.update(busbar="other"), "has the format"),
        (lambda about: about.pop("parts"), "is not a backup of Busbar"),
        (lambda about: about["parts"].pop(OBJECTS), "holds other parts"),
        (lambda about: about["parts"].update({"more": "x"}), "holds other parts"),
        (lambda about: about["parts"].update({KEY: "x"}), "is not a backup of Busbar"),
        (lambda about: about["parts"].update({OBJECTS: "x"}), "is damaged: objects.jsonl"),
    ],
)
def test_a_manifest_of_another_kind_is_refused(
    tmp_path: Path, edit: Callable[[Any], None], says: str
) -> None:
    path = tmp_path / "b.zip"
    write(path)
    with pytest.raises(BusbarError, match=says):
        open_backup(rewritten(path, edit))
    open_backup(rewritten(path, lambda about: None))


def test_a_dump_is_whole_in_pieces_of_any_size() -> None:
    text = b"".join(DUMP)
    for size in (1, 2, 7, len(LINE), len(text)):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert b"".join(whole(pieces)) == text
    for bad in ([], [LINE], [text[:-10]], [text.replace(b"0002", b"0003")], [text, b"[]\n"]):
        with pytest.raises(BusbarError, match=r"cut short|damaged"):
            list(whole(bad))


# -- the key -------------------------------------------------------------------------------------------------


def test_the_key_opens_with_its_passphrase_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sealed_key.N == 2**17
    monkeypatch.setattr(sealed_key, "N", 2**4)  # cheap here
    sealed = sealed_key.seal({"key": "c2VjcmV0"}, PASSPHRASE)
    assert "c2VjcmV0" not in json.dumps(sealed)
    assert sealed_key.unseal(sealed, PASSPHRASE) == {"key": "c2VjcmV0"}
    with pytest.raises(BusbarError, match="not the passphrase"):
        sealed_key.unseal(sealed, PASSPHRASE + "r")


@pytest.mark.parametrize("change", [{"n": 2**30}, {"kdf": "none"}, {"salt": "!"}, {"nonce": ""}])
def test_a_sealed_key_of_another_form_is_refused(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    monkeypatch.setattr(sealed_key, "N", 2**4)
    sealed = sealed_key.seal({"key": "x"}, PASSPHRASE)
    with pytest.raises(BusbarError, match="not readable by this version"):
        sealed_key.unseal({**sealed, **change}, PASSPHRASE)
    assert sealed_key.unseal(sealed, PASSPHRASE) == {"key": "x"}


def test_a_passphrase_is_the_first_line_and_not_short(tmp_path: Path) -> None:
    file = tmp_path / "phrase"
    file.write_text(f"{PASSPHRASE}\nnot this\n")
    assert sealed_key.read_passphrase(str(file)) == PASSPHRASE
    for text in ("", "too short\n"):
        file.write_text(text)
        with pytest.raises(UsageProblem, match="at least 12 characters"):
            sealed_key.read_passphrase(str(file))
    with pytest.raises(UsageProblem, match="No such file"):
        sealed_key.read_passphrase(str(tmp_path / "none"))


# -- objects -------------------------------------------------------------------------------------------------


def found(kind: Kind, spec: dict[str, Any], status: dict[str, Any]) -> dict[str, Any]:
    """An object as the API server gives it."""
    metadata = {
        "name": "one",
        "uid": "old",
        "resourceVersion": "7",
        "generation": 3,
        "creationTimestamp": "2026-03-01T12:00:00Z",
        "ownerReferences": [{"uid": "x"}],
        "finalizers": ["x/y"],
        "managedFields": [{}],
        "labels": {"team": "search"},
        "annotations": {"busbar.dev/requester": "ann"},
    }
    if kind.namespaced:
        metadata["namespace"] = "team-a"
    return {"metadata": metadata, "spec": spec, "status": status}


@pytest.mark.parametrize("was", [True, False])
def test_a_job_is_created_suspended_and_gets_its_own_suspend_back(was: bool) -> None:
    job = stored(kept(TRAINING_JOBS, found(TRAINING_JOBS, {"steps": 3, "suspend": was}, {})))
    new = job.as_new()
    assert new["spec"] == {"steps": 3, "suspend": True}
    assert new["metadata"] == {
        "name": "one",
        "namespace": "team-a",
        "labels": {"team": "search"},
        "annotations": {"busbar.dev/requester": "ann", RESTORING: "old"},
    }
    assert job.finishing() == {"metadata": {"annotations": {RESTORING: None}}, "spec": {"suspend": was}}


class Cluster:
    """A cluster with the objects of the given names only; remembers what they were given."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.given: list[tuple[str, object]] = []

    def account(self, name: str) -> str:
        return name

    def create(self, kind: Kind, namespace: str, document: dict[str, Any], by: str) -> dict[str, Any]:
        return {"metadata": {**document["metadata"], "uid": "new"}}

    def get(self, kind: Kind, namespace: str | None, name: str) -> dict[str, Any] | None:
        return {} if namespace is None else None

    def patch(
        self, kind: Kind, namespace: str, name: str, patch: object, **_: object
    ) -> dict[str, Any] | None:
        self.given.append((name, patch))
        return {} if name in self.names else None


@pytest.mark.parametrize("status", [{}, {"phase": "Failed"}])
def test_an_object_that_was_deleted_since_it_was_made_stays_away_and_the_others_are_finished(
    status: dict[str, Any],
) -> None:
    one = kept(TRAINING_JOBS, found(TRAINING_JOBS, {"steps": 3}, status))
    other = {**one, "metadata": {**one["metadata"], "name": "other"}}
    cluster, said = Cluster("other"), list[str]()
    restoring = Restoring(cast("Any", cluster), cast("Any", None), said.append)
    restoring.create([stored(one), stored(other)], continued=False)
    restoring.finish()
    assert said[-2:] == [
        "TrainingJob team-a/one was deleted since it was made, and is left out",
        "restored: 1 objects",
    ]
    assert cluster.given[-1] == ("other", stored(other).finishing())


def test_a_pool_is_not_suspended_and_its_status_is_observed_anew() -> None:
    pool = stored(kept(ACCELERATOR_POOLS, found(ACCELERATOR_POOLS, {"accelerator": "cpu"}, {"capacity": 8})))
    assert pool.as_new()["spec"] == {"accelerator": "cpu"}
    assert "namespace" not in pool.as_new()["metadata"]
    assert pool.finishing() == {"metadata": {"annotations": {RESTORING: None}}}
    assert pool.status({}) == {}


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_an_ended_job_keeps_its_whole_status(phase: str) -> None:
    status = {"phase": phase, "admission": {"id": "old-1"}, "lastUsageTime": "t", "attempt": 1}
    assert stored(kept(TRAINING_JOBS, found(TRAINING_JOBS, {}, status))).status({}) == status


@pytest.mark.parametrize(
    "phase", ["Pending", "Queued", "Admitted", "Starting", "Running", "Preempting", "Suspended"]
)
def test_any_other_job_keeps_what_it_did_and_not_where_it_was(phase: str) -> None:
    did = {
        "attempt": 2,
        "usage": {"cost": 1},
        "progress": {"step": 5},
        "checkpoint": {"step": 4},
        "restarts": 1,
    }
    was = {
        "admission": {},
        "release": {},
        "reservation": {},
        "retryAt": "t",
        "lastUsageTime": "t",
        "waiting": {},
    }
    job = stored(kept(TRAINING_JOBS, found(TRAINING_JOBS, {}, {"phase": phase, **did, **was})))
    assert job.status({}) == did


def test_nobody_is_charged_for_the_time_between_backup_and_restore() -> None:
    status = {
        "usage": {"cost": 3},
        "decayed": {"work": 5, "rate": 2, "asOf": "t"},
        "users": [{"name": "ann", "work": 5, "rate": 2}],
        "allocated": [{"accelerator": "cpu", "count": 2}],
        "lastUpdated": "t",
        "runningIn": ["team-a"],
    }
    assert stored(kept(TENANTS, found(TENANTS, {}, status))).status({}) == {
        "usage": {"cost": 3},
        "decayed": {"work": 5, "rate": 0, "asOf": "t"},
        "users": [{"name": "ann", "work": 5, "rate": 0}],
    }
    service = {"usage": {"cost": 1}, "readyReplicas": 2, "lastUsageTime": "t", "pools": [{}]}
    restored = stored(kept(MODEL_SERVICES, found(MODEL_SERVICES, {}, service)))
    assert restored.status({}) == {"usage": {"cost": 1}}


def test_a_feed_keeps_its_joules_and_not_what_it_drew() -> None:
    status = {"energyJoules": 5.5, "unassignedJoules": 1, "drawWatts": 7, "lastOverrun": {}, "conditions": []}
    feed = stored(kept(POWER_DOMAINS, found(POWER_DOMAINS, {}, status)))
    assert feed.status({}) == {"energyJoules": 5.5, "unassignedJoules": 1}


def test_a_profile_knows_its_counted_runs_by_the_new_uids() -> None:
    status = {"counted": {"before": "t", "runs": ["a-b-1", "gone-2"]}, "cells": [{}]}
    profile = stored(kept(PERFORMANCE_PROFILES, found(PERFORMANCE_PROFILES, {}, status)))
    assert profile.status({"a-b": "c-d"}) == {
        "counted": {"before": "t", "runs": ["c-d-1", "gone-2"]},
        "cells": [{}],
    }


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"kind": "Secret"},
        {"kind": "Tenant", "apiVersion": "busbar.dev/v2", "metadata": {"name": "a", "uid": "u"}, "spec": {}},
        {"kind": "Tenant", "apiVersion": "busbar.dev/v1alpha1", "metadata": {"name": "a"}, "spec": {}},
        {
            "kind": "Tenant",
            "apiVersion": "busbar.dev/v1alpha1",
            "metadata": {"name": "a", "uid": "u"},
            "spec": 1,
        },
        {
            "kind": "TrainingJob",
            "apiVersion": "busbar.dev/v1alpha1",
            "metadata": {"name": "a", "uid": "u"},
            "spec": {},
        },
    ],
)
def test_what_is_no_object_of_ours_is_not_restored(document: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=" "):
        stored(document)


# -- the commands --------------------------------------------------------------------------------------------


def test_a_file_that_is_no_backup_is_refused_before_anything_is_asked(home: Path) -> None:
    (home / "b.zip").write_text("PK")
    done = run_busbar("restore", str(home / "b.zip"))
    assert (done.code, "is no backup, or is cut short" in done.err) == (1, True)
    missing = run_busbar("restore", str(home / "none.zip"))
    assert (missing.code, "No such file" in missing.err) == (2, True)


def test_a_passphrase_for_a_file_without_a_key_is_refused(home: Path) -> None:
    write(home / "b.zip")
    with zipfile.ZipFile(home / "b.zip") as archive:
        assert OBJECTS in archive.namelist()
    tenant = {
        "kind": "Tenant",
        "apiVersion": TENANTS.api_version,
        "metadata": {"name": "a", "uid": "u"},
        "spec": {},
    }
    with BackupWriter(home / "c.zip") as out:
        out.add(DATABASE, DUMP)
        out.add(OBJECTS, [json.dumps(tenant).encode()])
        out.finish(version="0.1.0", server="x", made_at=AT)
    done = run_busbar("restore", str(home / "c.zip"), "--passphrase-file", str(home / "b.zip"))
    assert (done.code, "has no workload key" in done.err) == (2, True)
    done = run_busbar("restore", str(home / "b.zip"))
    assert (done.code, "an object that cannot be restored" in done.err) == (1, True)


async def test_a_cluster_is_needed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(site.folder / "none"))
    done = await site.busbar("backup", str(site.folder / "b.zip"))
    assert (done.code, "set KUBECONFIG" in done.err) == (2, True)
    assert not (site.folder / "b.zip").exists()
