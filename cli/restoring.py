"""The steps of `busbar restore`.

    1  namespaces that are missing; then pools, power domains, tenants, profiles, jobs and services, each one created
       suspended and marked
    2  the database, with the new uid of each object instead of the one in the backup
    3  in the same order: the stored status, then the object's own `suspend`, and the mark goes

Objects that exist are left alone. The database comes between the two because only then the new uids are known and no
usage has been written under them: a job and its history stay one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from busbar.cli.backup_file import DATABASE, BackupFile
from busbar.cli.client import Client
from busbar.cli.cluster import JSON_PATCH, Cluster, Document
from busbar.cli.errors import BusbarError
from busbar.cli.restored_objects import RESTORING, Stored
from busbar.kube.resources import NAMESPACES

API, OPERATOR = "busbar-api", "busbar-operator"
Say = Callable[[str], None]
SAY_EVERY = 500
"""Objects; each costs two or three requests."""


class Restoring:
    """One restore; objects that are made or taken up again go through `create`, `load` and `finish`."""

    def __init__(self, cluster: Cluster, client: Client, say: Say) -> None:
        self._cluster = cluster
        self._client = client
        self._say = say
        self._ours: list[Stored] = []
        self._uids: dict[str, str] = {}

    def check(self, file: BackupFile, *, continued: bool) -> None:
        """Refuse what would end half way: a used database, another schema, too few rights."""
        state = self._client.database_state()
        revision = _revision(file)
        if revision != state.revision:
            raise BusbarError(
                f"the backup has schema revision {revision} (Busbar {file.version}) and the server has "
                f"{state.revision} (Busbar {state.version}): restore with the version that made it, then upgrade"
            )
        if continued and state.unused:
            raise BusbarError("the database is unused, so there is nothing to continue: leave out --continue")
        if not continued and not state.unused:
            raise BusbarError(
                f"a backup is restored into an unused database only; this one has {', '.join(state.found)}. If an "
                "earlier restore of this file was interrupted after the database, go on with --continue"
            )
        self._cluster.listing(NAMESPACES, by=self._cluster.account(OPERATOR))

    def create(self, objects: Sequence[Stored], *, continued: bool) -> None:
        """Create what does not exist; with `continued`, only take up again what an interrupted restore left."""
        if not continued:
            self._make_namespaces(objects)
        made: Counter[str] = Counter()
        for each in self._counted(objects, "objects"):
            found = self._cluster.get(each.resource, each.namespace, each.name)
            if found is None and continued:
                self._say(f"{each.reference} does not exist, and is left out")
                continue
            if found is None:
                by = self._cluster.account(API) if each.can_suspend else None
                found = self._cluster.create(each.resource, each.namespace, each.as_new(), by)
                made[each.resource.plural] += 1
            meta = found["metadata"]
            if (meta.get("annotations") or {}).get(RESTORING) != each.uid:
                if not continued:
                    self._say(f"{each.reference} exists and is left as it is")
                continue
            self._ours.append(each)
            self._uids[each.uid] = str(meta["uid"])
        self._say("created: " + (", ".join(f"{count} {kind}" for kind, count in made.items()) or "no object"))

    def load(self, file: BackupFile) -> None:
        """Restore the database, all of it or nothing."""
        done = self._client.restore_database(self._uids, file.pieces(DATABASE))
        self._say(f"database: {done.rows} rows as of {done.made_at:%Y-%m-%d %H:%M:%S} UTC")

    def finish(self) -> None:
        """Give every object its status and then its own `suspend`; one that was deleted since it was made stays away."""
        gone = 0
        for each in self._counted(self._ours, "statuses"):
            if self._finish(each) is None:
                self._say(f"{each.reference} was deleted since it was made, and is left out")
                gone += 1
        self._say(f"restored: {len(self._ours) - gone} objects")

    def _finish(self, each: Stored) -> Document | None:
        status = each.status(self._uids)
        if status:
            found = self._cluster.patch(
                each.resource,
                each.namespace,
                each.name,
                [{"op": "add", "path": "/status", "value": status}],
                subresource="status",
                form=JSON_PATCH,
                by=self._cluster.account(OPERATOR),
            )
            if found is None:
                return None
        by = self._cluster.account(API) if each.can_suspend else None
        return self._cluster.patch(each.resource, each.namespace, each.name, each.finishing(), by=by)

    def _counted(self, items: Sequence[Stored], what: str) -> Iterator[Stored]:
        for number, item in enumerate(items):
            if number and number % SAY_EVERY == 0:
                self._say(f"{what}: {number:,} of {len(items):,}")
            yield item

    def _make_namespaces(self, objects: Sequence[Stored]) -> None:
        for name in sorted({each.namespace for each in objects if each.namespace}):
            if self._cluster.get(NAMESPACES, None, name) is None:
                document = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
                self._cluster.create(NAMESPACES, None, document)
                self._say(f"namespace {name} created")


def _revision(file: BackupFile) -> str:
    """The schema of the backup's database, from its first line."""
    line = next(iter(file.pieces(DATABASE)), b"").partition(b"\n")[0]
    try:
        return str(json.loads(line)["revision"])
    except (ValueError, KeyError, TypeError) as error:
        raise BusbarError(f"{file.path} holds no backup of Busbar's database") from error
