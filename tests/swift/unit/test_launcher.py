"""`commands`: the command line of ms-swift, and signals that reach the training. `errors`: codes, ends of processes."""

import contextlib
import itertools
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from unittest.mock import Mock, call

import pytest

from lazyshard import errors as library
from lazyshard_swift import commands, errors, ms_swift, opening
from lazyshard_swift.commands import flag_is_on
from tests.stream.streams import raised
from tests.swift.programs import environment, python, run, write
from tests.swift.warm import PATHS

BEFORE = ["/bin/python", "-m", "torch.distributed.run", "--nproc_per_node", "4", "/swift/cli/_megatron/sft.py"]
ON = [
    *(f"--sharded_lazy {value}" for value in ("true", "TRUE", "t", "T", "yes", "y", "1")),
    *("--sharded_lazy=True", "--sharded_lazy=Yes", "--sharded_lazy", "--sharded_lazy --model x"),
    "--sharded_lazy_max_wait 1 --sharded_lazy true --dataset s",
    # transformers.HfArgumentParser takes both spellings, and the last one counts.
    *("--sharded-lazy true", "--sharded-lazy=1", "--sharded_lazy false --model x --sharded_lazy true"),
]
OFF = [
    *("", "--model x", "--model sharded_lazy", "--no_sharded_lazy true"),
    *("--sharded_lazy False", "--sharded_lazy f", "--sharded_lazy no", "--sharded_lazy=0", "--sharded_lazy="),
    # Others that begin alike.
    *("--sharded_lazy_max_wait 1", "--sharded_lazy_on_end=repeat"),
    *("--sharded-lazy false", "--sharded_lazy=true --sharded_lazy=0"),
]
HANDLED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
ON_LINE = ("--sharded_lazy", "true")
SFT = "/site-packages/swift/cli/sft.py"


def test_flag_is_on() -> None:
    for lines, on in ((ON, True), (OFF, False)):
        assert [line for line in lines if flag_is_on([*BEFORE, *line.split()]) is not on] == []


def extended() -> Any:
    module = ModuleType("swift.cli.main")
    vars(module)["subprocess"] = subprocess
    commands.extend(module)
    return module


def test_without_the_flag_the_child_is_started_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    module, stock = extended(), Mock(return_value="result")
    assert module.subprocess is not subprocess and module.subprocess.Popen is subprocess.Popen
    monkeypatch.setattr(subprocess, "run", stock)
    command = [*BEFORE, "--model", "x"]
    assert module.subprocess.run(command) == "result"
    # Nor when ms-swift calls it in a way of which we know nothing.
    on = [*command, "--sharded_lazy", "true"]
    assert module.subprocess.run(on, check=True) == "result"
    assert stock.mock_calls == [call(command), call(on, check=True)]


def test_module_that_starts_its_child_otherwise_is_refused() -> None:
    module = ModuleType("swift.cli.main")
    raised(AttributeError, commands.extend, module)
    vars(module)["subprocess"] = ModuleType("subprocess")
    raised(AttributeError, commands.extend, module)


def test_code_of_the_child_is_passed_on_and_signals_are_as_before(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in HANDLED]
    for source, code in (
        ("", 0),
        ("raise SystemExit(75)", 75),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", 143),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137),
    ):
        command = [sys.executable, "-S", "-c", source, "--sharded_lazy", "true"]
        result = extended().subprocess.run(command)
        assert (result.returncode, result.args) == (code, command)
    raised(FileNotFoundError, extended().subprocess.run, [str(tmp_path / "python"), "--sharded_lazy", "true"])
    assert [signal.getsignal(number) for number in HANDLED] == before


