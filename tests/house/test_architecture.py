"""docs/architecture.md is correct: named files exist, the glossary is sorted, the example prints the shown output."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.scheduler import build

from busbar.scheduler import WaitCode, exports

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
TEXT = PAGE.read_text()
PROSE = re.sub(r"^```.*?^```$", "", TEXT, flags=re.DOTALL | re.MULTILINE)
NAMED = re.findall(r"`([^`\n]+)`", PROSE)
PATHS = sorted(
    {name for name in NAMED if re.fullmatch(r"[\w.-]+(?:/[\w.-]+)*(?:/|\.(?:py|md|toml|txt))", name)}
)
FUNCTIONS = sorted({name for name in NAMED if re.fullmatch(r"\w+\(\)", name)})
LIVES = (
    "The life of a job",
    "The life of a request",
    "The life of a scheduling round",
    "The life of a measured speed",
)
WALKS = (
    "Walk 1: why does this job wait although two nodes are free?",
    "Walk 2: add a rule that never stops a job in its last 5 %",
)


def _section(title: str) -> str:
    return TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def _table(title: str) -> list[list[str]]:
    """The cells of the section's first table, without its head."""
    lines = re.findall(r"^\|(.+)\|$", _section(title), flags=re.MULTILINE)
    return [[cell.strip() for cell in line.split(" | ")] for line in lines[2:]]


def test_every_file_and_folder_named_exists() -> None:
    missing = [
        name for name in PATHS if not (ROOT / name).exists() or (ROOT / name).is_dir() != name.endswith("/")
    ]
    assert missing == []
    links = re.findall(r"\]\(([^)#]+)\)", PROSE)
    assert [link for link in links if not (PAGE.parent / link).is_file()] == []


def test_every_function_named_is_defined_in_a_file_of_the_page() -> None:
    files = [ROOT / name for name in PATHS if name.endswith(".py")]
    sources = "\n".join(file.read_text() for file in files if file.is_file())
    known = set(re.findall(r"\bdef (\w+)\(", sources))
    new = set(re.findall(r"^def (\w+)\(", TEXT, flags=re.MULTILINE))
    assert [name for name in FUNCTIONS if name.removesuffix("()") not in known | new] == []


def test_the_glossary_is_sorted_and_says_each_of_its_words_once() -> None:
    rows = _table("Twenty words")
    words = [row[0] for row in rows]
    assert len(words) == 20
    assert words == sorted(set(words))
    assert all(re.fullmatch(r"`[^`]+\.py`", row[2]) for row in rows)


@pytest.mark.parametrize("title", LIVES)
def test_each_life_has_a_diagram_and_numbered_steps_that_name_files(title: str) -> None:
    assert "\n```\n" in _section(title)
    steps = _table(title)
    assert [row[0] for row in steps] == [str(number) for number in range(1, len(steps) + 1)]
    assert len(steps) > 5
    for _, files, what in steps:
        assert all(re.fullmatch(r"`[^`]+\.py`", name) for name in files.split(", ")), files
        assert what.endswith(".")


def test_the_waiting_reasons_of_the_first_walk_are_all_codes_that_there_are() -> None:
    named = {code for row in _table(WALKS[0]) for code in re.findall(r"`(\w+)`", row[0])}
    assert named == {code.value for code in WaitCode}


def test_the_example_of_the_first_walk_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    code = _section(WALKS[0]).partition("```python\n")[2].partition("```")[0]
    exec(code, {"replace": replace, **vars(exports), **vars(build)})
    assert capsys.readouterr().out.strip() == code.splitlines()[-1].removeprefix("# ")


@pytest.mark.parametrize("title", WALKS)
def test_each_walk_names_the_tests_beside_the_code(title: str) -> None:
    assert re.search(r"`tests/scheduler/[\w/]+", _section(title))


def test_the_list_of_documentation_has_the_page() -> None:
    assert "(architecture.md)" in (ROOT / "docs" / "README.md").read_text()
