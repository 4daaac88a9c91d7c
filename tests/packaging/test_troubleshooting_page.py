"""`docs/troubleshooting.md` has an entry for every error class, logged line, wait and exit code, and none for others.

Its examples are what the code says: each is brought about and compared.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Final, get_args, get_type_hints

import pytest

import lazyshard.cli.exits
import lazyshard.errors
import lazyshard_producer.errors
import lazyshard_swift.errors
from lazyshard.format.records import STATES
from lazyshard_producer.display import metrics
from lazyshard_producer.holding.limits import KeptChunks
from tests.packaging import troubles_of_files, troubles_of_producing, troubles_of_training
from tests.packaging.messages import LOGGED, read_golden
from tests.packaging.test_import_directions import ROOT
from tests.packaging.trouble_words import each_of, told

PAGE: Final = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES: Final = read_golden()
ERRORS: Final = (lazyshard.errors, lazyshard_producer.errors, lazyshard_swift.errors)
GROUPS: Final = troubles_of_files.GROUPS | troubles_of_producing.GROUPS | troubles_of_training.GROUPS
TROUBLES: Final[dict[str, Callable[[], object]]] = (
    troubles_of_files.TROUBLES
    | troubles_of_producing.TROUBLES
    | troubles_of_training.TROUBLES
    | {heading: partial(each_of, group) for heading, group in GROUPS.items()}
)
EXITS: Final[dict[str, ModuleType]] = {
    "`lazyshard-producer`": lazyshard_producer.errors,
    "`lazyshard`": lazyshard.cli.exits,
    "ms-swift": lazyshard_swift.errors,
}
GROUPED: Final = {name for group in GROUPS.values() for name in group}
"""Classes in tables: those of a heading share one block of examples."""

ROOTS: Final = {"LazyShardError", "FormatInvalid"}
"""Not raised themselves, so they have no exit code."""

CAUGHT: Final = {("ConfigInvalid", "`lazyshard`"): 3}
"""Codes that one command gives by itself: `check-config`."""

FEWEST_LINES: Final = 60
"""Of lines that are found in the code: fewer mean that they are no longer found."""


def error_classes() -> dict[str, type[BaseException]]:
    """All public classes of errors, by name."""
    found = {}
    for module in ERRORS:
        for name, one in inspect.getmembers(module, inspect.isclass):
            if issubclass(one, BaseException) and one.__module__ == module.__name__ and name[0] != "_":
                found[name] = one
    return found


def sections() -> dict[str, str]:
    """The text under each heading, by its words."""
    parts = re.split(r"^##+ (.+)$", PAGE, flags=re.MULTILINE)
    headings = [heading.strip("`") for heading in parts[1::2]]
    assert len(set(headings)) == len(headings), "a heading is there twice"
    return dict(zip(headings, parts[2::2], strict=True))


SECTIONS: Final = sections()


def code_spans(text: str) -> list[str]:
    """What stands between backticks outside of blocks, a line break as a space."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return [re.sub(r"\s+", " ", span) for span in re.findall(r"`([^`]+)`", prose)]


def table(heading: str, first: str) -> dict[str, list[str]]:
    """The rows of the table under a heading whose first column has that title, by their first cell."""
    _, _, rest = SECTIONS[heading].partition(f"| {first} |")
    rows = [line.strip("| ").split(" | ") for line in rest.partition("\n\n")[0].splitlines()[2:]]
    return {row[0].strip("`"): row[1:] for row in rows}


def exit_codes(module: ModuleType) -> set[int]:
    """The codes that a module of exit codes defines."""
    return {value for name, value in vars(module).items() if name.isupper() and name[0] != "_" and type(value) is int}


def exit_code(where: str, error: BaseException) -> int | None:
    """The code in which an error ends a command."""
    if where == "ms-swift":
        return lazyshard_swift.errors.code_of(error)
    if where == "`lazyshard`":
        return lazyshard.cli.exits.exit_code(error)
    return lazyshard_producer.errors.exit_code(error)


def holds_pieces(text: str, span: str) -> bool:
    """Whether a text has the pieces of a phrase, between its dots, in that order."""
    at = 0
    for piece in filter(None, map(str.strip, span.split("…"))):
        at = text.find(piece, at) + len(piece)
        if at < len(piece):
            return False
    return at > 0


