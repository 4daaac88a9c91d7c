"""`docs/architecture.md` names what is there and tells the imports that are allowed; README lists every page once."""

import re
from pathlib import Path
from typing import Final

import pytest

from tests.packaging.test_import_directions import MAY_IMPORT, ROOT

PAGE: Final = ROOT / "docs" / "architecture.md"
TOPS: Final = ("examples", "integrations", "lazyshard", "producer", "scripts", "tests")
LEAST_NAMED: Final = 80
"""Of paths on the page: fewer mean that they are no longer found, rather than that all are there."""


def code_of(markdown: str) -> list[str]:
    """What stands between single backticks, outside of blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", markdown, flags=re.DOTALL | re.MULTILINE))


def named_paths(markdown: str) -> list[str]:
    """Paths of the repository, by their first folder."""
    return [code for code in code_of(markdown) if code in TOPS or code.startswith(tuple(f"{top}/" for top in TOPS))]


def imports_allowed(markdown: str) -> dict[str, set[str]]:
    """The rows of the table under the headings `layer` and `may import`."""
    _, _, table = markdown.partition("| layer | may import |\n|---|---|\n")
    rows = re.findall(r"\| `(\w+)` \| (.*) \|\n", table.partition("\n\n")[0] + "\n")
    return {layer: set(code_of(others)) for layer, others in rows}


def pages_listed(readme: str) -> list[str]:
    """The pages of `docs` and its guides to which the list at the end of README leads, as often as it does."""
    _, _, more = readme.partition("\n## More\n")
    return sorted(re.findall(r"\]\(docs/((?:guides/)?[\w.-]+\.md)[)#]", more))


def test_every_path_on_the_page_is_there() -> None:
    paths = named_paths(PAGE.read_text(encoding="utf-8"))
    assert len(paths) >= LEAST_NAMED
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_module_that_contributing_names_is_there() -> None:
    named = [code for code in code_of((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")) if code.endswith(".py")]
    assert len(named) >= 12
    folders = (ROOT, ROOT / "lazyshard", ROOT / "integrations" / "swift")
    assert [name for name in named if not any((folder / name).exists() for folder in folders)] == []


def test_every_package_and_room_is_on_the_page() -> None:
    paths = set(named_paths(PAGE.read_text(encoding="utf-8")))
    rooms = [f"lazyshard/{path.name}" for path in sorted((ROOT / "lazyshard").iterdir()) if path.suffix != ".typed"]
    rooms = [room for room in rooms if not room.endswith("__pycache__")]
    assert len(rooms) >= 9
    others = ["producer/lazyshard_producer", "integrations/swift/lazyshard_swift"]
    assert [room for room in rooms + others if room not in paths] == []


def test_the_page_tells_the_imports_that_the_test_of_directions_allows() -> None:
    assert imports_allowed(PAGE.read_text(encoding="utf-8")) == MAY_IMPORT


def test_readme_lists_every_page_once() -> None:
    docs = ROOT / "docs"
    pages = [*docs.glob("*.md"), *docs.glob("guides/*.md")]
    assert len(pages) >= 39
    assert pages_listed((ROOT / "README.md").read_text(encoding="utf-8")) == sorted(
        path.relative_to(docs).as_posix() for path in pages
    )


def test_a_path_is_found_in_text_and_table_and_not_in_a_block() -> None:
    page = "in `lazyshard/gone.py`\n\n```\n`lazyshard/block.py`\n```\n\n| a | `tests`, `head.json` |\n"
    assert named_paths(page) == ["lazyshard/gone.py", "tests"]


def test_a_row_of_the_table_of_imports_is_read() -> None:
    page = "| layer | may import |\n|---|---|\n| `plan` | `errors` |\n| `errors` | nothing |\n\n| `x` | `y` |\n"
    assert imports_allowed(page) == {"plan": {"errors"}, "errors": set()}


@pytest.mark.parametrize(
    ("line", "pages"),
    [
        ("- [docs/a.md](docs/a.md): a", ["a.md"]),
        ("- [a](docs/a.md#part), and [again](docs/a.md)", ["a.md", "a.md"]),
        ("- [docs/guides/a.md](docs/guides/a.md): a", ["guides/a.md"]),
        ("- [a](CHANGELOG.md)", []),
    ],
)
def test_a_link_to_a_page_is_counted(line: str, pages: list[str]) -> None:
    assert pages_listed(f"[before](docs/b.md)\n\n## More\n\n{line}\n") == pages


def test_links_between_the_page_and_others_lead_somewhere() -> None:
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", PAGE.read_text(encoding="utf-8"))]
    files = [target for target in targets if target]
    assert len(files) >= 3
    assert [target for target in files if not Path(PAGE.parent, target).exists()] == []
