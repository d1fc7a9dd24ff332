"""Refresh the images' hashed lock files from pyproject.toml: ``python -m busbar.local.images lock``.

They are constrained by ``requirements.lock``, so that the images have the tested versions, and contain no index
address.
"""

from __future__ import annotations

import subprocess

from busbar.local import paths
from busbar.local.errors import BuildError
from busbar.local.images.recipe import IMAGES, Image

FORBIDDEN = {"platform": ("torch", "nvidia-")}  # the control side must stay small
ALLOWED = {"nvidia-ml-py"}  # 50 KB of Python; the driver's library comes from the node


def refresh(uv: str) -> None:
    """Resolve both lock files again.

    Raises:
        BuildError: not a checkout, uv failed, or an image would contain a forbidden package.
    """
    root = paths.package().parent
    if not (root / "pyproject.toml").exists():
        raise BuildError("lock files are refreshed in a checkout; an installed Busbar has no pyproject.toml")
    for image in IMAGES:
        command = [uv, "pip", "compile", "-q", "--generate-hashes", "--no-emit-index-url", "--no-header"]
        command += ["--no-annotate", "--python-version", "3.11"]
        for extra in (image.extra, *image.options):
            command += ["--extra", extra]
        command += [
            "-c",
            str(root / "requirements.lock"),
            str(root / "pyproject.toml"),
            "-o",
            str(image.lock),
        ]
        done = subprocess.run(command, text=True, capture_output=True, check=False, cwd=root)
        if done.returncode:
            raise BuildError(f"uv could not resolve {image.lock.name}: {done.stderr[-2000:]}")
        check(image, image.lock.read_text())


def check(image: Image, text: str) -> None:
    """Refuse a lock that contains a package forbidden in the image.

    Raises:
        BuildError: it does.
    """
    for line in text.splitlines():
        name = line.partition("==")[0]
        if name not in ALLOWED and any(
            name == bad or (bad.endswith("-") and name.startswith(bad))
            for bad in FORBIDDEN.get(image.extra, ())
        ):
            raise BuildError(f"{image.lock.name} would bring {line.split()[0]} into {image.name}")
