"""The mounts that only an instance sees, made by the supervisor in its own mount namespace.

Our own /proc, /run and writable /var, the machine's folders that we work in, and masks over the kernel settings
that the kubelet would change.  They are removed with the namespace, so nothing has to be unmounted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from busbar.local import namespaces

RUN = "/run/busbar"


def private_mounts(binds: Mapping[str, str]) -> None:
    """Make all of them. ``binds``: folder on the machine → name under ``RUN``."""
    mount, bind = namespaces.mount, namespaces.MS_BIND | namespaces.MS_REC
    mount("none", "/", flags=namespaces.MS_REC | namespaces.MS_PRIVATE)
    mount("proc", "/proc", "proc")
    resolvers = os.path.realpath("/etc/resolv.conf")  # may be a link into /run
    machine_resolvers = Path(resolvers).read_text() if os.path.exists(resolvers) else ""
    mount("tmpfs", "/run", "tmpfs", options="mode=755,size=1g")
    for source, name in binds.items():
        target = f"{RUN}/{name}"
        os.makedirs(source, exist_ok=True)
        os.makedirs(target, exist_ok=True)
        mount(source, target, flags=bind)
    # The kubelet and the CNI plugins use fixed folders under /var; this overlay keeps their files inside the instance.
    for name in ("upper", "work"):
        os.makedirs(f"{RUN}/var/{name}")
    layers = f"lowerdir=/var,upperdir={RUN}/var/upper,workdir={RUN}/var/work"
    mount("overlay", "/var", "overlay", options=layers)
    if Path("/var/run").is_symlink() is False:
        os.makedirs("/var/run", exist_ok=True)
        mount("/run", "/var/run", flags=bind)
    _mask_settings()
    Path(RUN, "machine-resolv.conf").write_text(machine_resolvers)  # for the internet link
    os.makedirs(os.path.dirname(resolvers), exist_ok=True)
    Path(resolvers).touch()
    mount(f"{RUN}/config/machine-resolv.conf", resolvers, flags=namespaces.MS_BIND)
    # A peer group of our own, so that shared mounts propagate to pods and nowhere else.
    mount("none", "/", flags=namespaces.MS_REC | namespaces.MS_SHARED)


def _mask_settings() -> None:
    """Show the kubelet the machine-wide settings that it requires, without changing the machine."""
    wanted = {
        "vm/overcommit_memory": "1",
        "vm/panic_on_oom": "0",
        "kernel/panic": "10",
        "kernel/panic_on_oops": "1",
        "kernel/keys/root_maxkeys": "1000000",
        "kernel/keys/root_maxbytes": "25000000",
    }
    for name, value in wanted.items():
        mask = Path(RUN, "settings", name)
        mask.parent.mkdir(parents=True, exist_ok=True)
        mask.write_text(value + "\n")
        namespaces.mount(str(mask), f"/proc/sys/{name}", flags=namespaces.MS_BIND)