def test_megatron_that_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    """Of one that fails, as ms-swift's own traceback does not say what to install."""
    both = "megatron-core mcore-bridge"
    for number, (version, there, folder, code, missing) in enumerate(
        (
            ("4.6.0", [], "_megatron", 1, both),
            ("4.6.0", [], "_megatron", 0, None),
            ("4.6.0", ["megatron.core"], "_megatron", 1, "mcore-bridge"),
            ("4.6.0", ["megatron.core", "mcore_bridge"], "_megatron", 1, None),
            ("4.6.0", [], "cli", 1, None),
            ("4.0.2", [], "_megatron", 1, None),
            (None, [], "_megatron", 1, None),
        )
    ):
        monkeypatch.setattr("lazyshard_swift.ms_swift.version", lambda version=version: version)
        monkeypatch.setattr("importlib.util.find_spec", lambda name, there=there: object() if name in there else None)
        script = write(tmp_path / str(number) / folder / "sft.py", f"raise SystemExit({code})")
        assert extended().subprocess.run([sys.executable, "-S", str(script), "--sharded_lazy"]).returncode == code
        told = capsys.readouterr().err
        assert f"pip install {missing};" in told if missing else told == ""


# ms-swift's own command line, and a child that says what it gets.
COMMAND = """
import sys
from lazyshard_swift import commands
from tests.data import swift_samplers
main = swift_samplers.load("cli/main.py")
commands.extend(main)
main.cli_main({"sft": "child"})
"""
CHILD = """
import os, signal, sys

def leave(number, frame):
    # Not print: the signal may come while the line below is being printed.
    os.write(1, signal.Signals(number).name.encode() + b"\\n")
    os._exit(7)

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, leave)
print(os.getppid(), os.getpid(), *sys.argv[1:], flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize("number", HANDLED)
def test_signal_is_handed_down_and_the_childs_end_waited_for(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, "sft", *ON_LINE],
        env=environment(*PATHS, tmp_path),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("run sh: ")
            parent, child, *given = process.stdout.readline().split()
            assert (int(parent), given) == (process.pid, list(ON_LINE))
            # That of the terminal comes to the child anyway.
            send = os.killpg if number == signal.SIGINT else os.kill
            send(process.pid, number)
            said, _ = process.communicate(timeout=30)
            assert (process.returncode, said) == (7, f"{number.name}\n")
            assert not Path("/proc", child).exists()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_command_of_an_ms_swift_that_is_too_old_ends_with_2_before_it_starts_anything(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text("print('started')")
    of_3 = "from lazyshard_swift import ms_swift; ms_swift.version = lambda: '3.12.6'"
    done = run(["-c", of_3 + COMMAND, "sft", *ON_LINE], environment(*PATHS, tmp_path))
    assert (done.returncode, "started" in done.stdout) == (2, False)
    (line,) = done.stderr.splitlines()
    assert all(words in line for words in ("3.12.6", "4.0.0", "pip install"))


def test_the_full_parser_answers_help_of_swift_sft_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def sft_main() -> None:
        raise SystemExit("full")

    for script, arguments, full_parser, answers in (
        (SFT, ["--help"], True, "full"),
        (SFT, ["--model", "m", "-h"], True, "full"),
        (SFT, ["--model", "m"], True, "stock"),
        (SFT, ["--help"], False, "stock"),
        ("/site-packages/swift/cli/pt.py", ["--help"], True, "stock"),
        ("/home/user/sft.py", ["--help"], True, "stock"),
        (None, ["--help"], True, "stock"),
    ):
        module, pipelines, main = (ModuleType(name) for name in ("swift.cli.utils", "swift.pipelines", "__main__"))
        vars(module)["try_use_single_device_mode"] = lambda: "stock"
        vars(pipelines).update({"sft_main": sft_main} if full_parser else {})
        main.__file__ = script
        commands.extend(module)
        monkeypatch.setitem(sys.modules, "swift.pipelines", pipelines)
        monkeypatch.setitem(sys.modules, "__main__", main)
        monkeypatch.setattr(sys, "argv", ["sft.py", *arguments])
        try:
            answered = vars(module)["try_use_single_device_mode"]()
        except SystemExit as asked:
            answered = asked.code
        assert answered == answers


CODES: dict[int | None, list[type[BaseException]]] = {
    2: [
        *(errors.SettingsRefused, errors.ResumeRefused, errors.PositionInvalid, errors.StreamTooShort),
        # The stream is whole; it is the arguments that do not fit it, and the message says which to change.
        *(library.StreamMismatch, library.ConfigInvalid, library.ChunkRetired, library.CursorTaken),
        *(library.StateMismatch, library.StateInvalid, library.AccessRefused),
    ],
    5: [library.ChunkCorrupt, library.ChunkMissing, library.StreamInvalid, library.BadSample],
    75: [library.WaitTimeout, library.StoreUnavailable],
    130: [KeyboardInterrupt],
    None: [ValueError, RuntimeError, TimeoutError, FileNotFoundError, MemoryError],
}


def led(*chain: BaseException, by: str) -> BaseException:
    """Returns the last of errors that led one to the next."""
    for before, after in itertools.pairwise(chain):
        setattr(after, f"__{by}__", before)
    return chain[-1]


@pytest.mark.parametrize("by", ["cause", "context"])
def test_code_is_that_of_the_last_error_of_ours_that_led_to_another_one(by: str) -> None:
    for code, all_of_it in CODES.items():
        assert [errors.code_of(kind("of")) for kind in all_of_it] == [code] * len(all_of_it)
    for expected, chain in (
        (75, (library.WaitTimeout("w"), RuntimeError("a"), ValueError("clean-up failed"))),
        (None, (RuntimeError("a"), ValueError("b"))),
        (2, (library.ChunkMissing("gone"), errors.ResumeRefused("take a later checkpoint"))),
        (75, (RuntimeError("a"), library.WaitTimeout("w"), KeyboardInterrupt())),
        (130, (ValueError("a"), KeyboardInterrupt())),
    ):
        assert errors.code_of(led(*chain, by=by)) == expected


def caught(kind: type[library.LazyShardError], text: str) -> library.LazyShardError:
    """Returns an error as torch makes it anew of a worker's."""
    trace = 'Traceback (most recent call last):\n  File "fetch.py", line 5, in f\n'
    where = f"Caught {kind.__name__} in DataLoader worker process 0."
    return kind(f"{where}\nOriginal {trace}{kind.__module__}.{kind.__name__}: {text}\n")


