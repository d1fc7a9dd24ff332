"""`busbar backup` and `busbar restore`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from busbar.cli.session import Session

if TYPE_CHECKING:
    from busbar.cli.backup_file import BackupFile, BackupWriter
    from busbar.cli.cluster import Cluster
    from busbar.cli.restored_objects import Stored

F = TypeVar("F", bound=Callable[..., Any])
SECRET = "busbar-workload-key"


def _options(command: F) -> F:
    for option in (
        click.option(
            "--passphrase-file",
            metavar="FILE",
            help="File with the passphrase of the workload key [default: the key is left out].",
        ),
        click.option(
            "--system-namespace",
            default="busbar-system",
            show_default=True,
            metavar="NAME",
            help="Where Busbar is installed.",
        ),
        click.option(
            "--context", metavar="NAME", help="Context of the kubeconfig [default: the current one]."
        ),
        click.option("--server", metavar="URL", help="A server other than that of `busbar login`."),
    ):
        command = option(command)
    return command


@click.command(
    epilog="""\b
Examples:
  busbar backup busbar-monday.zip
  busbar backup busbar-monday.zip --passphrase-file passphrase.txt
  busbar backup busbar.zip --force --context production
"""
)
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@_options
def backup(
    file: str,
    force: bool,
    server: str | None,
    context: str | None,
    system_namespace: str,
    passphrase_file: str | None,
) -> None:
    """Write pools, power domains, tenants, profiles, jobs, services and the database to FILE.

    For administrators: it needs a token of the role admin, and the kubeconfig of an administrator of the cluster. FILE
    holds every tenant's specifications and names (mode 0600). Model weights, checkpoints and Prometheus data are not
    in it.
    """
    from datetime import UTC, datetime
    from importlib.metadata import version
    from pathlib import Path

    from busbar.cli import backup_file, cluster, sealed_key

    passphrase = sealed_key.read_passphrase(passphrase_file) if passphrase_file is not None else None
    session = Session(server, None)
    try:
        with (
            cluster.connect(context, system_namespace) as kubernetes,
            backup_file.BackupWriter(Path(file), force=force) as out,
        ):
            # The database first: what the objects' statuses say later is newer, and counts when they are restored.
            pieces = backup_file.whole(session.client.database())
            say(f"database: {out.add(backup_file.DATABASE, pieces):,} bytes")
            say("objects: " + _add_objects(out, kubernetes))
            say("workload key: " + _add_key(out, kubernetes, passphrase))
            out.finish(version=version("busbar"), server=session.client.server, made_at=datetime.now(UTC))
    finally:
        session.close()
    click.echo(f"{file} written")


def _add_objects(out: BackupWriter, kubernetes: Cluster) -> str:
    import json

    from busbar.cli.backup_file import OBJECTS
    from busbar.cli.restored_objects import ORDER, kept

    lines, counts = [], []
    for resource in ORDER:
        found = kubernetes.listing(resource)
        counts.append(f"{len(found)} {resource.plural}")
        lines += [json.dumps(kept(resource, obj), ensure_ascii=False).encode() + b"\n" for obj in found]
    out.add(OBJECTS, lines)
    return ", ".join(counts)


def _add_key(out: BackupWriter, kubernetes: Cluster, passphrase: str | None) -> str:
    import json

    from busbar.cli.backup_file import KEY
    from busbar.cli.errors import NotFound
    from busbar.cli.sealed_key import seal
    from busbar.kube.resources import SECRETS

    if passphrase is None:
        return "left out (it is sealed into the file with --passphrase-file)"
    secret = kubernetes.get(SECRETS, kubernetes.system_namespace, SECRET)
    if secret is None:
        raise NotFound(
            f"there is no Secret {SECRET} in {kubernetes.system_namespace}; say where Busbar is with "
            "--system-namespace"
        )
    out.add(KEY, [json.dumps(seal(secret.get("data") or {}, passphrase)).encode()])
    return "sealed"


@click.command(
    epilog="""\b
Examples:
  busbar restore busbar-monday.zip
  busbar restore busbar-monday.zip --passphrase-file passphrase.txt
  busbar restore busbar-monday.zip --continue
"""
)
@click.argument("file", type=click.Path(dir_okay=False))
@click.option(
    "--continue",
    "continued",
    is_flag=True,
    help="Go on with a restore that was interrupted after the database was restored.",
)
@_options
def restore(
    file: str,
    continued: bool,
    server: str | None,
    context: str | None,
    system_namespace: str,
    passphrase_file: str | None,
) -> None:
    """Restore FILE into a new installation whose database is unused.

    Objects that exist are left as they are. Jobs that had ended do not run again; others are queued and continue from
    their last checkpoint, if their claims are there. Namespaces that are missing are created. Tokens are valid again,
    also those that were revoked after the backup.
    """
    from pathlib import Path

    from busbar.cli import backup_file, cluster, sealed_key
    from busbar.cli.restoring import Restoring

    found = backup_file.open_backup(Path(file))
    say(f"{file}: made at {found.made_at} by Busbar {found.version} of {found.server}")
    objects, key = _objects_of(found), found.key()
    data = None
    if passphrase_file is not None:
        if key is None:
            raise click.UsageError(f"{file} has no workload key; leave out --passphrase-file")
        data = sealed_key.unseal(key, sealed_key.read_passphrase(passphrase_file))
    session = Session(server, None)
    try:
        with cluster.connect(context, system_namespace) as kubernetes:
            steps = Restoring(kubernetes, session.client, say)
            steps.check(found, continued=continued)
            say("workload key: " + _put_key(kubernetes, data))
            steps.create(objects, continued=continued)
            if not continued:
                steps.load(found)
            steps.finish()
    finally:
        session.close()
    click.echo(f"{file} restored")


def _objects_of(found: BackupFile) -> list[Stored]:
    from busbar.cli.errors import BusbarError
    from busbar.cli.restored_objects import ORDER, stored

    try:
        objects = [stored(document) for document in found.objects()]
    except ValueError as error:
        raise BusbarError(f"{found.path} holds an object that cannot be restored: {error}") from error
    return sorted(objects, key=lambda each: ORDER.index(each.resource))


def _put_key(kubernetes: Cluster, data: dict[str, str] | None) -> str:
    """Write the key into the Secret that the chart made.

    The installation's own key becomes the former one: the operator makes pods under it until it has restarted.
    """
    from busbar.cli.errors import NotFound
    from busbar.kube.resources import SECRETS

    if data is None:
        return "the installation keeps its own"
    place = kubernetes.system_namespace
    secret = kubernetes.get(SECRETS, place, SECRET)
    own = ((secret or {}).get("data") or {}).get("key")
    if own == data["key"]:
        return "the same already"
    if kubernetes.patch(SECRETS, place, SECRET, {"data": {**data, "former": own}}) is None:
        raise NotFound(f"there is no Secret {SECRET} in {place}; install the chart first")
    return f"restored; kubectl -n {place} rollout restart deploy/busbar-operator makes it known"


def say(line: str) -> None:
    """Progress is for people, so it goes to standard error."""
    click.echo(line, err=True)
