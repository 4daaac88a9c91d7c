"""What all commands of both programs keep to, as `docs/commands.md` tells it, and what each of them refuses."""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
import typer
import typer.main

import lazyshard as package
from lazyshard.cli import command, exits, output, verify
from lazyshard.cli.command import app
from lazyshard.cli.main import main
from lazyshard.cli.output import MAX_CHARACTERS, duration, moment, shorten, size
from lazyshard.part import Part
from lazyshard.stream.listing import retire
from lazyshard_producer import errors
from lazyshard_producer.cli import main as produced
from lazyshard_producer.command import app as producer_app
from lazyshard_producer.configuration.given import sort_arguments
from tests.cli.commands import as_other_user, commit, fill, lazyshard, make_stream, python, run_of, save, two_ranks
from tests.conversion.test_exporting import ids
from tests.conversion.test_exporting import stream as tokens
from tests.harness.processes.environment import ROOT, environment
from tests.stream.damage import delete, flip, put, stream
from tests.stream.streams import cursor, foreign, needs_root, produce, publish_rows
from tests.tiers import full

PAGE: Final = ROOT / "docs" / "commands.md"

_PRODUCER: Final = ("check", "end", "init", "run", "sequence")
WITHOUT_JSON: Final = {"lazyshard watch", *(f"lazyshard-producer {name}" for name in _PRODUCER)}
"""They write for people, or serve their facts as /status.json, or have those of `lazyshard status --json`."""

MORE: Final = {"audit": ["checkpoints"], "export": ["out"], "forget": ["sft"], "trace": ["--sample", "0"]}

COMMANDS: Final[dict[str, Any]] = {
    f"{name} {command}": found
    for name, one in (("lazyshard", app), ("lazyshard-producer", producer_app))
    for command, found in typer.main.get_command(one).commands.items()  # type: ignore[attr-defined]
}
OF_STREAMS: Final = ("audit", "export", "forget", "inspect", "status", "trace", "verify")


def examples(command: Any) -> Iterator[list[str]]:
    text, _, _ = command.epilog.replace("\n\n", "\n").partition("[bold]Exit codes")
    for line in text.splitlines():
        if line.startswith("lazyshard"):
            yield shlex.split(re.split(r" [|>] ", line)[0])


@pytest.mark.parametrize("name", COMMANDS)
def test_help_tells_working_examples_and_exit_codes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for checkpoint in ("v1-20251121-101500/checkpoint-1200", "checkpoint-1200"):
        (tmp_path / "out" / checkpoint).mkdir(parents=True)
    command = COMMANDS[name]
    assert [one.name for one in command.params if not getattr(one, "help", None)] == []
    assert any("--json" in one.opts for one in command.params) is (name not in WITHOUT_JSON)
    found = list(examples(command))
    assert found and len(COMMANDS) >= 15
    for words in found:
        assert " ".join(words[:2]) == name
        # Parsing refuses options that are not there, and values that cannot be.
        arguments = sort_arguments(words[1:]).rest[1:] if words[0] == "lazyshard-producer" else words[2:]
        context = command.make_context(name, list(arguments))
        assert not [arg for arg in context.args if arg.startswith("-")]
    _, _, codes = command.epilog.partition("[bold]Exit codes[/bold]")
    found_codes = {int(code) for code in re.findall(r"^ *(?:Those of run: )?(\d+) ", codes, re.MULTILINE)}
    defined = {value for module in (exits, errors) for value in vars(module).values() if isinstance(value, int)}
    # A page is served until Ctrl-C.
    least = {2, 130} if name == "lazyshard watch" else {0} if name.endswith(" check") else {0, 2}
    assert defined | {0} >= found_codes >= least


