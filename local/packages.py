"""Debian packages that the cluster needs; `busbar up` installs them.

None of them starts a service.  ``docker-registry`` would, so it is only unpacked into the cache.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from busbar.local.errors import BuildError
from busbar.local.parts import registry_program
from busbar.local.progress import step

# package → a file that it installs
NEEDED = {
    "runc": "/usr/sbin/runc",
    "containernetworking-plugins": "/usr/lib/cni/ptp",
    "buildah": "/usr/bin/buildah",
    "nftables": "/usr/sbin/nft",
    "mmdebstrap": "/usr/bin/mmdebstrap",
    "iproute2": "/usr/sbin/ip",
    "mount": "/usr/bin/mount",
    "ca-certificates": "/etc/ssl/certs/ca-certificates.crt",
}


def missing() -> list[str]:
    """Packages that are not installed."""
    absent = [name for name, file in NEEDED.items() if not Path(file).exists()]
    if "iproute2" in absent and Path("/sbin/ip").exists():
        absent.remove("iproute2")
    return absent


def ensure(extra: tuple[str, ...] = ()) -> None:
    """Install the missing packages, and the ``extra`` programs (packages named like their program).

    Raises:
        BuildError: apt-get failed or does not exist.
    """
    absent = [*missing(), *(name for name in extra if shutil.which(name) is None)]
    if not absent and registry_program().exists():
        return
    if shutil.which("apt-get") is None:
        raise BuildError(f"apt-get is missing; install by hand: {' '.join([*absent, 'docker-registry'])}")
    with step(f"Debian packages: {', '.join([*absent, 'docker-registry'])}"):
        _apt("update", "-qq")
        if absent:
            _apt("install", "-y", "-qq", "--no-install-recommends", *absent)
        if not registry_program().exists():
            _unpack_registry()


def _apt(*arguments: str, folder: Path | None = None) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(
        ["apt-get", *arguments], cwd=folder, env=environment, text=True, capture_output=True, check=False
    )
    if done.returncode:
        raise BuildError(f"apt-get {' '.join(arguments)} failed:\n{(done.stdout + done.stderr)[-2000:]}")


def _unpack_registry() -> None:
    target = registry_program().parents[2]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        folder = Path(name)
        _apt("download", "-qq", "-o", "APT::Sandbox::User=root", "docker-registry", folder=folder)
        archive = next(folder.glob("docker-registry_*.deb"))
        subprocess.run(["dpkg-deb", "-x", str(archive), str(folder / "root")], check=True)
        shutil.rmtree(target, ignore_errors=True)
        (folder / "root").rename(target)
