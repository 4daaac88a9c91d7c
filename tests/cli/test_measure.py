"""`lazyshard measure` in processes of its own, stopped and killed in the middle; what it keeps: tests/measure."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from lazyshard.cli import exits
from lazyshard.cli.main import main
from lazyshard.format.names import tokens_name
from lazyshard.stream.token_lengths import measuring
from tests.cli.commands import DEADLINE_S, environment, on_terminal
from tests.stream.lengths import lengths_of
from tests.stream.streams import foreign, names, produce, wait_until

EFFORT: Final = re.compile(r" \(\d+\.\d s, [0-9.,]+ rows/[sh]\)")

MEASURES: Final = "tests.measure.measures"


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    """Chunks of 2, 2 and 1 rows."""
    return produce(tmp_path / "s", 5)


def test_measure_and_measure_again(stream: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["measure", str(stream), "--function", f"{MEASURES}:tenfold", "--workers", "1"]
    assert main(arguments) == exits.DONE
    said = EFFORT.sub("", capfd.readouterr().out)
    assert said == f"{stream}: measured 5 rows in 3 chunks: 100 tokens, 20.0 in the mean\n"
    assert main(arguments) == exits.DONE
    assert capfd.readouterr().out == f"{stream}: lengths of all 3 chunks are known, nothing to do\n"
    assert main([*arguments, "--json"]) == exits.DONE
    values = json.loads(capfd.readouterr().out)
    assert values.pop("seconds") >= 0
    assert re.fullmatch(rf"function {MEASURES}:tenfold, source [0-9a-f]{{16}}", values.pop("measure"))
    assert values == {
        "stream": str(stream),
        "chunks": 3,
        "samples": 5,
        "ended": True,
        "known": 3,
        "measured": 0,
        "rows": 0,
        "tokens": 0,
        "dropped": 0,
        "bad": 0,
        "why": "",
    }


def test_rows_that_count_nothing_are_told(stream: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["measure", str(stream), "--workers", "1", "--function"]
    assert main([*arguments, f"{MEASURES}:fails_at_3", "--on-bad-row", "zero"]) == exits.DONE
    told = capfd.readouterr()
    assert "1 row could not be measured and count 0; the first: " in told.err
    assert "4 tokens, 0.8 in the mean" in told.out
    assert main([*arguments, f"{MEASURES}:odd_ones", "--replace"]) == exits.DONE
    assert "3 rows make no sample and count 0, too long for instance" in capfd.readouterr().err


Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def begin(stream: Path, name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "lazyshard.cli", "measure", str(stream)]
        process = subprocess.Popen(
            [*command, "--function", f"{MEASURES}:{name}", "--workers", "1"],
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def is_gone(pid: int) -> bool:
    """Whether a process has ended, if nobody has taken note of that either."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_stopped_in_the_middle_it_goes_on_and_its_processes_end(
    number: signal.Signals, stream: Path, tmp_path: Path, start: Start
) -> None:
    process = start(stream, "stuck_at_3")
    wait_until(lambda: (tmp_path / "stuck").exists() or process.poll() is not None, "row 3 is measured")
    # Its process has row 3 in hand while this one still writes what came before.
    wait_until(lambda: (stream / tokens_name(0)).exists() or process.poll() is not None, "rows 0 and 1 are kept")
    worker = int((tmp_path / "stuck").read_text(encoding="utf-8"))
    assert not is_gone(worker)
    process.send_signal(number)
    _, err = process.communicate(timeout=DEADLINE_S)
    wait_until(lambda: is_gone(worker), "its process ends")
    if number == signal.SIGINT:
        assert process.returncode == exits.INTERRUPTED
        assert err.decode() == "lazyshard: interrupted; run the same command again to go on\n"
    else:
        assert process.returncode == -number
    assert [name for name in names(stream) if name.endswith(".tokens")] == [tokens_name(0)]
    (tmp_path / "go-on").touch()
    process = start(stream, "stuck_at_3")
    out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, err) == (0, b"")
    assert "measured 3 rows in 2 chunks, those of 1 chunk were known: 90 tokens" in out.decode()
    assert lengths_of(stream) == [0, 10, 20, 30, 40]