def test_page_lists_every_command_once() -> None:
    rows = re.findall(r"^\| `(lazyshard[\w-]* [\w-]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(COMMANDS)


@pytest.mark.parametrize(("stream", "options"), [("missing", ["--json"]), ("", []), ("empty", ["--json"])])
@pytest.mark.parametrize("command", OF_STREAMS)
def test_a_stream_that_is_not_there_is_one_line_and_a_code(
    command: str, stream: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("checkpoints", "empty"):
        (tmp_path / name).mkdir()
    done = lazyshard(command, stream, *MORE.get(command, []), *options)
    # Without a cursor `trace` wants a checkpoint to be named.
    codes = (3, 5) if stream == "empty" and command != "trace" else (2, 5)
    assert (done.returncode in codes, done.stdout) == (True, ""), done
    lines = done.stderr.splitlines()
    assert lines[-1].startswith("lazyshard: error: ")
    assert stream == "empty" or (len(lines) == 1 and (stream or "STREAM") in lines[0])
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "empty"]
    assert os.listdir(tmp_path / "empty") == []


@needs_root
@pytest.mark.parametrize(
    ("closed", "arguments", "told"),
    [
        ("head.json", ["status", "."], "head.json"),
        ("chunk_00001.jsonl", ["verify", ".", "--jobs", "1"], "unchecked: chunk_00001.jsonl: "),
        ("cursors", ["forget", ".", "sft", "--yes"], "cursors"),
    ],
)
def test_permission_is_a_matter_of_the_filesystem(
    closed: str, arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cursor(produce(tmp_path, 6, 2, end=False), "sft", consumed=4, chunks_before=1)
    monkeypatch.chdir(tmp_path)
    lazyshard(*[word.replace("sft", "nobody") for word in arguments])
    (tmp_path / closed).chmod(0o555 if closed == "cursors" else 0)

    def look() -> None:
        done = lazyshard(*arguments)
        assert (done.returncode, told in done.stdout + done.stderr, "Traceback" in done.stderr) == (7, True, False)

    as_other_user(tmp_path, monkeypatch, look)
    assert os.listdir(tmp_path / "cursors") == ["sft.json"]


@pytest.mark.parametrize(
    ("program", "line", "offered"),
    [
        (main, "lazyshard ver", ["verify", "verify-filesystem"]),
        (produced, "lazyshard-producer run --max-a", ["--max-ahead"]),
    ],
)
def test_completion(program: Callable[[list[str]], int], line: str, offered: list[str]) -> None:
    words = line.split()
    asked = {f"_{words[0].replace('-', '_').upper()}_COMPLETE": "complete_bash", "COMP_WORDS": line}
    out = io.StringIO()
    with (
        mock.patch.dict(os.environ, asked | {"COMP_CWORD": str(len(words) - 1)}),
        contextlib.redirect_stdout(out),
        contextlib.suppress(SystemExit),
    ):
        assert program([]) == 0
    assert out.getvalue().split() == offered


def run(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lazyshard.cli", *map(str, arguments)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": 60} | options
    return subprocess.run(command, stdin=subprocess.DEVNULL, check=False, **options)


def buffered() -> dict[str, str]:
    return {name: value for name, value in environment().items() if name != "PYTHONUNBUFFERED"}


@pytest.mark.parametrize(("told", "more"), [(["--watch", "--json"], {}), ([], {"PYTHONUNBUFFERED": "1"})])
def test_a_disk_that_takes_no_output_is_an_error(told: list[str], more: dict[str, str], tmp_path: Path) -> None:
    stream = produce(tmp_path / "s", 1)
    with open("/dev/full", "w") as full:
        done = run("status", stream, *told, env=buffered() | more, stdout=full)
    assert (done.returncode, done.stderr.count("\n")) == (7, 1)


@pytest.mark.parametrize(
    "words", [["inspect", "--chunk", "0", "--rows", "9999", "--full"], ["status", "--watch", "--json"]]
)
def test_a_reader_that_goes_away_is_no_error(words: list[str], tmp_path: Path) -> None:
    stream = tmp_path / "s"
    publish_rows(stream, 3000, ({"id": row, "text": "x" * 200} for row in range(3000)))
    read, write = os.pipe()
    os.close(read)
    try:
        done = run(words[0], stream, *words[1:], env=buffered(), stdout=write)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_version_and_no_command() -> None:
    done = lazyshard("--version")
    assert (done.returncode, done.stdout) == (0, f"lazyshard {package.__version__}\n")
    done = lazyshard()
    assert (done.returncode, "Usage: lazyshard" in done.stdout) == (2, True)


@pytest.mark.parametrize("name", ["typer", "rich.console"])
def test_missing_requirement_is_named_in_one_line(name: str) -> None:
    hidden = f"import sys; sys.modules[{name!r}] = None"
    code = f"{hidden}; from lazyshard.cli.main import main; sys.exit(main(['verify', '/']))"
    done = python("-c", code)
    top = name.partition(".")[0]
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"lazyshard needs {top}, which is not installed: pip install 'lazyshard[cli]'\n"


def test_command_loads_nothing_of_training(tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text('{"version": 1, "datasets": [{"path": "a"}]}')
    check = f"execute(['check-config', {str(tmp_path / 'train.json')!r}])"
    done = python("-c", f"import sys; from lazyshard.cli.command import execute; print({check}, *sys.modules)")
    code, *loaded = done.stdout.splitlines()[-1].split()
    assert (code, {"torch", "lazyshard.data"} & set(loaded)) == ("0", set())


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (OSError(28, "No space left on device", "/a/b"), 7, "lazyshard: error: /a/b: No space left on device; "),
        (KeyboardInterrupt(), 130, "lazyshard: interrupted"),
        (KeyError("x"), 70, "lazyshard: error: unexpected KeyError: 'x'; "),
        (MemoryError("x"), 71, "lazyshard: error: "),
        (OSError(12, "Cannot allocate memory"), 71, "lazyshard: error: "),
    ],
)
def test_errors_that_end_a_command(error: BaseException, code: int, told: str) -> None:
    with mock.patch.object(verify, "verify", side_effect=error):
        done = lazyshard("verify", "/")
    assert (done.returncode, done.stderr.splitlines()[-1].startswith(told)) == (code, True)
    assert ("Traceback" in done.stderr) is (code == 70)


def test_interrupt_while_typer_is_at_work_and_a_module_that_is_missing() -> None:
    with mock.patch.object(command, "app", side_effect=typer.Abort):
        assert main(["verify", "/"]) == 130
    # One that is none of the requirements is not hidden.
    with mock.patch.dict(sys.modules, {"lazyshard.cli.command": None}), pytest.raises(ModuleNotFoundError):
        main(["verify", "/"])


@pytest.mark.parametrize("write", [output.explain, output.complain])
def test_messages_that_go_nowhere_are_no_failure(write: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    assert output.one_line("a\nb\tc\x1b[31m\udcff") == "a\\nb\\tc\\x1b[31m\\udcff"
    with open("/dev/full", "w", buffering=1) as full, monkeypatch.context() as patched:
        patched.setattr("sys.stderr", full)
        write("x")
        output.detach_broken_streams()
        # What is still in its buffer must not fail at close.
        with contextlib.suppress(OSError):
            full.close()


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        (size, {0: "0 bytes", 1: "1 byte", 2e9: "2.0 GB", 5e15: "5.0 PB"}),
        (duration, {0.4: "0 s", 47 * 3600: "47 h 0 min", 2 * 86400: "2 days 0 h", float("inf"): "over a year"}),
        (moment, {0.0: "1970-01-01 00:00:00 UTC", 1e18: "1e+18 s after 1970", -1e18: "-1e+18 s after 1970"}),
    ],
)
def test_amounts_in_words(words: Callable[[float], str], numbers: dict[float, str]) -> None:
    assert {number: words(number) for number in numbers} == numbers


