import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lazyshard_producer.cli import main
from lazyshard_producer.wording import Outcome, Tally, error_line, log_line, summary
from tests.producer.commands import environment, rows, run_arguments, start

TALLY = Tally(
    samples=1234,
    published=1200,
    chunks=12,
    new=234,
    blank=1,
    duplicate=2,
    bytes_read=10,
    bytes_total=20,
    seconds=2.0,
)


def test_summary_of_a_finished_stream() -> None:
    assert summary(Outcome("finished", "out", TALLY)) == (
        "finished: out holds 1,234 samples in 12 chunks; 234 read in 2.0 s (117 samples/s); 1 blank line skipped, "
        "2 rows with duplicate keys"
    )


def test_summary_of_an_interrupted_run() -> None:
    assert summary(Outcome("interrupted", "out", TALLY)).startswith(
        "interrupted: 1,200 samples in 12 chunks published in out; run the same command again to go on (34 rows of the "
        "unfinished chunk will be read again); "
    )


def test_a_line_of_the_log_can_be_split_again() -> None:
    assert log_line("end", "now", out='a "b"\n=', path="", rate=1.26, chunks=3) == (
        'time=now event=end out="a \\"b\\"\\n=" path="" rate=1.3 chunks=3'
    )


def test_a_message_is_one_line_whatever_the_file_is_called() -> None:
    assert error_line("a\nb\x1b[31m\u2028").count("\n") == 0
    assert "\x1b" not in error_line("\x1b")


def test_a_log_has_a_line_at_the_start_and_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").write_bytes(rows(0, 25))
    assert main(run_arguments(tmp_path / "out", [tmp_path / "a"])) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    first, last = captured.err.splitlines()
    assert re.match(r"time=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ event=start out=\S+ samples=0 ", first)
    assert "event=end result=finished" in last
    assert "samples=25 published=25 chunks=3" in last


def test_no_progress_leaves_the_last_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").write_bytes(rows(0, 25))
    assert main(run_arguments(tmp_path / "out", [tmp_path / "a"], 10, "--no-progress")) == 0
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == ["event=end"]


def test_a_stderr_that_is_gone_is_no_reason_to_stop(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(rows(0, 300))
    with start(*run_arguments(tmp_path / "out", [tmp_path / "a"], 10)) as process:
        assert process.stderr is not None
        process.stderr.close()
        assert process.wait(timeout=60) == 0
    assert (tmp_path / "out" / "stream.end").exists()


def test_a_stderr_that_nobody_ever_reads_leaves_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(rows(0, 30))
    nobody, broken = os.pipe()
    os.close(nobody)
    command = [sys.executable, "-m", "lazyshard_producer", *run_arguments(tmp_path / "out", [tmp_path / "a"], 10)]
    try:
        assert subprocess.run(command, stderr=broken, env=environment(), timeout=60).returncode == 0
    finally:
        os.close(broken)


def test_a_terminal_gets_a_bar_and_a_sentence(tmp_path: Path) -> None:
    source = tmp_path / "a[bold].jsonl"
    source.write_bytes(rows(0, 200) + b'{"id":1,"id":2}\n')
    reader, writer = pty.openpty()
    environ = environment() | {"TERM": "xterm"}
    command = [
        sys.executable,
        "-m",
        "lazyshard_producer",
        *run_arguments(tmp_path / "out", [source], 10, "--rate", 400),
    ]
    with subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stderr=writer) as process:
        os.close(writer)
        shown = b""
        try:
            while part := os.read(reader, 65536):
                shown += part
        except OSError:  # EIO: the other side is closed
            pass
        os.close(reader)
        assert process.wait(timeout=60) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    assert "samples  " in text
    assert "%" in text
    assert f"warning: {source}:201: a key is named twice" in text
    last = text.replace("\r", "\n").strip().splitlines()[-1]
    assert last.startswith(f"finished: {tmp_path / 'out'} holds 201 samples in 21 chunks; ")
