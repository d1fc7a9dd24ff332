"""What is in an image: a bill of materials (SBOM) as CycloneDX 1.6, made while the image is built.

It lists what is installed, asked of the image itself and not of a lock file: Debian packages by dpkg, Python packages by
their metadata, and our own source with its files' digests. The same content gives the same bytes: there is no time of the
build, and the serial number is made from the image's tag. It lies in the image at ``PLACE`` and, for whoever keeps
records of what was released, in the images' folder on the machine that built it.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from busbar.local.errors import BuildError
from busbar.local.images.recipe import SUITE

PLACE = "/opt/busbar/sbom.cdx.json"
NAMESPACE = uuid.UUID("0f3f9c1e-6a51-5a5e-9d7c-6b1d1a0a7a11")
"""Of serial numbers."""
INSPECT = """\
import importlib.metadata, json, subprocess
fields = "${Package}\\t${Version}\\t${Architecture}\\t${db:Status-Status}\\n"
told = subprocess.run(["dpkg-query", "-W", "-f", fields], capture_output=True, text=True, check=True).stdout
debian = [line.split("\\t") for line in told.splitlines()]
python = [
    [d.metadata["Name"], d.version, d.metadata.get("License-Expression") or ""]
    for d in importlib.metadata.distributions()
]
print(json.dumps({"debian": debian, "python": python}))
"""
"""Run by the image's own Python; its answer is the argument of `read`."""


@dataclass(frozen=True, order=True)
class Package:
    """One installed package."""

    name: str
    version: str
    architecture: str = ""
    """Of a Debian package."""
    license: str = ""
    """An SPDX expression, where a Python package says one."""

    @property
    def purl(self) -> str:
        """Package URL (github.com/package-url/purl-spec)."""
        version = quote(self.version, safe="")
        if self.architecture:
            name = quote(self.name, safe="")
            return f"pkg:deb/debian/{name}@{version}?arch={self.architecture}&distro={SUITE}"
        return f"pkg:pypi/{self.name.lower().replace('_', '-')}@{version}"


def read(answer: str) -> tuple[Package, ...]:
    """The packages in an answer of `INSPECT`, sorted, each once.

    Raises:
        BuildError: it is no such answer, or names no Debian or no Python package.
    """
    try:
        told = json.loads(answer.splitlines()[-1])
        debian = {Package(*row[:3]) for row in told["debian"] if row[3] == "installed"}
        python = {Package(name, version, license=found) for name, version, found in told["python"] if name}
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise BuildError(f"the image did not say what is installed: {answer[-300:]!r}") from error
    if not debian or not python:
        raise BuildError(f"the image names {len(debian)} Debian and {len(python)} Python packages")
    return tuple(sorted(debian | python))


def bill(image: str, tag: str, packages: Sequence[Package], source: Mapping[str, bytes]) -> str:
    """The document.

    Args:
        image: its name without a registry.
        packages: what is installed in it.
        source: our own files in it, by path.
    """
    name = f"{image}:{tag}"
    files = [
        {
            "type": "file",
            "bom-ref": f"file:{path}",
            "name": path,
            "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(data).hexdigest()}],
        }
        for path, data in sorted(source.items())
    ]
    own = {"type": "application", "bom-ref": "busbar", "name": "busbar", "version": tag, "components": files}
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(NAMESPACE, name)}",
        "version": 1,
        "metadata": {"component": {"type": "container", "bom-ref": name, "name": image, "version": tag}},
        "components": [own, *(_component(package) for package in packages)],
    }
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def _component(package: Package) -> dict[str, Any]:
    made: dict[str, Any] = {
        "type": "library",
        "bom-ref": package.purl,
        "name": package.name,
        "version": package.version,
        "purl": package.purl,
    }
    if package.license:
        made["licenses"] = [{"expression": package.license}]
    return made
