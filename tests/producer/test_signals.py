"""SIGINT and SIGTERM: the row in hand, one line, an exit code, and a stream that goes on."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lazyshard_producer.stop import Stop
from tests.producer.commands import environment, ids, published, rows, run, run_arguments, start, wait_until


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_bytes(rows(0, 1000))
    return path


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 0, "terminated")]
)
@pytest.mark.parametrize("rate", [200, 0.01])
def test_a_signal_stops_between_rows(
    number: signal.Signals, code: int, word: str, rate: float, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = start(*run_arguments(out, [source], 10, "--rate", rate))
    if rate > 1:
        wait_until(lambda: published(out) >= 2, process)
    else:
        wait_until(lambda: (out / "head.json").exists(), process)
    process.send_signal(number)
    sent = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - sent < 5
    assert process.returncode == code
    done = ids(out)
    assert done == list(range(len(done)))
    last = err.splitlines()[-1]
    assert f"event=end result={word}" in last
    assert f"published={len(done)} chunks={len(done) // 10}" in last
    assert f"published in {out}; run the same command again to go on" in err
    assert "Traceback" not in err
    head = json.loads((out / "head.json").read_bytes())
    assert (head["state"], head["ended"]) == ("idle", False)
    assert not (out / "stream.end").exists()
    assert not (out / ".tmp").exists()

    assert run(*run_arguments(out, [source], 10)).returncode == 0
    assert ids(out) == list(range(1000))


def test_a_signal_while_the_command_is_loaded(source: Path, tmp_path: Path) -> None:
    # The first thing that the command does is to note signals; the slow imports come after.
    process = start(*run_arguments(tmp_path / "out", [source], 10, "--rate", 0.01))
    wait_until(lambda: _catches(process.pid, signal.SIGTERM), process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "Traceback" not in err


def test_the_second_signal_of_a_kind_ends_the_process_at_once() -> None:
    code = (
        "import os, signal; from lazyshard_producer.stop import Stop\n"
        "with Stop() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGINT); print(stop.requested.name, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM); print(stop.requested.name, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT); print('still here')"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "SIGINT\nSIGINT\n", "")


def test_the_handlers_of_before_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Stop() as stop:
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert stop.requested is None


def _catches(pid: int, number: int) -> bool:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
