"""`errors`: which error leads to which code, and how a process ends with it."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lazyshard.errors import (
    BadSample,
    ChunkCorrupt,
    ChunkMissing,
    ChunkRetired,
    CursorTaken,
    LazyShardError,
    RankInvalid,
    SkipSample,
    StateInvalid,
    StateMismatch,
    StoreUnavailable,
    StreamInvalid,
    StreamMismatch,
    TooManyBadSamples,
    WaitTimeout,
)
from lazyshard.stream import Published
from lazyshard_swift import errors
from lazyshard_swift.errors import PositionInvalid, ResumeRefused, SettingsRefused, StreamTooShort
from lazyshard_swift.parallel import stopped
from tests.swift.programs import python
from tests.swift.unit.runs import decided, megatron

CODES: dict[int | None, list[BaseException]] = {
    2: [
        *(SettingsRefused("no", argument="packing"), ResumeRefused("no"), PositionInvalid("torn")),
        # The stream is whole; it is the arguments that do not fit it, and the message says which to change.
        *(StreamMismatch("another one"), StreamTooShort("short"), RankInvalid("rank"), ChunkRetired("deleted")),
        *(CursorTaken("process 7 is running as 'one'"), StateMismatch("another window"), StateInvalid("torn")),
    ],
    5: [ChunkCorrupt("damaged"), ChunkMissing("gone"), StreamInvalid("a gap"), BadSample("bad"), TooManyBadSamples("")],
    75: [WaitTimeout("no chunk"), StoreUnavailable("503")],
    130: [KeyboardInterrupt()],
    None: [
        *(ValueError("a bug"), RuntimeError("CUDA out of memory"), TimeoutError("of somebody else")),
        *(FileNotFoundError("model.safetensors"), MemoryError()),
    ],
}


@pytest.mark.parametrize("code", CODES)
def test_code_of_an_error(code: int | None) -> None:
    assert [errors.code_of(error) for error in CODES[code]] == [code] * len(CODES[code])


def raised(*chain: BaseException, by: str = "cause") -> BaseException:
    """Returns the last of errors that led one to the next."""
    for before, after in itertools.pairwise(chain):
        setattr(after, f"__{by}__", before)
    return chain[-1]


@pytest.mark.parametrize("by", ["cause", "context"])
def test_error_of_ours_that_led_to_another_one_counts(by: str) -> None:
    assert errors.code_of(raised(WaitTimeout("w"), RuntimeError("a"), ValueError("clean-up failed"), by=by)) == 75
    assert errors.code_of(raised(ChunkCorrupt("c"), RuntimeError("a"), by=by)) == 5
    assert errors.code_of(raised(RuntimeError("a"), ValueError("b"), by=by)) is None
    # The last one of ours.
    assert errors.code_of(raised(ChunkMissing("gone"), ResumeRefused("take a later checkpoint"), by=by)) == 2
    assert errors.code_of(raised(RuntimeError("a"), WaitTimeout("w"), KeyboardInterrupt(), by=by)) == 75
    assert errors.code_of(raised(ValueError("a"), KeyboardInterrupt(), by=by)) == 130


def test_chain_that_goes_round_comes_to_an_end_and_one_that_was_cut_does_not_count() -> None:
    first, second = RuntimeError("a"), ValueError("b")
    first.__context__, second.__context__ = second, first
    assert errors.code_of(first) is None
    # As after: except SkipSample: raise SomethingElse from None.
    bug = ValueError("a bug of the model")
    bug.__context__, bug.__suppress_context__ = SkipSample("too long"), True
    assert errors.code_of(bug) is None


def caught(kind: type[LazyShardError], text: str, worker: int = 0) -> LazyShardError:
    """Returns an error as torch makes it anew of a worker's."""
    trace = 'Traceback (most recent call last):\n  File "fetch.py", line 5, in f\n'
    where = f"Caught {kind.__name__} in DataLoader worker process {worker}."
    return kind(f"{where}\nOriginal {trace}{kind.__module__}.{kind.__name__}: {text}\n")