def test_message_is_that_of_the_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "_exit", lambda code: None)
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    for error, message in (
        (caught(library.ChunkCorrupt, "/s/chunk_00003.jsonl: row 7"), "/s/chunk_00003.jsonl: row 7"),
        (caught(library.BadSample, "a row:\nover two lines"), "a row:\nover two lines"),
        # In the text of an error there may be anything.
        (caught(library.BadSample, "row 3: ValueError: BadSample: a"), "row 3: ValueError: BadSample: a"),
        (library.BadSample("Caught nothing"), "Caught nothing"),
        # It speaks of our argument.
        (library.WaitTimeout("or wait longer with max_wait"), "or wait longer with --sharded_lazy_max_wait"),
    ):
        errors.end_within(0, error).join()
        assert capsys.readouterr().err.strip().startswith(f"lazyshard: error: {message} (exit code ")


PROGRAM: Final = """
import os, sys
from lazyshard.errors import *
from lazyshard_swift.errors import *
from lazyshard_swift import errors
sys.excepthook = lambda kind, error, trace: print('before:', error)
errors.install_exits()
errors.install_exits()
errors._LINGER_S = 0.01
"""
WAIT: Final = "raise WaitTimeout('no chunk 3')"


def program(failure: str, **variables: Any) -> subprocess.CompletedProcess[str]:
    return python(PROGRAM + failure, **variables)


FAILURES: Final[list[tuple[str, int, str]]] = [
    (WAIT, 75, "error: no chunk 3"),
    ("raise SettingsRefused('no --packing')", 2, "error: no --packing"),
    ("raise KeyboardInterrupt", 130, "interrupted"),
    ("try:\n    raise ChunkCorrupt('row 7')\nexcept ValueError:\n    raise RuntimeError", 5, "error: row 7"),
    # One that cannot save in time.
    ("import time; errors.end_within(0.01, WaitTimeout('no chunk 3')); time.sleep(60)", 75, "error: no chunk 3"),
]


