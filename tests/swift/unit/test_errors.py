"""`errors`: which error leads to which code, and how a process ends with it. `opening`: where lines are seen."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from lazyshard import errors as library
from lazyshard.stream import Published
from lazyshard_swift import errors, ms_swift, opening
from lazyshard_swift.trainers import _Callback
from tests.swift.programs import python
from tests.swift.unit.runs import decided, megatron

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


def raised(*chain: BaseException, by: str) -> BaseException:
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
        assert errors.code_of(raised(*chain, by=by)) == expected


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


def run(failure: str, **variables: Any) -> subprocess.CompletedProcess[str]:
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
        ended = run(failure)
        assert (ended.returncode, ended.stdout) == (code, "")
        assert ended.stderr == f"\nlazyshard: {message} (exit code {code})\n"
    # Other errors go to the hook that was there before.
    ended = run("raise ValueError('a bug')")
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "before: a bug\n", "")


def test_exit_handlers_run_and_what_was_printed_is_not_lost() -> None:
    handled = run(f"import atexit; atexit.register(print, 'handled'); sys.stdout.write('printed ')\n{WAIT}")
    assert handled.stdout == "printed handled\n"
    # But a process that does not wind up is cut off.
    before = "import atexit, signal; errors._FINISH_S = 0.05; atexit.register(signal.pause); sys.stdout.write('p')\n"
    ended = run(before + WAIT)
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
    several = run(before + WAIT, RANK="1", WORLD_SIZE="2")
    assert (several.returncode, several.stdout) == (75, "3.0\n")
    assert several.stderr == "\nlazyshard: rank 1: error: no chunk 3 (exit code 75)\n"
    assert run(before + WAIT, WORLD_SIZE="").stdout == ""
    # Only those are late together.
    assert run(before + "raise ChunkCorrupt('row 7')", WORLD_SIZE="2").stdout == ""


def test_children_are_ended_at_once() -> None:
    before = """
import multiprocessing, signal
child = multiprocessing.get_context('fork').Process(target=signal.pause)
child.start()
print(child.pid, flush=True)
"""
    ended = run(before + WAIT)
    assert ended.returncode == 75
    assert not Path("/proc", ended.stdout.strip()).exists()
    assert ended.stderr == "\nlazyshard: error: no chunk 3 (exit code 75)\n"


def test_end_of_a_stream(notices: list[str]) -> None:
    args = megatron(micro_batch_size=2, global_batch_size=8, train_iters=60)
    gate = SimpleNamespace(gave_up=None, published=lambda: [Published(1, 203, True)])
    stream: Any = SimpleNamespace(plan=decided(args, 203), gate=gate)
    trainer = SimpleNamespace(args=args, state=SimpleNamespace(iteration=25, consumed_train_samples=200))
    run = _Callback(trainer, stream)
    told = "after step 25 of 60, on all ranks, with 200 samples trained; not trained: 3 of the 203 of"
    run.log_stop(60)
    run.checkpoints.last_step = 25
    run.log_stop(60)
    assert all(told in text for text in notices)
    assert [text.endswith(". Checkpoint: /runs/one/checkpoint-25") for text in notices] == [False, True]


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
