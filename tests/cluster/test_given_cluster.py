"""A benchmark on somebody's own cluster begins only where nothing lies that it would remove at its end."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from benchmarks.control.given_cluster import GivenCluster
from tests.cluster.apiserver import Answer, Client

API = "/apis/busbar.dev/v1alpha1"


class Holding:
    """An API server with our kinds and some objects."""

    def __init__(self, **objects: str) -> None:
        self._objects = objects

    def get(self, path: str, **query: str) -> Answer:
        if path == API:
            return Answer(200, {})
        plural = path.rpartition("/")[2]
        if plural not in ("nodes", "tenants", "acceleratorpools", "performanceprofiles"):
            return Answer(404, {})
        assert query == ({"labelSelector": "type=kwok"} if plural == "nodes" else {})
        name = self._objects.get(plural)
        items = [{"metadata": {"name": name}}] if name else []
        return Answer(200, {"items": items})


def given(holding: Holding, folder: Path, monkeypatch: pytest.MonkeyPatch) -> GivenCluster:
    made = GivenCluster(folder, 0, "", "", "")
    monkeypatch.setattr(GivenCluster, "url", "https://cluster")
    monkeypatch.setattr(GivenCluster, "admin", cast(Client, holding))
    return made


def test_an_empty_cluster_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given(Holding(), tmp_path, monkeypatch).check(["bench"])


@pytest.mark.parametrize("plural", ["nodes", "tenants", "acceleratorpools", "performanceprofiles"])
def test_a_cluster_with_objects_that_a_run_would_remove_is_refused_by_name(
    plural: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match=f"{plural}/theirs"):
        given(Holding(**{plural: "theirs"}), tmp_path, monkeypatch).check(["bench"])