@pytest.mark.parametrize(
    ("value", "short"),
    [
        ("x" * MAX_CHARACTERS, "x" * MAX_CHARACTERS),
        ("x" * 201, "x" * 200 + "... (201 characters)"),
        ([[0] * 21], [[*([0] * 20), "... (21 items)"]]),
        ({"k" * 300: 1}, {"k" * 200 + "... (300 characters)": 1}),
        ({str(n): n for n in range(100)}, {str(n): n for n in range(100)}),
        ({str(n): n for n in range(1234)}, {**{str(n): n for n in range(100)}, "...": "(1,234 keys)"}),
    ],
)
def test_long_values(value: Any, short: Any) -> None:
    assert shorten(value) == short


def test_check_config(tmp_path: Path) -> None:
    bad = "version: 1\ndatasets:\n  - path: chat\n    wieght: 1\ndataloader:\n  batch_size: 0\n"
    steps = "version: 1\ndatasets:\n  - path: a\n    steps: [{{filter_fn: '{}'}}]\n  - path: b\n"
    file = tmp_path / "train.yaml"
    file.write_text(steps.format("os.path:isdir"))
    done = lazyshard("check-config", file)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{file}: no mistakes: 2 data sets, 1 step\n", "")
    file.write_text(steps.format("no_such_module:keep"))
    assert lazyshard("check-config", file, "--no-imports").returncode == 0
    done = lazyshard("check-config", file)
    assert (done.returncode, "no_such_module" in done.stdout) == (3, True)
    # As text, mistakes are those of the page: config/test_load.
    file.write_text(bad)
    done = lazyshard("check-config", file, "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["file"], found["ok"]) == (3, str(file), False)
    places = [(one["path"], one["line"], one.keys() - {"path", "line"}) for one in found["mistakes"]]
    assert places == [("datasets[0].wieght", 4, {"text"}), ("dataloader.batch_size", 6, {"text"})]


SIMULATE: Final = "simulate --ranks 2 --batch 2 --step-seconds 0.25 --producer-rate 8 --samples-per-chunk 4"
TRACE: Final = "trace run --state run/checkpoint-4"

REFUSALS: Final = [
    ("mend", 2, "(see `lazyshard --help`)"),
    ("verify", 2, "(see `lazyshard verify --help`)"),
    ("verify a.jsonl", 2, "a.jsonl"),
    ("verify stream --forever", 2, "--forever"),
    ("verify stream --samples-per-chunk 3", 5, "3"),
    *[(f"{command} bare", 5, "bare") for command in ("verify", "status", "status --json", "inspect")],
    *[(f"{command} later", 5, "stream.json") for command in ("verify", "status", "status --json", "inspect")],
    *[(f"{command} doubled", 3, "chunk_0.jsonl") for command in ("status", "status --json", "inspect")],
    ("status a.jsonl", 2, "a.jsonl"),
    ("status /no/such/place --watch", 2, "/no/such/place"),
    ("status '' --watch", 2, "STREAM"),
    *[(f"{command} {'a' * 300}", 2, "aaa") for command in ("status", "verify", "inspect")],
    *[(f"status stream --interval {words}", 2, "--interval") for words in ("1", "0 --watch")],
    ("inspect stream 5", 2, "from 0 to 4"),
    ("inspect stream --chunk 3", 2, "from 0 to 2"),
    ("inspect empty 0", 2, "sample 0"),
    ("inspect stream 0 --chunk 0", 2, "--chunk"),
    ("inspect stream --rows 1", 2, "--rows"),
    ("inspect stream 0 --all", 2, "--all"),
    ("inspect stream --samples-per-chunk 3", 5, "3"),
    ("inspect damaged 1", 5, "chunk_00000.jsonl: row 1 (byte 9)"),
    *[(f"inspect retired {words}", 5, "below 1") for words in ("0", "--chunk 0")],
    *[(f"{TRACE} --step {step}", 2, "--step") for step in ("0", "5:5")],
    (f"{TRACE} --sample 1,x", 2, "--sample"),
    (f"{TRACE} --sample 7,24,99", 2, "no sample 24, 99"),
    (f"{TRACE} --step 3 --rank 3", 2, "--rank"),
    (f"{TRACE} --step 3 --sample 1", 2, "--sample"),
    (f"{TRACE} --rank 3", 2, "--rank"),
    (f"{TRACE} --chunk 3", 2, "--chunk"),
    (f"{TRACE} --chunk 7 --row 3", 2, "--row"),
    *[(f"{TRACE} --source {place}", 2, "--source") for place in ("in.jsonl", "in.jsonl:L0")],
    (f"{TRACE} --text ''", 2, "--text"),
    (f"{TRACE} --all", 2, "--all"),
    (f"{TRACE} --consumer a", 2, "--consumer"),
    ("trace stream --state other", 5, "stream_id"),
    ("trace run --state blind --step 1", 5, "step 1"),
    ("trace nothing --state other", 5, "nothing"),
    ("trace run --state nowhere", 2, "--state"),
    ("trace plain --state unnamed --sample 0 --origins", 2, "--origins"),
    ("trace plain --state unnamed --source in.jsonl:L1", 2, "--source"),
    ("forget run sfd --yes", 3, "registered: sft"),
    ("forget stream sft --yes", 3, "stream"),
    ("forget later sft --yes", 5, "later"),
    *[(f"forget run {name}", 2, "NAME") for name in ("''", "../sft", ".sft")],
    *[(f"export tokens {name}", 2, "PREFIX") for name in ("tokens/", "nowhere/a", "a.idx")],
    *[(f"export tokens a {option} rows", 2, option) for option in ("--dtype", "--document-boundaries")],
    # These import megatron-core.
    *full(("export tokens a --field labels", 3, "tokens/chunk_00000.jsonl:1: "), ("export torn a", 5, "chunk_00000")),
    ("export retired a", 3, "retired"),
    *[(f"watch stream --save '{file}'", 2, "--save") for file in ("", "/dev/null", ".", "no/page.html", "s3://b/a")],
    ("audit stream nothing", 3, "nothing"),
    ("audit stream", 3, "stream"),
    ("audit stream nowhere", 2, "nowhere"),
    # A folder without checkpoints is not passed over in silence where there is a cursor, which alone is proven.
    ("audit run unsaid", 3, "unsaid"),
    ("watch coming --save page.html", 2, "coming"),
    ("watch nothing --save page.html", 5, "nothing"),
    ("watch no/stream", 2, "no/stream"),
    *[(f"watch stream --host '{host}'", 2, "--host") for host in ("no such host", "")],
    *[(f"verify-filesystem {words}", 2, "") for words in ("", "/no/such", "--serve /no/such", ". . --far true")],
    *[(f"verify-filesystem . {words}", 2, "--") for words in ("--longest 0", "--far ''", '--far "\'"')],
    ("check-config missing.yaml", 7, "missing.yaml"),
    *[(f"check-config {file}", 2, "FILE") for file in (".", "''")],
    (SIMULATE, 2, "--rows"),
    (f"{SIMULATE} --rows 64 --chunks 16", 2, "--chunks"),
    (f"{SIMULATE} --rows 64 --rows-a-second 8", 2, "--rows-a-second"),
    (f"{SIMULATE} --rows 3", 2, "--rows"),
    (f"{SIMULATE} --rows 64 --max-ahead much", 2, "--max-ahead"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("refusals")
    (here / "nothing").mkdir()
    (here / "a.jsonl").touch()
    stream(here / "stream")
    stream(here / "empty", 0)
    flip("chunk_00000.jsonl", 10)(stream(here / "damaged"))
    delete("chunk_00001.jsonl", "chunk_00002.jsonl.completed")(here / "damaged")
    retire(stream(here / "retired", 4, end=False), 1, 2)
    put("chunk_0.jsonl")(foreign(here / "doubled", b"{}\n"))
    fill(here / "bare")
    foreign(here / "plain", *[b'{"id":0}\n{"id":1}\n{"id":2}\n'] * 4)
    (here / "unnamed").write_text(json.dumps(run_of(None, two_ranks(1)).to_dict()))
    put("stream.json", b'{"format":3}')(stream(here / "later"))
    rows = ids([1, 2], [3], [4, 5, 6])
    tokens(here / "tokens", rows)
    flip("chunk_00000.jsonl", 14)(tokens(here / "torn", rows))
    stream_id = make_stream(here / "run")
    state = run_of(stream_id, two_ranks(2), Part(3, 1, 2, skip=((16, 18),), first_step=2, draws_per_step=1))
    save(here / "run", 4, state)
    commit(here / "run", state)
    (here / "unsaid" / "step-5").mkdir(parents=True)
    (here / "unsaid" / "step-5" / "lazyshard.json").write_text("{}")
    (here / "other").write_text(json.dumps(run_of("f" * 32, two_ranks(2)).to_dict()))
    (here / "blind").write_text(json.dumps(run_of(stream_id, Part(2, 1, 4)).to_dict()))
    return here


@pytest.mark.parametrize(("words", "code", "named"), REFUSALS)
def test_refusal(words: str, code: int, named: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    before = {path: os.stat(path).st_mtime_ns for path in place.rglob("*")}
    done = lazyshard(*shlex.split(words))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1), done.stderr
    assert done.stderr.startswith("lazyshard: error: ") and named in done.stderr
    assert {path: os.stat(path).st_mtime_ns for path in place.rglob("*")} == before
