"""The folders of caches and data.

Cache (may be deleted at any time; costs a rebuild): ``${XDG_CACHE_HOME:-~/.cache}/busbar``

- ``bin/<module>-<version key>/`` compiled programs
- ``go/`` a Go toolchain, only where the machine has none
- ``images/`` the image registry's storage and buildah's own

Data (people's): ``${XDG_DATA_HOME:-~/.local/share}/busbar/<instance>/``

- ``kubeconfig``, ``pki/``, ``etcd/``, ``volumes/``, ``containerd/``, ``kubelet/``, ``logs/``, ``config/``
- ``instance.json`` the addresses and ports, chosen once and kept over restarts
- ``running.json`` the supervisor that runs it now, and since when
"""

from __future__ import annotations

import os
from pathlib import Path


def cache() -> Path:
    """The cache folder; not created here."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "busbar"


def data() -> Path:
    """The folder that holds one folder per instance."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "busbar"


def package() -> Path:
    """This package's own folder, where its go.mod files and image definitions lie."""
    return Path(__file__).resolve().parent