KILLED: Final = """
import os, signal, sys
from lazyshard.store import durable

rename = durable.rename

def killed(source, target):
    if sys.argv[2] == "before " + target.name:
        os.kill(os.getpid(), signal.SIGKILL)
    rename(source, target)
    if sys.argv[2] == "after " + target.name:
        os.kill(os.getpid(), signal.SIGKILL)

durable.rename = killed
from lazyshard.cli.main import main
sys.exit(main(["measure", sys.argv[1], "--function", "tests.measure.measures:counted", "--workers", "1"]))
"""


@pytest.mark.parametrize(("point", "kept"), [(f"before {tokens_name(1)}", 1), (f"after {tokens_name(1)}", 2)])
def test_killed_while_it_writes_no_chunk_is_measured_twice_that_was_kept(
    point: str, kept: int, stream: Path, tmp_path: Path, start: Start
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(stream), point], cwd=tmp_path, env=environment(), timeout=DEADLINE_S
    )
    assert done.returncode == -signal.SIGKILL
    left = [name for name in names(stream / ".measure") if name != "lock"]
    assert len(left) == (1 if kept == 1 else 0)
    assert [name for name in names(stream) if name.endswith(".tokens")] == list(map(tokens_name, range(kept)))
    (tmp_path / "counted").unlink()
    process = start(stream, "counted")
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    rows = (tmp_path / "counted").read_text(encoding="utf-8").split()
    assert sorted(map(int, rows)) == list(range(2 * kept, 5))
    assert lengths_of(stream) == [0, 10, 20, 30, 40]
    assert set(names(stream / ".measure")) <= {"lock"}


def test_second_one_is_refused(stream: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with measuring(stream):
        assert main(["measure", str(stream), "--function", f"{MEASURES}:tenfold"]) == exits.OTHER_PRODUCER
    assert "another process is measuring it already" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Invalid value: give one of --model, --tokenizer and --function (see"),
        (
            ["--function", "a:b", "--tokenizer", "."],
            "Invalid value: give one of --model, --tokenizer and --function, not --tokenizer and --function (see",
        ),
        (["--function", "a:b", "--field", "text"], "goes with --tokenizer"),
        (["--function", "a:b", "--max-length", "5"], "goes with --model"),
        (["--tokenizer", ".", "--template", "t"], "goes with --model"),
        (["--tokenizer", "/nowhere"], "'/nowhere' is not a directory"),
        (["--function", "a:b", "--workers", "0"], "--workers"),
    ],
)
def test_impossible_arguments_are_usage(
    arguments: list[str], said: str, stream: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["measure", str(stream), *arguments]) == exits.USAGE
    assert said in capfd.readouterr().err


def test_exit_codes(tmp_path: Path, stream: Path, capfd: pytest.CaptureFixture[str]) -> None:
    function = ["--function", f"{MEASURES}:fails_at_3", "--workers", "1"]
    assert main(["measure", str(tmp_path / "nothing"), *function]) == exits.USAGE
    (tmp_path / "empty").mkdir()
    assert main(["measure", str(tmp_path / "empty"), *function]) == exits.STREAM_DAMAGED
    assert main(["measure", str(foreign(tmp_path / "foreign", b'{"id":0}\n')), *function]) == exits.REFUSED
    assert main(["measure", str(stream), *function]) == exits.REFUSED
    assert main(["measure", str(stream), "--function", f"{MEASURES}:killed_at_3", "--replace"]) == exits.FILESYSTEM
    os.truncate(stream / "chunk_00001.jsonl", 5)
    assert main(["measure", str(stream), *function, "--replace"]) == exits.STREAM_DAMAGED
    assert len(capfd.readouterr().err.splitlines()) == 6


def test_bar_on_a_terminal(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 60)
    code, shown = on_terminal("measure", directory, "--function", f"{MEASURES}:tenfold", "--workers", 1)
    assert code == exits.DONE
    assert "measuring" in shown
    assert "/30" in shown
