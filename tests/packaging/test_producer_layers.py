"""Within the producer imports point one way too: later lines may import earlier ones, modules not named here all."""

from collections.abc import Iterator
from typing import Final

from tests.packaging.test_import_directions import PACKAGES, Module, imported, modules_of

PACKAGE: Final = "lazyshard_producer"

ORDER: Final = (
    {"errors", "position", "stop"},
    {"configuration"},
    {"sources"},
    {"following"},
    {"opening"},
    {"rows", "limits", "display"},
    {"shipping", "writers"},
    {"loop", "ray_pieces"},
    {"ray"},
)


def rank(name: str) -> int:
    return next((at for at, names in enumerate(ORDER) if name in names), len(ORDER))


def parts_imported(module: Module) -> Iterator[str]:
    for _, source, name in imported(module):
        package, _, part = source.partition(".")
        if package == PACKAGE:
            yield part.partition(".")[0] or name or ""


def test_imports_within_the_producer_point_one_way() -> None:
    found = []
    for module in modules_of(PACKAGE, PACKAGES[PACKAGE]):
        own = module.name.removeprefix(f"{PACKAGE}.").partition(".")[0]
        for name in parts_imported(module):
            beside = rank(name) == rank(own) and own in {"rows", "limits", "display"}
            if name != own and (rank(name) > rank(own) or beside):
                found.append(f"{module.name} may not import {name}")
    assert found == []
    there = {path.stem for path in PACKAGES[PACKAGE].iterdir()}
    assert [name for names in ORDER for name in sorted(names) if name not in there] == []
