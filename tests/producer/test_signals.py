"""SIGINT and SIGTERM: the row in hand, one line, an exit code, and a stream that goes on."""

import json
import signal
import time
from pathlib import Path

import pytest

from tests.producer.commands import ids, published, rows, run, run_arguments, start, wait_until


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
    # The first thing that the command does is to note signals; -X importtime shows on stderr when it has got there.
    process = start(*run_arguments(tmp_path / "out", [source], 10, "--rate", 0.01))
    assert process.stderr is not None
    wait_until(lambda: b"\0run\0" in Path(f"/proc/{process.pid}/cmdline").read_bytes(), process)
    wait_until(lambda: _catches(process.pid, signal.SIGTERM), process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "Traceback" not in err


def test_a_second_interrupt_ends_it_at_once(source: Path, tmp_path: Path) -> None:
    process = start(*run_arguments(tmp_path / "out", [source], 10, "--rate", 0.01))
    wait_until(lambda: (tmp_path / "out" / "head.json").exists(), process)
    process.send_signal(signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    wait_until_done = process.wait(timeout=60)
    process.communicate()
    assert wait_until_done in (130, -signal.SIGINT)


def _catches(pid: int, number: int) -> bool:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