PROGRAM = """
import os, sys
from lazyshard.errors import *
from lazyshard_swift.errors import *
from lazyshard_swift import errors
errors.install_exits()
errors.install_exits()
errors._LINGER_S = 0.01
{before}
{failure}
"""


def run(failure: str, before: str = "", **variables: Any) -> subprocess.CompletedProcess[str]:
    return python(PROGRAM.format(failure=failure, before=before), **variables)


@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [
        ("raise WaitTimeout('no chunk 3')", 75, "error: no chunk 3"),
        ("raise SettingsRefused('no --packing')", 2, "error: no --packing"),
        ("raise ChunkCorrupt('row 7 is damaged')", 5, "error: row 7 is damaged"),
        ("raise KeyboardInterrupt", 130, "interrupted"),
        (
            "try:\n    raise ChunkCorrupt('row 7')\nexcept ValueError:\n    raise RuntimeError('clean-up failed')",
            5,
            "error: row 7",
        ),
    ],
)
def test_process_ends_with_one_message_and_the_code(failure: str, code: int, message: str) -> None:
    ended = run(failure)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert ended.stderr == f"\nlazyshard: {message} (exit code {code})\n"


AT = "/s/chunk_00003.jsonl: row 7"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ChunkCorrupt(AT), AT),
        (caught(ChunkCorrupt, AT), AT),
        (caught(BadSample, "a row:\nover two lines"), "a row:\nover two lines"),
        # In the text of an error there may be anything.
        (caught(BadSample, "row 3: Caught a cold"), "row 3: Caught a cold"),
        (
            caught(BadSample, "row 3: ValueError: BadSample: is in the text"),
            "row 3: ValueError: BadSample: is in the text",
        ),
        (BadSample("Caught nothing"), "Caught nothing"),
        (WaitTimeout("or wait longer with max_wait"), "or wait longer with --sharded_lazy_max_wait"),
        (caught(WaitTimeout, "or wait longer with max_wait"), "or wait longer with --sharded_lazy_max_wait"),
    ],
)
def test_message_is_that_of_the_error_and_speaks_of_our_argument(
    error: LazyShardError, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "_exit", lambda code: None)
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    errors.end_within(0, error).join()
    assert capsys.readouterr().err.strip().startswith(f"lazyshard: error: {message} (exit code ")


def test_process_that_cannot_save_in_time_ends_with_the_error() -> None:
    ended = run("import time; errors.end_within(0.01, WaitTimeout('no chunk 3')); time.sleep(60)")
    assert (ended.returncode, ended.stderr) == (75, "\nlazyshard: error: no chunk 3 (exit code 75)\n")


def test_other_errors_keep_their_traceback_and_code() -> None:
    ended = run("raise ValueError('a bug')")
    assert ended.returncode == 1
    assert ended.stderr.startswith("Traceback")
    assert ended.stderr.endswith("ValueError: a bug\n")
    assert "lazyshard:" not in ended.stderr


def test_exit_handlers_run_and_what_was_printed_is_not_lost() -> None:
    before = "import atexit; atexit.register(print, 'handled'); sys.stdout.write('printed ')"
    assert run("raise ChunkCorrupt('row 7')", before).stdout == "printed handled\n"


def test_process_that_does_not_wind_up_is_cut_off() -> None:
    before = "import atexit, signal; errors._FINISH_S = 0.05; atexit.register(signal.pause)"
    ended = run("raise WaitTimeout('no chunk')", before + "; sys.stdout.write('printed')")
    assert (ended.returncode, ended.stdout) == (75, "printed")


