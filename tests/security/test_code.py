"""Nothing that comes from a file is run: what could is named with the reason; no expression is exponential."""

import ast
import importlib
import json
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard.cli.output import shorten
from lazyshard.errors import StateInvalid
from lazyshard.inspection.tracing_states import read_state
from lazyshard_producer.following.listing import NameRules
from tests.security.guards import command, producer, write_stream
from tests.stream.streams import raised

ROOT: Final = Path(__file__).resolve().parents[2]

RUNNERS: Final = frozenset(
    {
        *("eval", "exec", "compile", "__import__", "import_module", "run_path", "run_module", "load", "loads"),
        *("Unpickler", "unsafe_load", "full_load", "load_module", "system", "popen", "Popen", "run", "call"),
        *("check_call", "check_output", "getoutput", "execv", "execve", "execvp", "spawnv", "literal_eval", "mktemp"),
    }
)
"""Names of functions that run what they are given, or read what can run; `orjson.loads` and the like are told apart."""

HARMLESS: Final = frozenset(
    {"json.load", "json.loads", "orjson.loads", "tomllib.load", "tomli.load", "re.compile", "tomllib.loads"}
)

FORBIDDEN_MODULES: Final = frozenset(
    {"marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "xml", "code", "runpy", "commands", "telnetlib"}
)

ALLOWED: Final = {  # Where the product does any of this, and why no file of somebody else's decides what is run
    "lazyshard/data/samples.py: pickle.loads": "samples of the training's own that this process has pickled itself",
    "lazyshard/config/__init__.py: import yaml": "the nodes of its safe loader, of which plain values alone are made",
    "lazyshard/cli/command.py: importlib.import_module": "our own, by constants",
    "lazyshard/lazy.py: importlib.import_module": "our own, by constants, and what the user asks to run",
    "lazyshard/inspection/thumbnails.py: import_module": "Pillow's decoders of raster formats, by constants",
    "lazyshard/filesystem/side.py: subprocess.Popen": "the command for the other mount, as the user asks for it",
    "producer/lazyshard_producer/errors.py: importlib.import_module": "pyarrow, zstandard, by constants",
    "producer/lazyshard_producer/configuration/settings.py: ast.literal_eval": "docstrings of its own source",
    "integrations/swift/lazyshard_swift/ms_swift.py: importlib.import_module": "our own, by constants",
    "integrations/swift/lazyshard_swift/commands.py: importlib.import_module": "ms-swift, by constants",
    "integrations/swift/lazyshard_swift/commands.py: subprocess.run": "the command that ms-swift would run itself",
    "integrations/swift/lazyshard_swift/commands.py: subprocess.Popen": "the command that ms-swift would run itself",
    "lazyshard/cli/doctor.py: known[one].load": "entry points of installed packages, by a name from their list",
}


def sources() -> Iterator[Path]:
    for package in ("lazyshard", "producer/lazyshard_producer", "integrations/swift/lazyshard_swift"):
        yield from sorted((ROOT / package).rglob("*.py"))


def runners_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            called = ast.unparse(node.func)
            if name in RUNNERS and called not in HARMLESS:
                yield called
            if any(keyword.arg in ("shell", "allow_pickle", "trust_remote_code") for keyword in node.keywords):
                yield f"{called} with shell, allow_pickle or trust_remote_code"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (f"import {name}" for name in modules if name.partition(".")[0] in FORBIDDEN_MODULES)


OWN: Final = frozenset({"self", "reload", "segment", "space"})


@pytest.mark.full
def test_nothing_else_in_the_product_runs_what_it_reads() -> None:
    found = set()
    for file in sources():
        tree = ast.parse(file.read_bytes())
        mine = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        mine |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
        own = (node for node in imports if (node.module or "").startswith("lazyshard"))
        imported = {alias.asname or alias.name for node in own for alias in node.names}
        for called in runners_in(tree):
            start, dot, _ = called.partition(".")
            if start not in imported | (OWN if dot else mine):
                found.add(f"{file.relative_to(ROOT)}: {called}")
    assert found == set(ALLOWED), "what is new here needs a reason in ALLOWED; what has gone is to be taken out"


class Runs:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.file),)


