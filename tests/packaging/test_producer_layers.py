"""Within the producer imports point one way too: later lines may import earlier ones.

Modules that are not named here put the others together, and may import all.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).resolve().parents[2] / "producer" / "lazyshard_producer"

ORDER: Final = (
    {"errors", "position", "stop", "wording"},
    {"configuration"},
    {"sources"},
    {"following"},
    {"opening"},
    {"rows", "holding", "display"},
    {"shipping"},
    {"loop", "out_directory", "ray"},
)


def rank(name: str) -> int:
    return next((at for at, names in enumerate(ORDER) if name in names), len(ORDER))


def imports(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module == "lazyshard_producer":
                yield from (alias.name for alias in node.names)
            elif module.startswith("lazyshard_producer."):
                yield module.split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (
                alias.name.split(".")[1] for alias in node.names if alias.name.startswith("lazyshard_producer.")
            )


def test_imports_within_the_producer_point_one_way() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parts
        own = parts[0].removesuffix(".py")
        for name in imports(path.read_text(encoding="utf-8")):
            beside = rank(name) == rank(own) and own in {"rows", "holding", "display"}
            if name != own and (rank(name) > rank(own) or beside):
                found.append(f"{'/'.join(parts)} may not import {name}")
    assert found == []


def test_every_name_is_there() -> None:
    there = {path.stem for path in PACKAGE.iterdir()}
    assert [name for names in ORDER for name in sorted(names) if name not in there] == []
