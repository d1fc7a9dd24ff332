"""What the API server serves, by its own discovery: every resource and subresource of every group and version."""

from __future__ import annotations

from dataclasses import dataclass

from tests.cluster.apiserver import ApiServer

VERBS = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")


@dataclass(frozen=True)
class Served:
    """One resource, or one subresource of it, in one version of its group."""

    group: str
    version: str
    plural: str
    subresource: str
    kind: str
    namespaced: bool
    verbs: tuple[str, ...]

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def name(self) -> str:
        """Its name in RBAC rules: `pods` or `pods/log`."""
        return f"{self.plural}/{self.subresource}" if self.subresource else self.plural

    @property
    def root(self) -> str:
        return f"/apis/{self.api_version}" if self.group else f"/api/{self.version}"

    @property
    def stored(self) -> bool:
        """Whether objects of it exist, which a person may name."""
        return not self.subresource and "get" in self.verbs

    def collection(self, namespace: str | None) -> str:
        """Its objects in one namespace; None, and for a resource of the cluster: all of them."""
        within = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        return f"{self.root}{within}/{self.plural}"

    def item(self, namespace: str, name: str) -> str:
        """One object, or its subresource."""
        path = f"{self.collection(namespace)}/{name}"
        return f"{path}/{self.subresource}" if self.subresource else path


def served(server: ApiServer) -> tuple[Served, ...]:
    """All of it, in the server's order."""
    groups = server.admin.get("/apis").expect()["groups"]
    versions = ["v1", *(v["groupVersion"] for group in groups for v in group["versions"])]
    found = []
    for api_version in versions:
        group, _, version = api_version.rpartition("/")
        root = f"/apis/{api_version}" if group else f"/api/{version}"
        for entry in server.admin.get(root).expect()["resources"]:
            plural, _, subresource = entry["name"].partition("/")
            verbs = tuple(verb for verb in VERBS if verb in entry["verbs"])
            found.append(
                Served(group, version, plural, subresource, entry["kind"], entry["namespaced"], verbs)
            )
    return tuple(found)