def test_process_ends_with_one_message_and_the_code() -> None:
    for failure, code, message in FAILURES:
        ended = program(failure)
        assert (ended.returncode, ended.stdout) == (code, "")
        assert ended.stderr == f"\nlazyshard: {message} (exit code {code})\n"
    # Other errors go to the hook that was there before.
    ended = program("raise ValueError('a bug')")
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "before: a bug\n", "")


def test_exit_handlers_run_and_what_was_printed_is_not_lost() -> None:
    handled = program(f"import atexit; atexit.register(print, 'handled'); sys.stdout.write('printed ')\n{WAIT}")
    assert handled.stdout == "printed handled\n"
    # But a process that does not wind up is cut off.
    before = "import atexit, signal; errors._FINISH_S = 0.05; atexit.register(signal.pause); sys.stdout.write('p')\n"
    ended = program(before + WAIT)
    assert (ended.returncode, ended.stdout) == (75, "p")


def test_ranks_that_wait_for_the_same_chunk_let_each_other_come_to_the_end() -> None:
    # torchrun sends SIGTERM to the others as soon as the first one has ended.
    before = """
import signal, time
def linger(seconds):
    print(seconds)
    os.kill(os.getpid(), signal.SIGTERM)
time.sleep = linger
errors._LINGER_S = 3.0
"""
    several = program(before + WAIT, RANK="1", WORLD_SIZE="2")
    assert (several.returncode, several.stdout) == (75, "3.0\n")
    assert several.stderr == "\nlazyshard: rank 1: error: no chunk 3 (exit code 75)\n"
    assert program(before + WAIT, WORLD_SIZE="").stdout == ""
    # Only those are late together.
    assert program(before + "raise ChunkCorrupt('row 7')", WORLD_SIZE="2").stdout == ""


def test_children_are_ended_at_once() -> None:
    before = """
import multiprocessing, signal
child = multiprocessing.get_context('fork').Process(target=signal.pause)
child.start()
print(child.pid, flush=True)
"""
    ended = program(before + WAIT)
    assert ended.returncode == 75
    assert not Path("/proc", ended.stdout.strip()).exists()
    assert ended.stderr == "\nlazyshard: error: no chunk 3 (exit code 75)\n"


@contextlib.contextmanager
def clean() -> Iterator[logging.Logger]:
    """The library's logger without a handler, as in a program that has set up none. Pytest gives the root some."""
    logger, root = logging.getLogger("lazyshard"), logging.getLogger()
    before = (logger.handlers[:], logger.propagate, logger.level), root.handlers[:]
    logger.handlers[:], logger.propagate, root.handlers[:] = [], True, []
    try:
        yield logger
    finally:
        (logger.handlers[:], logger.propagate, logger.level), root.handlers[:] = before


def test_notice_without_ms_swift(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "swift.utils", None)
    with caplog.at_level(logging.INFO, "lazyshard"):
        ms_swift.notice("100% of {what} %s is there")
    assert [record.getMessage() for record in caplog.records] == ["lazyshard: 100% of {what} %s is there"]


def test_lines_of_the_library_are_seen_once(capsys: pytest.CaptureFixture[str]) -> None:
    with clean() as logger:
        opening.show_logs()
        opening.show_logs()
        logger.warning("rank %d of %d: waiting", 1, 2)
        assert capsys.readouterr().err == "[WARNING:lazyshard] rank 1 of 2: waiting\n"
        # A handler that ms-swift gives to the root logger later does not make it two.
        logging.getLogger().addHandler(logging.StreamHandler(sys.stderr))
        logger.warning("waiting")
        assert capsys.readouterr().err == "[WARNING:lazyshard] waiting\n"


@pytest.mark.parametrize("name", ["lazyshard", None])
def test_logging_that_the_program_has_set_up_stays_so(capsys: pytest.CaptureFixture[str], name: str | None) -> None:
    with clean() as logger:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("own %(message)s"))
        logging.getLogger(name).addHandler(handler)
        before = logger.handlers[:]
        opening.show_logs()
        logger.warning("waiting")
        assert capsys.readouterr().err == "own waiting\n"
        assert (logger.handlers, logger.propagate) == (before, True)
