"""Buildah without a daemon; it writes nothing on the machine outside the cache.

Each call runs in a mount namespace of its own in which the cache's folder is mounted at ``/var/lib/containers`` and
the run folder is a new tmpfs: buildah's own mounts are removed at the end of the call.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from busbar.local import paths
from busbar.local.errors import BuildError
from busbar.local.progress import Step

_PREPARE = """
set -e
mount --make-rprivate /
if [ ! -d /var/lib/containers ]; then
    mkdir -p "$BUSBAR_IMAGES/var/upper" "$BUSBAR_IMAGES/var/work"
    mount -t tmpfs tmpfs "$BUSBAR_IMAGES/var"
    mkdir "$BUSBAR_IMAGES/var/upper" "$BUSBAR_IMAGES/var/work"
    mount -t overlay overlay -o "lowerdir=/var,upperdir=$BUSBAR_IMAGES/var/upper,workdir=$BUSBAR_IMAGES/var/work" /var
    mkdir /var/lib/containers
fi
mount --bind "$BUSBAR_IMAGES/containers" /var/lib/containers
# A login of the user's (`buildah login`) lies in /run: carry it over into the private /run.
login="${REGISTRY_AUTH_FILE:-${XDG_RUNTIME_DIR:-/run}/containers/auth.json}"
[ -f "$login" ] || login=/run/containers/0/auth.json
if [ -f "$login" ]; then exec 9<"$login"; else exec 9</dev/null; fi
mount -t tmpfs tmpfs /run
cat <&9 >/run/auth.json
exec 9<&-
if [ -s /run/auth.json ]; then export REGISTRY_AUTH_FILE=/run/auth.json; fi
if [ -n "$BUSBAR_REGISTRY" ]; then
    ip link set lo up
    # It reads every REGISTRY_* variable as a setting of its own.
    env -u REGISTRY_AUTH_FILE $BUSBAR_REGISTRY &
    until (exec 3<>/dev/tcp/127.0.0.1/5000) 2>/dev/null; do
        kill -0 $! || exit 1  # it ended before it served; its own lines say why
        sleep 0.2
    done
    status=0
    buildah "$@" || status=$?
    kill $!
    exit $status
fi
exec buildah "$@"
"""
PUSH_ADDRESS = "127.0.0.1:5000"


def folder() -> Path:
    """The folder of the images."""
    return paths.cache() / "images"


def storage() -> Path:
    """The registry's storage, which every instance's registry serves."""
    return folder() / "registry"


def pushed(name: str, tag: str) -> bool:
    """Whether the registry's storage holds the image."""
    return (
        storage() / "docker/registry/v2/repositories" / name / "_manifests/tags" / tag / "current/link"
    ).exists()


def buildah(*arguments: str, running: Step | None = None, extra: Mapping[str, str] | None = None) -> str:
    """Run one buildah command; returns its standard output.

    With ``BUSBAR_REGISTRY`` in ``extra``, in a network namespace in which that command serves.

    Raises:
        BuildError: it failed; contains the end of its output.
    """
    (folder() / "containers").mkdir(parents=True, exist_ok=True)
    (folder() / "var").mkdir(exist_ok=True)
    environment = {**os.environ, "BUSBAR_IMAGES": str(folder()), "BUILDAH_ISOLATION": "chroot"}
    environment |= {"STORAGE_DRIVER": "overlay", "BUSBAR_REGISTRY": "", **(extra or {})}
    namespaces = ["--mount", "--net"] if extra else ["--mount"]
    with subprocess.Popen(
        ["unshare", *namespaces, "bash", "-c", _PREPARE, "bash", *arguments],
        env=environment,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if running else subprocess.PIPE,
    ) as process:
        if running is None:
            output, error = process.communicate()
        else:
            lines = []
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                if line.strip():
                    running.update(line.strip()[:100])
            output, error = "".join(lines), "".join(lines[-40:])
    if process.returncode:
        raise BuildError(
            f"buildah {' '.join(arguments)[:200]} failed with {process.returncode}: {error[-3000:]}"
        )
    return output.strip()


def exists(reference: str) -> bool:
    """Whether buildah's own storage has the image."""
    try:
        buildah("inspect", "--type", "image", "--format", "{{.FromImageID}}", reference)
    except BuildError:
        return False
    return True


@contextmanager
def working_container(source: str) -> Iterator[str]:
    """A container to change and commit; removed at the end."""
    container = buildah("from", "--pull-never", source).splitlines()[-1]
    try:
        yield container
    finally:
        buildah("rm", container)


def run(
    container: str,
    script: str,
    *,
    mounts: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    running: Step | None = None,
) -> None:
    """Run a shell script in the container; ``mounts`` is host path → container path with options."""
    options: list[str] = []
    for source, target in (mounts or {}).items():
        options += ["-v", f"{source}:{target}"]
    for name, value in (environment or {}).items():
        options += ["--env", f"{name}={value}"]
    command = ["run", "--isolation", "chroot", "--user", "root", *options, container, "--"]
    buildah(*command, "sh", "-euc", script, running=running)


def configure(container: str, settings: Sequence[str]) -> None:
    """Set the container's image configuration (flags of ``buildah config``)."""
    buildah("config", *settings, container)


def push(reference: str, name: str, tag: str, program: Path, running: Step) -> None:
    """Push into the shared storage through a registry (``program``) that runs only during the push.

    Both run in a network namespace of their own, so that the registry's address is the same every time:
    buildah caches by address which layers a registry has, so a push of a new source layer takes a second instead of
    compressing everything again.

    Raises:
        BuildError: the push failed.
    """
    storage().mkdir(parents=True, exist_ok=True)
    config = folder() / "push-registry.yml"
    config.write_text(
        "version: 0.1\nlog: {level: error, accesslog: {disabled: true}}\n"
        f"storage: {{filesystem: {{rootdirectory: {storage()}}}}}\nhttp: {{addr: {PUSH_ADDRESS}}}\n"
    )
    # zstd: a third of gzip's time for a torch-sized layer, and containerd reads it
    options = ["--tls-verify=false", "--compression-format", "zstd", "--compression-level", "1"]
    serve = {"BUSBAR_REGISTRY": f"{program} serve {config}"}
    buildah(
        "push", *options, reference, f"docker://{PUSH_ADDRESS}/{name}:{tag}", running=running, extra=serve
    )


def push_to(reference: str, registry: str, name: str, tag: str, running: Step) -> str:
    """Push to the user's registry, with the user's own login; plain HTTP only on loopback.

    Returns:
        The digest of the manifest that the registry has now.

    Raises:
        BuildError: the push failed.
    """
    host = registry.partition("/")[0].partition(":")[0]
    options = ["--tls-verify=false"] if host == "localhost" or host.startswith("127.") else []
    with tempfile.TemporaryDirectory(dir=folder()) as place:
        told = Path(place) / "digest"
        options += ["--digestfile", str(told)]
        buildah("push", *options, reference, f"docker://{registry}/{name}:{tag}", running=running)
        return told.read_text().strip()


def find_uv() -> str:
    """The uv program of this environment or of the machine.

    Raises:
        BuildError: there is none.
    """
    found = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if found is None:
        raise BuildError("uv is missing: pip install 'busbar[local]'")
    return found
