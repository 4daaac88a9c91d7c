"""Rows through ms-swift's ordinary path and through ours; in a process of its own, since importing ms-swift warns.

    python rows_program.py FOUND.json CASES.json

A case is {"rows": [...], "options": {...}}: the lines of a file, and options of `swift.dataset.load_dataset`. Found is
{"ordinary": [...], "ours": [...]}; instead of a row there may be the name of an error, and instead of the ordinary rows
too, where none of them could be loaded.
"""

from __future__ import annotations

import copy
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from lazyshard_swift.rows import RowEncoder


class Template:
    """Encodes to what it was given."""

    def encode(self, row: dict[str, Any], return_length: bool = False) -> dict[str, Any]:
        text = str(row["messages"])
        if "too long" in text:
            raise importlib.import_module("swift.template").MaxLengthError("Current length of row(9) is larger")
        if "impossible" in text:
            raise ValueError("no such image")
        return {**row, "return_length": return_length}


def ordinary(rows: list[dict[str, Any]], options: dict[str, Any], file: Path) -> Any:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    try:
        dataset, _ = importlib.import_module("swift.dataset").load_dataset(str(file), **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return list(dataset)


def ours(rows: list[dict[str, Any]], options: dict[str, Any]) -> list[Any]:
    encoder = RowEncoder(
        Template(),
        columns=options.get("columns"),
        auto_columns=not options.get("disable_auto_column_mapping", False),
        keep_unused=not options.get("remove_unused_columns", True),
    )
    found: list[Any] = []
    for row in copy.deepcopy(rows):
        try:
            found.append(encoder(row))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def main() -> int:
    target, source = map(Path, sys.argv[1:])
    found = {}
    for number, (name, case) in enumerate(json.loads(source.read_text(encoding="utf-8")).items()):
        rows, options = case["rows"], case["options"]
        found[name] = {
            "ordinary": ordinary(rows, options, source.with_name(f"rows_{number}.jsonl")),
            "ours": ours(rows, options),
        }
    target.write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