@pytest.mark.parametrize("protocol", [0, pickle.HIGHEST_PROTOCOL])
def test_no_code_of_a_checkpoint_is_run(protocol: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stream, proof = write_stream(tmp_path / "stream"), tmp_path / "it-ran"
    file = tmp_path / "lazyshard.pt"
    file.write_bytes(pickle.dumps(Runs(proof), protocol))
    raised(StateInvalid, read_state, file)
    for arguments in (("trace", stream, "--state", file), ("audit", stream, file), ("audit", stream, "--state", file)):
        assert command(*arguments) == 5
    assert "Traceback" not in capfd.readouterr().err
    assert not proof.exists()
    pickle.loads(file.read_bytes())
    assert proof.exists(), "the file does what it should not be let do"


def test_stream_says_nothing_that_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seal that names a function as its source, or a transform as its recipe, has neither imported."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("import os; os.mkdir('it-ran')\n")
    (tmp_path / "a.jsonl").write_bytes(b'{"id":0}\n{"id":1}\n')
    stream = tmp_path / "stream"
    assert producer("run", "--source", "a.jsonl", "--out", stream, "--samples-per-chunk", 1) == 0
    for name in ("stream.end", "head.json"):
        (stream / name).unlink()
    seal = stream / "chunk_00001.jsonl.completed"
    values = json.loads(seal.read_bytes())
    values["source"]["sources"].append({"path": "python:evil:rows", "kind": "generator", "offset": 0})
    values["source"]["recipe"] = {"transform": "evil:rows", "where": "evil:rows"}
    seal.write_text(json.dumps(values))
    for arguments in (("run",), ("check",)):
        producer(*arguments, "--source", "a.jsonl", "--out", stream, "--samples-per-chunk", 1)
    for name in ("status", "inspect", "verify", "trace", "audit"):
        command(name, stream)
    assert not (tmp_path / "it-ran").exists()


def test_what_every_start_of_python_runs_is_one_import() -> None:
    swift = ROOT / "integrations/swift"
    assert (swift / "lazyshard_swift.pth").read_text() == "import lazyshard_swift\n"
    tree = ast.parse((swift / "lazyshard_swift/__init__.py").read_bytes())
    assert [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)] == ["import sys"]


patterns: Final[Any] = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")

LINEAR: Final = {r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*"}
"""Each round begins with a dot, which nothing else in it matches; and the text is a setting of the user's own."""


def expressions() -> Iterator[tuple[str, str | bytes]]:
    for file in sources():
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re.") and node.args:
                first = node.args[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str | bytes):
                    yield str(file.relative_to(ROOT)), first.value


def nests_repeats(expression: str | bytes) -> bool:
    """Whether it repeats without bound what repeats without bound: so matching can take exponential time."""

    def look(items: Any, within: bool) -> bool:
        for kind, value in items:
            inside = within
            parts: list[Any] = []
            if kind in (patterns.MAX_REPEAT, patterns.MIN_REPEAT):
                unbounded = value[1] is patterns.MAXREPEAT
                if unbounded and within:
                    return True
                inside, parts = within or unbounded, [value[2]]
            elif kind is patterns.SUBPATTERN:
                parts = [value[3]]
            elif kind is patterns.BRANCH:
                parts = value[1]
            elif kind in (patterns.ASSERT, patterns.ASSERT_NOT):
                parts = [value[1]]
            if any(look(part, inside) for part in parts):
                return True
        return False

    return look(patterns.parse(expression), False)


def test_no_expression_takes_exponential_time_on_a_hostile_text() -> None:
    found = list(expressions())
    assert len(found) > 15
    assert {expression for _, expression in found if nests_repeats(expression)} == LINEAR
    assert nests_repeats(r"(a+)+b") and nests_repeats(r"(?:x*|y)*") and not nests_repeats(r"a+b+(c{1,5})+")
    for text in ("data:" * 50_000, "data:;" + "base64," * 50_000, "A" * 500_000 + "!", "a=" * 200_000):
        assert len(shorten(text)) < 300
    assert not NameRules("*a*a*a*a*a*b", "{name}.done", "END").is_data("a" * 250)
