"""SIGINT and SIGTERM: the row in hand, one line, an exit code, and a stream that continues; SIGUSR1, SIGHUP."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lazyshard_producer.cli import main
from lazyshard_producer.stop import Stop
from tests.harness.processes.commands import Commands
from tests.harness.processes.environment import environment
from tests.harness.processes.producing import catches, head, ids, published, rows, run_arguments, start, wait_until
from tests.producer.commands import Running

ROWS = 300
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_bytes(rows(0, ROWS))
    return path


@pytest.mark.parametrize(
    ("number", "code", "word", "rate"),
    [(signal.SIGINT, 130, "interrupted", 200), (signal.SIGTERM, 0, "terminated", 0.01)],
)
def test_a_signal_stops_between_rows(
    number: signal.Signals, code: int, word: str, rate: float, source: Path, nursery: Commands, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with Running(nursery, *run_arguments(out, [source], 10, "--rate", rate)) as run:
        run.wait_until(lambda: published(out) >= (2 if rate > 1 else 0) and head(out) != {})
        sent = time.monotonic()
        status, err = run.end(number)
        assert (status, time.monotonic() - sent < 5) == (code, True)
    done = ids(out)
    assert done == list(range(len(done)))
    last = err.splitlines()[-1]
    assert f"event=end result={word}" in last
    assert f"published={len(done)} chunks={len(done) // 10}" in last
    assert (head(out)["state"], head(out)["ended"]) == ("idle", False)
    assert not (out / "stream.end").exists()
    assert not (out / ".tmp").exists()

    assert main(run_arguments(out, [source], 10)) == 0
    assert ids(out) == list(range(ROWS))


def test_a_signal_while_the_command_is_loaded(source: Path, tmp_path: Path) -> None:
    # The first thing that the command does is to note signals; the slow imports come after.
    process = start(*run_arguments(tmp_path / "out", [source], 10, "--rate", 0.01))
    wait_until(lambda: catches(process.pid, signal.SIGTERM), process)
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


@pytest.fixture
def hangups() -> Iterator[None]:
    """Hangups as of a process that no nohup has started."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangups")
def test_the_handlers_of_before_are_put_back() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    for released in (False, True):
        with Stop() as stop:
            assert all(signal.getsignal(number) is not old for number, old in zip(SIGNALS, before, strict=True))
            if released:
                stop.release()
                assert [signal.getsignal(number) for number in SIGNALS] == before
        assert [signal.getsignal(number) for number in SIGNALS] == before
        assert stop.requested is None


@pytest.mark.usefixtures("hangups")
@pytest.mark.parametrize(("ignored", "configured"), [(True, True), (True, False), (False, True)])
def test_a_run_that_sighup_cannot_reload_says_so_once(
    ignored: bool, configured: bool, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text("rate = 100000\n")
    more = ("--config", tmp_path / "run.toml") if configured else ()
    if ignored:  # as by nohup
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Stop() as stop:
        assert stop.reload_ignored == ignored == (signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)
    assert main(run_arguments(tmp_path / "out", [source], 10, *more)) == 0
    assert capsys.readouterr().err.count("SIGHUP is ignored") == (ignored and configured)


def hangs_up(row: dict[str, Any]) -> dict[str, Any]:
    if row["id"] == 100:
        os.kill(os.getpid(), signal.SIGHUP)
    return row


def asks_for_the_end(row: dict[str, Any]) -> dict[str, Any]:
    if row["id"] == 100:
        os.kill(os.getpid(), signal.SIGUSR1)
    return row


@pytest.mark.usefixtures("hangups")
@pytest.mark.parametrize("name", ["hangs_up", "asks_for_the_end"])
def test_plain_files_reach_the_end(name: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(run_arguments(out, [source], 10, "--transform", f"{__name__}:{name}")) == 0
    assert capsys.readouterr().err.count('event=note message="SIGHUP received') == (name == "hangs_up")
    assert ids(out) == list(range(ROWS))
    assert (out / "stream.end").exists()


def dozes(row: dict[str, Any]) -> None:
    print("dozing", flush=True)
    time.sleep(600)


def test_ctrl_c_breaks_off_what_leaves_nothing_half_done(nursery: Commands, source: Path, tmp_path: Path) -> None:
    arguments = run_arguments(tmp_path / "out", [source], 10, "--transform", f"{__name__}:dozes")
    with Running(nursery, "check", *arguments[1:]) as run:
        run.wait_until(lambda: "dozing" in run.said())
        assert run.end(signal.SIGINT)[0] == 130
