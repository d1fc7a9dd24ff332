"""The table of rooms in scheduler/README.md lists exactly the files of the folder."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "scheduler"


def _rows() -> dict[str, list[str]]:
    """Room (or module at the top), and the files that its row names; in the order of the table."""
    text = (HERE / "README.md").read_text().partition("| room |")[2].partition("\n\n")[0]
    rows = (line.split("|")[1:4] for line in text.splitlines()[2:])
    return {name.strip().strip("`/"): re.findall(r"`([a-z_]+\.py)`", files) for name, _, files in rows}


def test_every_room_is_in_the_table_and_every_file_named_is_in_its_room() -> None:
    folders = {path.parent.name for path in HERE.glob("*/__init__.py")}
    modules = {path.name for path in HERE.glob("*.py")} - {"__init__.py", "errors.py"}
    assert set(_rows()) == folders | modules
    missing = [
        f"{room}/{file}"
        for room, files in _rows().items()
        for file in files
        if not (HERE / room / file).is_file()
    ]
    assert missing == []


def test_the_table_has_the_order_of_the_layers() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (one["layers"] for one in contracts if one.get("containers") == ["busbar.scheduler"])
    level = {name: number for number, row in enumerate(layers) for name in row.split(" | ")}
    order = [level[room.removesuffix(".py")] for room in _rows()]
    assert order == sorted(order)
