"""SIGINT and SIGTERM: the row in hand, one line, an exit code, and a stream that goes on. SIGUSR1 and SIGHUP: marks."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lazyshard_producer.stop import Stop
from tests.harness.processes.environment import ROOT, environment
from tests.harness.processes.producing import ids, published, rows, run, run_arguments, start, wait_until


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


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def test_usr1_asks_for_the_end_and_hup_for_a_reload_each_time() -> None:
    with Stop() as stop:
        assert (stop.end_requested, stop.take_reload()) == (False, False)
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.end_requested
        assert (stop.take_reload(), stop.take_reload()) == (True, False)
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.take_reload()
        assert stop.requested is None


def test_released_the_handlers_of_before_are_back_at_once() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with Stop() as stop:
        assert all(signal.getsignal(number) is not old for number, old in zip(SIGNALS, before, strict=True))
        stop.release()
        assert [signal.getsignal(number) for number in SIGNALS] == before
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_under_nohup_a_hangup_stays_ignored() -> None:
    code = (
        "import os, signal; from lazyshard_producer.stop import Stop\n"
        "with Stop() as stop:\n"
        "    print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, stop.take_reload(), stop.reload_ignored)\n"
        "print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)"
    )
    command = ["nohup", sys.executable, "-c", code]
    done = subprocess.run(
        command, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    )
    assert done.stdout == "True False True\nTrue\n"


@pytest.mark.parametrize(("ignored", "configured"), [(True, True), (True, False), (False, True)])
def test_a_run_that_sighup_cannot_reload_says_so_once(
    ignored: bool, configured: bool, source: Path, tmp_path: Path
) -> None:
    out, config = tmp_path / "out", tmp_path / "run.toml"
    config.write_text("rate = 100000\n")
    command = [sys.executable, "-m", "lazyshard_producer", *run_arguments(out, [source], 10)]
    if configured:
        command += ["--config", str(config)]
    done = subprocess.run(
        ["nohup", *command] if ignored else command,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.count("SIGHUP is ignored") == (1 if ignored and configured else 0)
    assert ids(out) == list(range(1000))


def test_the_tests_themselves_can_run_under_nohup() -> None:
    tests = [
        "test_usr1_asks_for_the_end_and_hup_for_a_reload_each_time",
        "test_a_hangup_without_a_configuration_file_is_told_and_the_run_goes_on",
    ]
    done = subprocess.run(
        [
            "nohup",
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *(f"{__file__}::{one}" for one in tests),
        ],
        env=environment(),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "2 passed" in done.stdout) == (0, True), done.stdout


def test_a_hangup_without_a_configuration_file_is_told_and_the_run_goes_on(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start(*run_arguments(out, [source], 10, "--rate", 200))
    wait_until(lambda: published(out) >= 1, process)
    process.send_signal(signal.SIGHUP)
    before = published(out)
    wait_until(lambda: published(out) >= before + 2, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert 'event=note message="SIGHUP has come' in err


def test_usr1_leaves_plain_files_to_come_to_their_end(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start(*run_arguments(out, [source], 10, "--rate", 2000))
    wait_until(lambda: published(out) >= 1, process)
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert ids(out) == list(range(1000))
    assert (out / "stream.end").exists()


def test_ctrl_c_breaks_off_what_leaves_nothing_half_done(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(rows(0, 10))
    (tmp_path / "dozing.py").write_text("import time\ndef sleep(row):\n    time.sleep(600)\n")
    arguments = run_arguments(tmp_path / "out", [tmp_path / "a"], 10, "--transform", "dozing:sleep")
    process = start("check", *arguments[1:], cwd=tmp_path)
    assert process.stdout is not None
    while not process.stdout.readline().startswith("limits"):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err


def _catches(pid: int, number: int) -> bool:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
