"""What pages, guides and docstrings say is so: errors, links, figures, paths, imports, examples."""

import doctest
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Final, get_args, get_type_hints

import pytest

import lazyshard.cli.exits
import lazyshard.errors
import lazyshard_producer.errors
import lazyshard_swift.errors
from lazyshard.format.records import STATES
from lazyshard_producer import display as metrics
from lazyshard_producer.limits import KeptChunks
from tests.harness.processes.producing import run
from tests.packaging.guide_programs import GUIDES, blocks
from tests.packaging.messages import GOLDEN, LOGGED, collect, read_golden
from tests.packaging.test_import_directions import MAY_IMPORT, ROOT

PAGE: Final = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES: Final = read_golden()
ERRORS: Final = (lazyshard.errors, lazyshard_producer.errors, lazyshard_swift.errors)
GROUPS: Final = (
    *("Files that cannot be read", "Options and sources", "Writing a stream"),
    *("Steps, lengths and configuration", "States that do not fit", "ms-swift"),
)

EXITS: Final[dict[str, ModuleType]] = {
    "`lazyshard-producer`": lazyshard_producer.errors,
    "`lazyshard`": lazyshard.cli.exits,
    "ms-swift": lazyshard_swift.errors,
}
ROOTS: Final = {"LazyShardError", "FormatInvalid"}  # Not raised themselves, so they have no exit code

FEWEST_LINES: Final = 60  # Of lines that are found in the code: fewer mean that they are no longer found


def error_classes() -> dict[str, type[BaseException]]:
    found = {}
    for module in ERRORS:
        for name, one in inspect.getmembers(module, inspect.isclass):
            if issubclass(one, BaseException) and one.__module__ == module.__name__ and name[0] != "_":
                found[name] = one
    return found


def sections() -> dict[str, str]:
    parts = re.split(r"^##+ (.+)$", PAGE, flags=re.MULTILINE)
    headings = [heading.strip("`") for heading in parts[1::2]]
    assert len(set(headings)) == len(headings), "a heading is there twice"
    return dict(zip(headings, parts[2::2], strict=True))


SECTIONS: Final = sections()


def code_spans(text: str) -> list[str]:
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return [re.sub(r"\s+", " ", span) for span in re.findall(r"`([^`]+)`", prose)]


def table(heading: str, first: str) -> dict[str, list[str]]:
    """The rows of the table under a heading whose first column has that title, by their first cell."""
    _, _, rest = SECTIONS[heading].partition(f"| {first} |")
    rows = [line.strip("| ").split(" | ") for line in rest.partition("\n\n")[0].splitlines()[2:]]
    return {row[0].strip("`"): row[1:] for row in rows}


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


def test_every_error_class_has_an_entry_and_no_entry_is_of_another() -> None:
    entries = re.findall(r"^### `([A-Z]\w+)`$", PAGE, re.MULTILINE)
    grouped = [name for heading in GROUPS for name in table(heading, "class")]
    assert sorted([*entries, *grouped, *ROOTS]) == sorted(error_classes())
    shown = {heading for heading, text in SECTIONS.items() if "```text\n" in text}
    assert {*entries, *GROUPS} <= shown


def test_every_class_has_the_exit_codes_that_the_commands_have() -> None:
    rows = table("Exit codes of the classes", "class")
    named = {name: codes for names, codes in rows.items() for name in names.split("`, `")}
    assert sorted(named) == sorted(set(error_classes()) - ROOTS)
    assert len(named) == sum(len(names.split("`, `")) for names in rows), "a class is there twice"
    for name, codes in named.items():
        error = error_classes()[name]("text")
        for module, code in zip(EXITS.values(), codes, strict=True):
            code_of = getattr(module, "code_of", None) or vars(module)["exit_code"]
            assert code in ("–", str(code_of(error))), (name, module)


def test_the_table_of_exit_codes_has_all_and_only_those_that_are_defined() -> None:
    rows = table("Exit codes", "code")
    for column, (where, module) in enumerate(EXITS.items()):
        listed = {int(code) for code, cells in rows.items() if cells[column] != "–"}
        defined = {
            value for name, value in vars(module).items() if name.isupper() and name[0] != "_" and type(value) is int
        }
        assert listed == defined | {0}, where


