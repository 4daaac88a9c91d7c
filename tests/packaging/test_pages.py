"""What pages, guides and docstrings say is so: errors, links, figures, pictures, paths, imports, examples."""

import ast
import doctest
import importlib
import inspect
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple, get_args, get_type_hints

import pytest

import lazyshard.cli.exits
import lazyshard.errors
import lazyshard_producer.errors
import lazyshard_swift.errors
from lazyshard.cli.main import main
from lazyshard.format.records import STATES
from lazyshard_producer import display as metrics
from lazyshard_producer.cli import main as producer
from lazyshard_producer.limits import KeptChunks
from scripts.pictures.draw_pictures import PICTURES
from tests.conversion import megatron_core
from tests.harness.processes.producing import run
from tests.packaging.guide_programs import GUIDES, blocks, blocks_of, dialogue, settled, with_commands
from tests.packaging.messages import GOLDEN, LOGGED, collect, read_golden
from tests.packaging.test_import_directions import MAY_IMPORT, ROOT
from tests.tiers import TRAININGS, full, is_full

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


FOLDER: Final = ROOT / "docs" / "pictures"


def test_committed_pictures_are_those_that_would_be_drawn_and_are_all_shown() -> None:
    committed = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.svg")}
    pictures = {name: draw() for name, draw in PICTURES.items()}
    assert sorted(committed) == sorted(pictures)
    changed = [name for name, text in pictures.items() if committed[name] != text]
    assert not changed, f"run scripts/draw_pictures, and look at what has changed in {changed}"
    pages = " ".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    assert [name for name in committed if f"](pictures/{name})" not in pages] == []


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
    printed = (block for page in GUIDES.glob("*.md") for block in blocks(page.name, ""))
    lines = [line for block in printed for line in block.replace("\\\n", " ").splitlines()]
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


Shell = Callable[[str], "subprocess.CompletedProcess[str]"]


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    options: Any = {"cwd": tmp_path, "env": with_commands(tmp_path)}
    options |= {"capture_output": True, "text": True, "timeout": 60, "check": True}
    return lambda script: subprocess.run(["bash", "-euc", script], **options)


@pytest.mark.parametrize("name", ["encoding.md", *full("balance.md", "many-generators.md")])
def test_the_example_prints_what_the_page_says(name: str, shell: Shell) -> None:
    (script,), (printed,) = (blocks(f"../{name}", language) for language in ("bash", "text"))
    found = shell(script)
    assert found.stdout == printed
    # Of the producer its first and last lines, and no warning.
    said = [re.sub(r"^time=\S+ ", "", line).split()[0] for line in found.stderr.splitlines()]
    assert name == "many-generators.md" or said in (["event=start", "event=end"], ["event=end"])


@pytest.mark.full
def test_the_session_of_indexed_dataset(shell: Shell, tmp_path: Path) -> None:
    (program, transform), (session,) = (blocks("../indexed-dataset.md", language) for language in ("python", "console"))
    made: dict[str, Any] = {}
    exec(transform, made)
    rows = made["sequences"]({"input_ids": [7, 8, 9], "lengths": [2, 0, 1]}, 5)
    assert rows == [{"input_ids": ids, "document": 5} for ids in ([7, 8], [], [9])]
    (tmp_path / "tokens.py").write_text(program)
    for line, printed in dialogue(session):
        assert settled(shell(line).stdout) == settled(printed)
    assert megatron_core.read(tmp_path / "corpus").sequences == [[101, 7, 42, 102], [101, 102], [101, 9, 102]]


def produce(command: str) -> str:
    """Runs a command of a page; returns the text of its chunks, which are two."""
    arguments = shlex.split(command.removeprefix("$ "))[1:]
    assert producer([*arguments, "--no-progress"]) == 0
    first, second = sorted(Path(arguments[arguments.index("--out") + 1]).glob("chunk_*.jsonl"))
    return first.read_text() + second.read_text()


@pytest.mark.usefixtures("here")
def test_the_rows_of_packing() -> None:
    rows, packs = blocks("../packing.md", "jsonl")
    Path("rows.jsonl").write_text(rows)
    command = next(block for block in blocks("../packing.md", "") if block.startswith("lazyshard-producer run"))
    assert produce(command) == packs
    split = section((ROOT / "docs" / "packing.md").read_text("utf-8"), "Split and padded by the producer")
    source, *expected = blocks_of(split, "json")
    Path("tokens.jsonl").write_text(source)
    assert [produce(command) for command in blocks_of(split, "console")] == expected


def test_options_of_export(capsys: Any) -> None:
    assert main(["export", "--help"]) == 0
    there = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
    _, _, told = (ROOT / "docs" / "indexed-dataset.md").read_text("utf-8").partition("## `lazyshard export")
    assert set(re.findall(r"^\| `(--[a-z-]+)", told, re.MULTILINE)) == there


TESTS: Final = (ROOT / "tests" / "README.md").read_text()
RELIABILITY: Final = (ROOT / "docs" / "reliability.md").read_text()


class Row(NamedTuple):
    what: str
    test: str
    tier: str


def section(text: str, heading: str) -> str:
    return text.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def rows_of(heading: str) -> list[Row]:
    found = [line for line in section(TESTS, heading).splitlines() if re.match(r"\|.*\| `tests/", line)]
    return [Row(*(cell.strip(" `") for cell in line.strip("|").split("|"))) for line in found]


PROMISES: Final = rows_of("Promises and their tests")
FAULTS: Final = rows_of("Faults and the tests that play them")


def marks(decorators: list[ast.expr]) -> set[str]:
    found = (re.match(r"pytest\.mark\.(\w+)", ast.unparse(one)) for one in decorators)
    return {match[1] for match in found if match}


def tier_of(test: str) -> str:
    file, _, name = test.partition("::")
    text = (ROOT / file).read_text()
    found = [one for one in ast.parse(text).body if isinstance(one, ast.FunctionDef) and one.name == name]
    assert len(found) == 1, f"{file} has no test {name}"
    own = marks(found[0].decorator_list)
    if is_full(text):
        own.add("full")
    trains = "make_model" in {argument.arg for argument in found[0].args.args}  # See `tests.tiers.mark_trainings`
    if trains and not any(training.partition("[")[0] == test for training in TRAININGS):
        own.add("full")
    return "full" if "full" in own else "quick"


@pytest.mark.parametrize("row", PROMISES + FAULTS)
def test_named_test_exists_in_its_tier(row: Row) -> None:
    assert tier_of(row.test) == row.tier


def test_every_promise_and_every_kind_of_fault_has_tests() -> None:
    promises = re.findall(r"^\d+\. \*\*(.+?)\.\*\*", section(RELIABILITY, "Promises"), re.MULTILINE)
    assert len(promises) >= 7
    assert list(dict.fromkeys(row.what for row in PROMISES)) == promises
    lines = [line for line in section(RELIABILITY, "How it is tested").splitlines() if line.startswith("| ")]
    kinds = [line.removeprefix("| ") for line in lines[1:]]
    assert len(kinds) >= 10
    named = list(dict.fromkeys(row.what for row in FAULTS))
    assert [len([name for name in named if kind.startswith(name)]) for kind in kinds] == [1] * len(kinds)
    assert [len([kind for kind in kinds if kind.startswith(name)]) for name in named] == [1] * len(named)