def phrases() -> list[str]:
    """What the page says that messages hold: in bold, and in the first column of the tables of lines."""
    logged = PAGE.partition("\n## Lines in the log\n")[2]
    found = re.findall(r"\*\*`([^`]+)`\*\*", PAGE)
    found += [span for row in re.findall(r"^\| (`.+?`) \| ", logged, re.MULTILINE) for span in code_spans(row)]
    return [re.sub(r"\s+", " ", span) for span in found if span != "bold"]


def normal(text: str) -> str:
    """With the process, machine, user and seconds of the examples."""
    text = re.sub(r"it has failed for \d+ s:", "it has failed for 0 s:", text)
    text = re.sub(r"process \d+ on (?!node2)\S+", "process 4711 on node1", text)
    text = re.sub(r"\(pid \d+ on [^)]+\)", "(pid 4711 on node1)", text)
    return re.sub(r"\buid \d+", "uid 1000", text)


def test_every_error_class_has_an_entry_and_no_entry_is_of_another() -> None:
    entries = re.findall(r"^### `([A-Z]\w+)`$", PAGE, re.MULTILINE)
    assert sorted([*entries, *GROUPED, *ROOTS]) == sorted(error_classes())
    assert {heading: list(table(heading, "class")) for heading in GROUPS} == {
        heading: list(group) for heading, group in GROUPS.items()
    }


def test_every_class_has_the_exit_codes_that_the_commands_have() -> None:
    rows = table("Exit codes of the classes", "class")
    named = {name: codes for names, codes in rows.items() for name in names.split("`, `")}
    assert sorted(named) == sorted(set(error_classes()) - ROOTS)
    assert len(named) == sum(len(names.split("`, `")) for names in rows), "a class is there twice"
    for name, codes in named.items():
        for where, code in zip(EXITS, codes, strict=True):
            expected = CAUGHT.get((name, where), exit_code(where, error_classes()[name]("text")))
            assert code in ("–", str(expected)), (name, where)


def test_the_table_of_exit_codes_has_all_and_only_those_that_are_defined() -> None:
    rows = table("Exit codes", "code")
    for column, (where, module) in enumerate(EXITS.items()):
        listed = {int(code) for code, cells in rows.items() if cells[column] != "–"}
        assert listed == exit_codes(module) | {0}, where


def test_every_reason_of_a_wait_has_its_row() -> None:
    assert set(table("What the producer waits for", "reason")) == set(get_args(metrics.Reason))
    assert set(table("What the producer waits for", "kept by")) == set(get_args(get_type_hints(KeptChunks)["by"]))
    assert set(table("What a rank waits for", "state")) == set(STATES)


def test_every_line_that_is_logged_has_an_entry() -> None:
    known, lines = phrases(), MESSAGES[LOGGED]
    assert len(lines) >= FEWEST_LINES
    assert [line for line in lines if not any(holds_pieces(line, phrase) for phrase in known)] == []


def test_every_phrase_of_the_page_is_one_of_a_message() -> None:
    known, texts = phrases(), [text for texts in MESSAGES.values() for text in texts]
    assert len(known) >= FEWEST_LINES
    assert [phrase for phrase in known if not any(holds_pieces(text, phrase) for text in texts)] == []


def test_every_example_has_its_trouble_and_every_trouble_its_example() -> None:
    shown = {heading for heading, text in SECTIONS.items() if "```text\n" in text}
    assert shown == set(TROUBLES)
    assert set(error_classes()) - shown - GROUPED == ROOTS


@pytest.mark.parametrize("heading", TROUBLES)
def test_an_example_is_what_is_said(heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if heading == "Object stores":
        pytest.importorskip("s3fs", reason="needs the extra objects")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    examples = re.findall(r"^```text\n(.*?)\n```$", SECTIONS[heading], re.DOTALL | re.MULTILINE)
    assert normal(told(TROUBLES[heading])) == "\n".join(examples)


def test_links_of_the_page_lead_somewhere() -> None:
    links = re.findall(r"\]\(([\w./-]*)(#[\w-]+)?\)", PAGE)
    assert len(links) >= 20
    lost = []
    for file, anchor in links:
        path = ROOT / "docs" / (file or "troubleshooting.md")
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        known = {"#" + re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
        if not text or (anchor and anchor not in known):
            lost.append(file + anchor)
    assert lost == []
