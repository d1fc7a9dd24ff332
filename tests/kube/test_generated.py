"""Generated files are up to date."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools import generate
from tools.generate_crds import UnsupportedSchema, structural


@pytest.mark.parametrize("name", ["crds", "values"])
def test_committed_files_are_up_to_date(name: str) -> None:
    assert [change.describe() for change in generate.changes([name])] == []


def test_check_names_what_would_change_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    assert generate.main(["crds", "--check"]) == 1
    assert "charts/busbar-crds/templates/tenants.busbar.dev.yaml: is not what" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_stale_files_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    stale = tmp_path / "charts/busbar-crds/templates/gone.busbar.dev.yaml"
    stale.parent.mkdir(parents=True)
    stale.write_text("x")
    assert generate.main(["crds"]) == 0
    assert not stale.exists()
    assert generate.main(["crds", "--check"]) == 0


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "a union of 2 types"),
        ({"type": "object", "dependentRequired": {}}, "cannot translate dependentRequired"),
    ],
)
def test_a_schema_that_cannot_be_said_is_refused(schema: dict[str, object], says: str) -> None:
    with pytest.raises(UnsupportedSchema, match=says):
        structural(schema, {})
