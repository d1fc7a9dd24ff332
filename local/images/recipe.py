"""The inputs of every image, as digests and file lists: no command is run here."""

from __future__ import annotations

import hashlib
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

from busbar.local import build, paths

REVISION = "1"  # increase it when the build procedure changes
SUITE = "bookworm"  # its Python is 3.11
DEBIAN_PACKAGES = ("python3-minimal", "libpython3-stdlib", "ca-certificates", "tini")
USER = 65532
COMMANDS = {
    "busbar": "busbar.cli.main:main",
    "busbar-operator": "busbar.operator.main:main",
    "busbar-agent": "busbar.operator.agent.main:main",
    "busbar-api": "busbar.api.main:main",
    "busbar-gateway": "busbar.gateway.main:main",
}


@dataclass(frozen=True)
class Image:
    """One of our two images: which of our folders it contains."""

    name: str
    extra: str  # of pyproject.toml, and the stem of its lock file
    folders: tuple[str, ...]
    options: tuple[str, ...] = ()
    """Further extras, for features that an installation without the image may leave out."""
    debian: tuple[str, ...] = ()
    """Debian packages beside `DEBIAN_PACKAGES`."""
    check: str = ""
    """Python that must run where its packages are installed."""

    @property
    def lock(self) -> Path:
        """Its hashed lock file."""
        return paths.package() / "images" / f"requirements-{self.extra}.lock"


IMAGES = (
    Image("busbar-platform", "platform", ("kube", "scheduler", "operator", "api", "gateway", "cli")),
    Image(
        "busbar-workloads",
        "workloads",
        ("kube", "scheduler", "workloads", "cli"),
        options=("grammar",),
        debian=("gcc", "libc6-dev", "libpython3-dev"),  # Triton compiles what starts its kernels
        check="from triton.runtime.build import compile_so_from_src as c; c('#include <Python.h>', 'check')",
    ),
)


def _key(*parts: str | bytes) -> str:
    digest = hashlib.sha256(REVISION.encode())
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:12]


def base_tag(more: tuple[str, ...] = ()) -> str:
    """Tag of the base image, and of one with `more` Debian packages."""
    return _key(SUITE, *DEBIAN_PACKAGES, *more)


def pause_tag() -> str:
    """Tag of the pause image."""
    return build.version_key("pause")


def dependencies_tag(image: Image) -> str:
    """Tag of an image's layer with its Python packages."""
    return _key(base_tag(image.debian), image.check, image.lock.read_bytes())


def source_files(image: Image) -> list[tuple[str, Path]]:
    """(path below ``busbar/``, file) of all our files in the image, sorted."""
    found = []
    for folder in image.folders:
        root = package_folder(folder)
        for file in root.rglob("*"):
            relative = file.relative_to(root)
            if file.is_file() and "__pycache__" not in relative.parts and file.suffix != ".pyc":
                found.append((f"{folder}/{relative}", file))
    return sorted(found)


def package_folder(name: str) -> Path:
    """The folder of ``busbar.<name>``; in a checkout a link leads to it."""
    import busbar

    for place in busbar.__path__:
        candidate = Path(place) / name
        if candidate.is_dir():
            return candidate.resolve()
    raise FileNotFoundError(f"the package busbar.{name} is not installed")


def image_tag(image: Image) -> str:
    """Tag of the whole image: its dependencies and our source."""
    parts: list[str | bytes] = [dependencies_tag(image), repr(sorted(COMMANDS.items()))]
    for name, file in source_files(image):
        parts += [name, file.read_bytes()]
    return _key(*parts)


def release_tag() -> str:
    """One tag for both images, so that the chart needs one."""
    return _key(*(image_tag(image) for image in IMAGES))


def distribution_metadata() -> dict[str, str]:
    """A minimal ``busbar-…dist-info``, so that the version and entry points are known in the image."""
    try:
        version = importlib.metadata.version("busbar")
        points = importlib.metadata.distribution("busbar").entry_points
    except importlib.metadata.PackageNotFoundError:
        version, points = "0", importlib.metadata.EntryPoints()
    groups: dict[str, list[str]] = {}
    for point in points:
        groups.setdefault(point.group, []).append(f"{point.name} = {point.value}")
    text = "".join(
        f"[{group}]\n" + "\n".join(sorted(lines)) + "\n\n" for group, lines in sorted(groups.items())
    )
    return {
        f"busbar-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: busbar\nVersion: {version}\n",
        f"busbar-{version}.dist-info/entry_points.txt": text,
    }
