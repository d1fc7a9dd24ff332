"""The kinds accept every manifest in the documentation and the examples."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from busbar.kube.types import API_VERSION, KINDS

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```ya?ml\n(.*?)^```", re.MULTILINE | re.DOTALL)


def shown() -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, manifest) of every object of ours in pages and examples."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")]
    for file in (*pages, *ROOT.glob("examples/**/*.yaml")):
        text = file.read_text(encoding="utf-8")
        for block in FENCE.findall(text) if file.suffix == ".md" else [text]:
            for document in yaml.safe_load_all(block):
                if isinstance(document, dict) and document.get("apiVersion") == API_VERSION:
                    name = document.get("metadata", {}).get("name", "")
                    yield f"{file.relative_to(ROOT)}: {document['kind']} {name}", document


MANIFESTS = dict(shown())


@pytest.mark.parametrize("where", MANIFESTS)
def test_shown_manifest_is_accepted(where: str) -> None:
    document = MANIFESTS[where]
    KINDS[document["kind"]].model_validate(document)


def test_every_kind_is_shown_somewhere() -> None:
    assert {document["kind"] for document in MANIFESTS.values()} == set(KINDS)