def test_every_reason_of_a_wait_has_its_row() -> None:
    assert set(table("What the producer waits for", "reason")) == set(get_args(metrics.Reason))
    assert set(table("What the producer waits for", "kept by")) == set(get_args(get_type_hints(KeptChunks)["by"]))
    assert set(table("What a rank waits for", "state")) == set(STATES)


def test_the_page_and_the_messages_tell_the_same() -> None:
    known, logged, texts = phrases(), MESSAGES[LOGGED], [text for texts in MESSAGES.values() for text in texts]
    examples = re.findall(r"^```text\n(.*?)\n```$", PAGE, re.DOTALL | re.MULTILINE)
    lines = [line for text in examples for line in text.splitlines() if line[0] != " " and "1 mistake" not in line]
    assert min(len(known), len(logged), len(lines)) >= FEWEST_LINES
    # Every line that is logged has an entry; every phrase and every line of an example is one of a message.
    assert [line for line in logged if not any(holds_pieces(line, phrase) for phrase in known)] == []
    assert [phrase for phrase in known if not any(holds_pieces(text, phrase) for text in texts)] == []
    pieces = [text.replace("{}", "…") for text in texts]
    sentences = [text for text in pieces if len(re.findall(r"[a-z]{2,}", text)) >= 2]
    assert [line for line in lines if not any(holds_pieces(line, text) for text in sentences)] == []


PAGES: Final = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path) -> list[str]:
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


def test_links_lead_somewhere() -> None:
    assert len(PAGES) >= 40
    assert {page.name: found for page in PAGES if (found := dead_links(page))} == {}


@pytest.mark.full
def test_commands_of_the_guides_have_the_options_that_they_are_given() -> None:
    torchrun = pytest.importorskip("torch.distributed.run").get_args_parser().format_help()
    helps = {"torchrun": torchrun, "lazyshard-producer run": run("run", "--help").stdout}
    lines = [
        line
        for page in GUIDES.glob("*.md")
        for block in blocks(page.name, "")
        for line in block.replace("\\\n", " ").splitlines()
    ]
    for command, known in helps.items():
        found = [line for line in lines if line.startswith(command)]
        assert found
        assert [word for line in found for word in re.findall(r"(?<= )--[\w-]+", line) if word not in known] == []


ARCHITECTURE: Final = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
TOPS: Final = ("examples", "integrations", "lazyshard", "producer", "scripts", "tests")


def test_paths_on_the_page_of_the_architecture_are_there_and_its_imports_are_those_that_are_allowed() -> None:
    spans = code_spans(ARCHITECTURE)
    paths = [span for span in spans if span in TOPS or span.startswith(tuple(f"{top}/" for top in TOPS))]
    assert len(paths) >= 80
    assert [path for path in paths if not (ROOT / path).exists()] == []
    _, _, table = ARCHITECTURE.partition("| layer | may import | where | content |\n")
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", table.partition("\n\n")[0], re.MULTILINE)
    assert {layer: set(code_spans(others)) for layer, others in rows} == MAY_IMPORT


def modules(place: Path) -> list[str]:
    files = [file for package in place.glob("lazyshard*") for file in package.rglob("*.py")]
    names = [".".join(file.relative_to(place).with_suffix("").parts) for file in files if ">>> " in file.read_text()]
    return sorted(name.removesuffix(".__init__") for name in names)


def test_examples_come_out_as_they_say() -> None:
    names = [name for place in (ROOT, ROOT / "producer", ROOT / "integrations" / "swift") for name in modules(place)]
    assert {name.partition(".")[0] for name in names} == {"lazyshard", "lazyshard_producer", "lazyshard_swift"}
    found = {name: doctest.testmod(importlib.import_module(name)) for name in names}
    failed = [name for name, one in found.items() if one.failed or not one.attempted]
    assert failed == [], "see what doctest has printed"


def test_every_message_stands_in_the_golden_file() -> None:
    assert collect() == GOLDEN.read_text(encoding="utf-8")  # After a change: -m tests.packaging.messages
