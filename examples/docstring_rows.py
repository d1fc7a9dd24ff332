"""Writes the rows that `fine-tune.yaml` trains on: functions of Python's standard library, and what they do.

A row is a function's signature and the first line of its docstring, as JSONL with `prompt` and `completion`.

    python docstring_rows.py claims/stdlib/rows/docstrings.jsonl
"""

import ast
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path


def rows(source: str) -> Iterator[dict[str, str]]:
    """A row per function of `source` that has a docstring."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and (said := ast.get_docstring(node)):
            signature = "\n".join(line.strip() for line in lines[node.lineno - 1 : node.body[0].lineno - 1])
            if not signature:
                continue  # all on one line
            yield {"prompt": f'{signature}\n    """', "completion": f'{said.splitlines()[0]}"""\n'}


def main() -> int:
    out = Path(sys.argv[1])
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(folder.rglob("*.py")) if not {"site-packages", "test"} & set(path.parts)]
    count = 0
    with out.open("w", encoding="utf-8") as file:
        for path in files:
            try:
                found = list(rows(path.read_text(encoding="utf-8")))
            except (SyntaxError, UnicodeDecodeError, RecursionError):
                continue  # a few files show what other encodings and mistakes look like
            file.writelines(json.dumps(row) + "\n" for row in found)
            count += len(found)
    print(f"{count} rows in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
