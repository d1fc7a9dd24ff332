"""A cluster that a kubeconfig names, in place of the scripts' own one-machine cluster.

Its API server, its scheduler and its controllers are what is measured then; nodes are still KWOK's, whose process runs here,
and so does the operator. What a run makes is removed at its end, the CRDs where it made them. It needs the rights of
`cluster-admin`, and that Busbar does not run there: two operators would take turns.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import httpx2
import yaml
from tests.cluster.apiserver import JSON, ApiServer, Client, render_chart

from busbar.kube.login import Login, from_kubeconfig

WAIT_S = 300.0
OURS = ("nodes", "tenants", "acceleratorpools", "performanceprofiles")
"""Cluster-scoped kinds of which a run makes objects."""


class GivenCluster(ApiServer):
    """As the scripts use their own server; raises SystemExit with a sentence where the cluster is not to be used."""

    @classmethod
    def of(cls, kubeconfig: Path) -> GivenCluster:
        directory = Path(tempfile.mkdtemp(prefix="busbar-given-"))
        made = cls(directory, 0, "", "", "")
        made.source = kubeconfig.resolve()
        return made

    source: Path

    def install(self, documents: Sequence[JSON]) -> None:
        """Applies them; they are removed at the end."""
        for document in documents:
            self.admin.apply(document).expect()
            self._installed.append(document)

    @cached_property
    def _installed(self) -> list[JSON]:
        return []

    @cached_property
    def login(self) -> Login:
        return from_kubeconfig(self.source)

    @property
    def url(self) -> str:
        return self.login.server

    @property
    def _session(self) -> httpx2.Client:
        if self._http is None:
            verify = self.login.ssl_context()
            self._http = httpx2.Client(
                base_url=self.url,
                verify=verify if verify is not None else True,
                timeout=30.0,
                trust_env=False,
            )
        return self._http

    def client(self, user: str | None = None, groups: Sequence[str] = ()) -> Client:
        token = self.login.credential().token
        headers = [("Authorization", f"Bearer {token}")] if token else []
        if user is not None:
            headers.append(("Impersonate-User", user))
            headers += [("Impersonate-Group", group) for group in (*groups, "system:authenticated")]
        return Client(self._session, headers)

    def kubeconfig(self, user: str | None = None, groups: Sequence[str] = ()) -> Path:
        if user is None:
            return self.source
        document = yaml.safe_load(self.source.read_text())
        context = next(c for c in document["contexts"] if c["name"] == document["current-context"])
        entry = next(u for u in document["users"] if u["name"] == context["context"]["user"])
        entry["user"] |= {"as": user, "as-groups": [*groups, "system:authenticated"]}
        path = self.directory / f"kubeconfig-{''.join(c if c.isalnum() else '-' for c in user)}"
        path.write_text(yaml.safe_dump(document), encoding="utf-8")
        return path

    def make_namespace(self, name: str, labels: Any = None) -> None:
        """Its controllers make the namespace's service account."""
        body = {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": name, "labels": labels or {}},
        }
        self.admin.create(body).expect()
        _wait(
            f"the service account of namespace {name}",
            lambda: self.admin.get(f"/api/v1/namespaces/{name}/serviceaccounts/default").ok,
        )

    def install_crds(self) -> None:
        self.has_crds  # noqa: B018 - looked up before they are made
        super().install_crds()

    def check(self, namespaces: Sequence[str]) -> None:
        """Refuses a cluster where a run would meet what is there."""
        there = [name for name in namespaces if self.admin.get(f"/api/v1/namespaces/{name}").ok]
        if there:
            raise SystemExit(f"{self.url} has namespaces that a run makes and removes: {', '.join(there)}")
        found = [f"{path.rpartition('/')[2]}/{body['metadata']['name']}" for path, body in self._made()]
        if found:
            raise SystemExit(
                f"{self.url} has objects of the kinds that a run removes at its end: {', '.join(found[:5])}"
                f"{' and others' if len(found) > 5 else ''}; take another cluster"
            )

    @cached_property
    def has_crds(self) -> bool:
        """Whether our kinds were there before."""
        return self.admin.get("/apis/busbar.dev/v1alpha1").ok

    def clean(self, namespaces: Sequence[str]) -> None:
        """Removes what a run has made, while KWOK still ends pods."""
        # The chart's policies first: they hold everybody to the rules of tenants.
        for document in reversed(self._installed):
            self.admin.delete(document)
        for name in namespaces:
            self.admin.request("DELETE", f"/api/v1/namespaces/{name}", {"propagationPolicy": "Background"})
        for name in namespaces:
            _wait(f"the end of namespace {name}", partial(self._is_gone, name))
        for path, body in self._made():
            self.admin.request("DELETE", f"{path}/{body['metadata']['name']}")
        if not self.has_crds:
            for document in render_chart("busbar-crds"):
                self.admin.delete(document)

    def _is_gone(self, namespace: str) -> bool:
        return not self.admin.get(f"/api/v1/namespaces/{namespace}").ok

    def _made(self) -> Iterator[tuple[str, JSON]]:
        """The objects that are removed at the end: all of these kinds, as `check` has found none."""
        for plural in OURS:
            path = f"/api/v1/{plural}" if plural == "nodes" else f"/apis/busbar.dev/v1alpha1/{plural}"
            more = {"labelSelector": "type=kwok"} if plural == "nodes" else {}
            for body in self.admin.get(path, **more).body.get("items") or ():
                yield path, body

    def stop(self) -> None:
        if self._http is not None:
            self._http.close()
            self._http = None
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def version(self) -> str:
        """What the API server says that it is."""
        return json.dumps(self.admin.get("/version").expect()["gitVersion"]).strip('"')


def _wait(what: str, done: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_S
    while not done():
        if time.monotonic() > until:
            raise SystemExit(f"{what} was waited for in vain for {WAIT_S:.0f} s")
        time.sleep(0.5)
