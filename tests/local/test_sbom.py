"""The bill of materials of an image: what is installed, what is ours, and the same bytes for the same content."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from busbar.local.errors import BuildError
from busbar.local.images import buildah as buildah_module
from busbar.local.images import builder, recipe, sbom
from busbar.local.images.sbom import Package

PLATFORM = recipe.IMAGES[0]
ANSWER = json.dumps(
    {
        "debian": [
            ["tini", "0.19.0-1+b3", "amd64", "installed"],
            ["libssl3", "3.0.17-1~deb12u2", "amd64", "installed"],
            ["gone", "1", "amd64", "config-files"],
        ],
        "python": [
            ["aiohttp", "3.14.5", "Apache-2.0"],
            ["ruamel.yaml", "0.18", ""],
            ["aiohttp", "3.14.5", "Apache-2.0"],
        ],
    }
)


def document(tag: str = "t1", source: dict[str, bytes] | None = None) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(
        sbom.bill(
            "busbar-platform",
            tag,
            sbom.read(ANSWER),
            source or {"/opt/busbar/busbar/kube/client.py": b"code"},
        )
    )
    return made


def test_it_lists_what_is_installed_each_once_by_its_package_url() -> None:
    made = document()
    assert (made["bomFormat"], made["specVersion"]) == ("CycloneDX", "1.6")
    assert [c["purl"] for c in made["components"][1:]] == [
        "pkg:pypi/aiohttp@3.14.5",
        "pkg:deb/debian/libssl3@3.0.17-1~deb12u2?arch=amd64&distro=bookworm",
        "pkg:pypi/ruamel.yaml@0.18",
        "pkg:deb/debian/tini@0.19.0-1%2Bb3?arch=amd64&distro=bookworm",
    ]
    assert made["components"][1]["licenses"] == [{"expression": "Apache-2.0"}]
    references = [c["bom-ref"] for c in made["components"]]
    assert len(references) == len(set(references))


def test_our_own_files_are_in_it_with_their_digests() -> None:
    [file] = document()["components"][0]["components"]
    assert file["name"] == "/opt/busbar/busbar/kube/client.py"
    assert file["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(b"code").hexdigest()}]


def test_the_same_content_gives_the_same_bytes_and_another_tag_another_number() -> None:
    assert document() == document()
    assert document("t2")["serialNumber"] != document()["serialNumber"]


@pytest.mark.parametrize(
    "answer",
    ["", "no", "{}", '{"debian": [], "python": []}', '{"debian": [["a", "1"]], "python": [["b", "1", ""]]}'],
)
def test_an_image_that_does_not_say_what_it_has_stops_the_build(answer: str) -> None:
    with pytest.raises(BuildError):
        sbom.read(answer)


def test_a_python_with_dpkg_answers_the_question() -> None:
    told = subprocess.run([sys.executable, "-c", sbom.INSPECT], capture_output=True, text=True, check=True)
    found = sbom.read(told.stdout)
    assert {"aiohttp", "pytest"} <= {package.name for package in found if not package.architecture}
    assert any(package.architecture for package in found)


def test_a_build_puts_it_into_the_image_and_keeps_a_copy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str, ...]] = []

    def answers(*arguments: str) -> str:
        asked.append(arguments)
        return f"a line of buildah's own\n{ANSWER}"

    monkeypatch.setattr(builder, "buildah", answers)
    monkeypatch.setattr(builder, "folder", lambda: tmp_path / "images")
    root = tmp_path / "busbar"
    root.mkdir()
    builder._bill(PLATFORM, "t1", "container-1", root)
    inside, kept = root / "sbom.cdx.json", builder.sbom_file("busbar-platform", "t1")
    assert f"/opt/busbar/{inside.name}" == sbom.PLACE
    assert inside.read_bytes() == kept.read_bytes()
    files = {c["name"] for c in json.loads(inside.read_text())["components"][0]["components"]}
    assert "/opt/busbar/busbar/operator/main.py" in files
    assert [call[:5] for call in asked] == [("run", "--isolation", "chroot", "container-1", "--")]


def test_a_push_to_another_registry_says_the_digest_that_the_chart_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def push(*arguments: str, running: object = None) -> str:
        assert arguments[0] == "push"
        Path(arguments[arguments.index("--digestfile") + 1]).write_text(f"sha256:{len(arguments[-1]):064x}\n")
        return ""

    monkeypatch.setattr(buildah_module, "buildah", push)
    monkeypatch.setattr(buildah_module, "folder", lambda: tmp_path)
    monkeypatch.setattr(builder, "exists", lambda reference: True)
    digests = builder.push_elsewhere("registry.example/team", "t1")
    assert set(digests) == {"platform", "workloads"}
    assert all(digest.startswith("sha256:") and len(digest) == 71 for digest in digests.values())
    assert len(set(digests.values())) == 2


def test_packages_are_sorted() -> None:
    assert sbom.read(ANSWER) == tuple(sorted(sbom.read(ANSWER)))
    assert Package("A", "1").purl == "pkg:pypi/a@1"