def test_ranks_that_wait_for_the_same_chunk_let_each_other_come_to_the_end() -> None:
    # torchrun sends SIGTERM to the others as soon as the first one has ended.
    before = (
        "import signal, time\n"
        "def linger(seconds):\n"
        "    print(seconds)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "time.sleep = linger\n"
        "errors._LINGER_S = 3.0"
    )
    several = run("raise WaitTimeout('no chunk')", before, RANK="1", WORLD_SIZE="2")
    assert (several.returncode, several.stdout) == (75, "3.0\n")
    assert run("raise WaitTimeout('no chunk')", before, WORLD_SIZE="").stdout == ""
    # Only those are late together.
    assert run("raise ChunkCorrupt('row 7')", before, WORLD_SIZE="2").stdout == ""


def test_children_are_ended_at_once() -> None:
    before = (
        "import multiprocessing, signal\n"
        "context = multiprocessing.get_context('fork')\n"
        "child = context.Process(target=signal.pause)\n"
        "child.start()\n"
        "print(child.pid, flush=True)"
    )
    ended = run("raise WaitTimeout('no chunk')", before)
    assert ended.returncode == 75
    assert not Path("/proc", ended.stdout.strip()).exists()
    assert ended.stderr == "\nlazyshard: error: no chunk (exit code 75)\n"


DISTRIBUTED = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert sys.excepthook.__name__ == "_distributed_excepthook", sys.excepthook
"""


def test_message_comes_through_the_hook_of_torch_distributed() -> None:
    # That puts a buffer in the place of sys.stderr, and loses it when the process ends within.
    ended = run("raise WaitTimeout('no chunk 3')", DISTRIBUTED, RANK="0", WORLD_SIZE="1")
    assert ended.returncode == 75, ended.stderr
    assert "lazyshard: rank 0: error: no chunk 3 (exit code 75)\n" in ended.stderr
    assert "Traceback" not in ended.stderr


WORKER = """
import torch
from torch.utils.data import DataLoader, Dataset

class Failing(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        error = WaitTimeout("no chunk 3", chunk=3)
        error.carry_fields()
        raise error

list(DataLoader(Failing(), num_workers=1))
"""


def test_message_of_a_worker_is_that_of_its_error() -> None:
    ended = run(WORKER)
    assert ended.returncode == 75, ended.stderr
    assert ended.stderr == "\nlazyshard: error: no chunk 3 (exit code 75)\n"


def test_rank_ends_with_the_launcher() -> None:
    # The parent of this one is killed while it waits; what it writes afterwards tells who ended it.
    program = (
        "import os, signal, subprocess, sys\n"
        "rank = '''\n"
        "import os, signal, sys\n"
        # Waited for and not handled: it may come at once, while a handler could not print.
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "from lazyshard_swift import errors\n"
        "errors.install_exits()\n"
        "print('ready', flush=True)\n"
        "print(signal.sigwait([signal.SIGTERM]).name, flush=True)\n"
        "'''\n"
        "child = subprocess.Popen([sys.executable, '-c', rank], stdout=subprocess.PIPE, pass_fds=[1],\n"
        "    text=True, env=os.environ | {'TORCHELASTIC_RUN_ID': 'x'})\n"
        "assert child.stdout.readline() == 'ready\\n'\n"
        "read = os.dup(child.stdout.fileno())\n"
        "if os.fork() == 0:\n"
        "    sys.stdout.write(open(read).readline())\n"
        "    sys.stdout.flush()\n"
        "    os._exit(0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = python(program)
    assert ended.returncode == -signal.SIGKILL
    assert ended.stdout == "SIGTERM\n"


@pytest.mark.parametrize(
    ("checkpoint", "told"), [(None, ""), ("output/checkpoint-25", ". Checkpoint: output/checkpoint-25")]
)
def test_end_of_a_stream(checkpoint: str | None, told: str) -> None:
    """As the README has it."""
    args = megatron(micro_batch_size=2, global_batch_size=8, train_iters=60)
    why, left = decided(args, 203).end(200, [Published(1, 203, True)], 8)
    assert stopped(why, left, step=25, planned=60, trained=200, checkpoint=checkpoint) == (
        "the stream has ended with 203 samples: training stops after step 25 of 60, on all ranks alike, with 200 "
        f"samples trained and 3 left over, fewer than the 8 of a step{told}"
    )
