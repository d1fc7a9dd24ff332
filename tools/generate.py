"""Writes all generated files of the repository.

    python -m tools.generate            write all files
    python -m tools.generate --check    change nothing; exit 1 and name each file that would change
    python -m tools.generate crds       only the named generators

A generator is a function without arguments that returns `{path from the root: text}`. It owns the files it names, and
every file that matches its `owns` patterns: a file that it no longer names is deleted. Generators are named by module
and function and imported one by one, so that an error in one part stops only that part's generators.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Generator:
    """A generator's module and the files that it owns."""

    module: str
    function: str = "generate"
    owns: tuple[str, ...] = ()
    """Glob patterns from the root, to find files that it no longer generates."""

    def run(self) -> dict[str, str]:
        """The files that it generates. Raises any exception of its module."""
        function: Callable[[], dict[str, str]] = getattr(importlib.import_module(self.module), self.function)
        return function()


GENERATORS: dict[str, Generator] = {
    "crds": Generator("tools.generate_crds", owns=("charts/busbar-crds/templates/*.busbar.dev.yaml",)),
    "values": Generator("tools.generate_values"),
    "openapi": Generator("busbar.api.openapi", "generated"),
    "cli": Generator("busbar.cli.reference"),
}


@dataclass(frozen=True)
class Change:
    """One file that differs from its generator's output; `text` None means that it should not exist."""

    path: str
    text: str | None

    def describe(self) -> str:
        """The difference, shortened."""
        if self.text is None:
            return f"{self.path}: no generator makes this file any more"
        file = ROOT / self.path
        old = file.read_text(encoding="utf-8") if file.exists() else ""
        lines = difflib.unified_diff(
            old.splitlines(), self.text.splitlines(), "committed", "generated", n=1, lineterm=""
        )
        return "\n  ".join([f"{self.path}: is not what its generator makes", *list(lines)[:20]])

    def apply(self) -> None:
        """Write or delete the file."""
        file = ROOT / self.path
        if self.text is None:
            file.unlink()
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self.text, encoding="utf-8")


def changes(names: Iterable[str]) -> list[Change]:
    """The changes that bring these generators' files up to date."""
    found: list[Change] = []
    for name in names:
        generator = GENERATORS[name]
        wanted = generator.run()
        for path, text in wanted.items():
            file = ROOT / path
            if not file.exists() or file.read_text(encoding="utf-8") != text:
                found.append(Change(path, text))
        present = {str(file.relative_to(ROOT)) for pattern in generator.owns for file in ROOT.glob(pattern)}
        found.extend(Change(path, None) for path in sorted(present - wanted.keys()))
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.generate", description="Write the generated files."
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"generators: {', '.join(GENERATORS)}; default all"
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 where a file would change"
    )
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in GENERATORS]
    if unknown:
        parser.error(f"no generator is called {', '.join(unknown)}; there are {', '.join(GENERATORS)}")
    found = changes(options.names or GENERATORS)
    for change in found:
        if options.check:
            print(change.describe())
        else:
            change.apply()
            print(f"wrote {change.path}" if change.text is not None else f"deleted {change.path}")
    if options.check and found:
        print("Run `python -m tools.generate` and commit the result.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
