"""`lazyshard forget` in processes of its own. What removing durably means: tests/stream/test_consumers*.py."""

import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lazyshard.cli.forget import freed
from lazyshard.cli.main import main
from lazyshard.stream.consumers import Consumer, list_consumers
from lazyshard.stream.retire import retire
from tests.cli.commands import DEADLINE_S, environment, lazyshard
from tests.cli.looks import consumer
from tests.inspection.surveyed import checkpoint, reads
from tests.stream.streams import forked, needs_root, produce

TWO_HOURS_S = 7201.0
"""Two hours, and nearly a minute until that is said otherwise."""


def consumers(stream: Path) -> list[str]:
    return [one.name for one in list_consumers(stream)]


def with_two_consumers(stream: Path) -> Path:
    produce(stream, 20, end=False)
    checkpoint(stream, "sft", 16, 8, time.time() - TWO_HOURS_S)
    checkpoint(stream, "old run", 5, 2, time.time() - TWO_HOURS_S)
    reads(stream, "old run", 4, time.time() - TWO_HOURS_S)
    return stream


def test_forget(tmp_path: Path) -> None:
    stream = with_two_consumers(tmp_path / "stream")
    retire(stream, 1, 10)
    size = sum(path.stat().st_size for path in stream.glob("chunk_*")) / 9 * 6 / 1000
    done = lazyshard("forget", stream, "old run", "--yes")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        f"consumer old run of {stream}\n"
        "  checkpoint  5 samples, done with 2 chunks; 2 h 0 min old\n"
        "  reading     needs 4 chunks; 2 h 0 min old\n"
        f"without it, chunks 2 to 7 may be deleted (6 chunks, about {size:.1f} kB): no other consumer keeps them\n"
        "forgotten: old run\n"
    )
    assert consumers(stream) == ["sft"]
    assert os.listdir(stream / "cursors") == ["sft.json"]


def test_consumer_that_keeps_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_two_consumers(tmp_path)
    assert main(["forget", str(tmp_path), "sft", "--yes"]) == 0
    assert capsys.readouterr().out == (
        f"consumer sft of {tmp_path}\n"
        "  checkpoint  16 samples, done with 8 chunks; 2 h 0 min old\n"
        "no chunk may be deleted for that: it is not the one that keeps them\n"
        "forgotten: sft\n"
    )
    assert main(["forget", str(tmp_path), "old run", "--yes"]) == 0
    assert "no consumer is left without it, and nothing is deleted until one registers\n" in capsys.readouterr().out
    assert consumers(tmp_path) == []


def test_torn_cursor_is_forgotten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_two_consumers(tmp_path)
    (tmp_path / "cursors" / "torn.json").write_bytes(b"")
    assert main(["forget", str(tmp_path), "torn", "--yes"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1].startswith(f"  checkpoint  not known: {tmp_path}/cursors/torn.json: expected a JSON object")
    assert out[2].startswith("without it, chunks 0 to 1 may be deleted (2 chunks, about ")
    assert consumers(tmp_path) == ["old run", "sft"]


def test_consumer_that_may_be_running_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    produce(tmp_path, 4, end=False)
    reads(tmp_path, "sft", 1, time.time())
    assert main(["forget", str(tmp_path), "sft", "--yes"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1] == "  checkpoint  none"
    assert re.fullmatch(
        r"it was heard of \d+ s ago: if it is running, it registers again with its next checkpoint, but may find its "
        r"chunks deleted",
        out[3],
    )


def test_consumer_of_a_directory_without_a_stream(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(tmp_path, "a", 1, 0, 0.0)
    checkpoint(tmp_path, "b", 1, 0, 0.0)
    assert main(["forget", str(tmp_path), "a", "--yes"]) == 0
    assert "what may be deleted without it is not known: " in capsys.readouterr().out
    assert consumers(tmp_path) == ["b"]


def test_name_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    stream = with_two_consumers(tmp_path / "stream")
    done = lazyshard("forget", stream, "sfd", "--yes")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == f"lazyshard: error: {stream}: no consumer 'sfd'; there are: old run, sft\n"
    assert consumers(stream) == ["old run", "sft"]


def test_stream_without_consumers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    produce(tmp_path, 2)
    assert main(["forget", str(tmp_path), "sft", "--yes"]) == 3
    assert capsys.readouterr().err == f"lazyshard: error: {tmp_path}: no consumer 'sft'; none has registered\n"


def test_damaged_manifest_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_two_consumers(tmp_path)
    (tmp_path / "stream.json").write_bytes(b"{}")
    assert main(["forget", str(tmp_path), "sft", "--yes"]) == 5
    assert "stream.json: field 'format'" in capsys.readouterr().err
    assert (tmp_path / "cursors" / "sft.json").exists()


def test_nobody_to_ask(tmp_path: Path) -> None:
    stream = with_two_consumers(tmp_path / "stream")
    done = lazyshard("forget", stream, "sft")
    assert done.returncode == 2
    assert done.stdout.startswith(f"consumer sft of {stream}\n")
    assert done.stderr == (
        "lazyshard: error: there is nobody to ask: give --yes to forget it all the same; nothing was changed\n"
    )
    assert consumers(stream) == ["old run", "sft"]


class Typed(io.StringIO):
    """What is typed on a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("typed", "forgotten"), [("y\n", True), ("YES\n", True), ("\n", False), ("n\n", False), ("", False)]
)
def test_answers(
    typed: str, forgotten: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", Typed(typed))
    assert main(["forget", str(with_two_consumers(tmp_path)), "sft"]) == 0
    shown = capsys.readouterr()
    assert (shown.err, shown.out.splitlines()[-1]) == (
        "forget it? [y/N] ",
        "forgotten: sft" if forgotten else "nothing was changed",
    )
    assert consumers(tmp_path) == (["old run"] if forgotten else ["old run", "sft"])


def test_ctrl_c_in_place_of_an_answer(tmp_path: Path) -> None:
    stream = with_two_consumers(tmp_path / "stream")
    ours, theirs = os.openpty()
    # A session of its own: the terminal's Ctrl-C goes to the processes of the one that it controls.
    command = ["setsid", "--ctty", "--wait", sys.executable, "-m", "lazyshard.cli", "forget", str(stream), "sft"]
    with subprocess.Popen(
        command, env=environment(), stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        os.close(theirs)
        assert process.stderr is not None
        assert process.stderr.read(len("forget it? [y/N] ")) == "forget it? [y/N] "
        os.write(ours, b"\x03")
        out, err = process.communicate(timeout=DEADLINE_S)
    os.close(ours)
    assert (process.returncode, out.endswith("keeps them\n")) == (130, True)
    assert err.strip() == "lazyshard: interrupted; run the same command again to go on"
    assert consumers(stream) == ["old run", "sft"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/"], "NAME"),
        (["/", ""], "NAME"),
        (["/", "../sft"], "NAME"),
        (["/", ".sft"], "NAME"),
    ],
)
def test_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["forget", *arguments]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert message in said.err


@needs_root
def test_folder_that_may_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with_two_consumers(tmp_path).chmod(0o755)
    # A relative path, as the directories above are closed to the other user; and all is imported before they are.
    monkeypatch.chdir(tmp_path)
    assert main(["forget", ".", "nobody"]) == 3
    capfd.readouterr()

    def other_user() -> None:
        os.setgid(65534)
        os.setuid(65534)
        assert main(["forget", ".", "sft", "--yes"]) == 7

    assert forked(other_user) == 0
    assert "ermission denied" in capfd.readouterr().err
    assert consumers(tmp_path) == ["old run", "sft"]


@pytest.mark.parametrize(
    ("others", "name", "retired", "published", "expected"),
    [
        ([consumer("a", consumed=0, done=2), consumer("b", consumed=0, done=8)], "a", 0, 10, range(2, 8)),
        ([consumer("a", consumed=0, done=2), consumer("b", consumed=0, done=8)], "a", 5, 10, range(5, 8)),
        ([consumer("a", consumed=0, done=2), consumer("b", consumed=0, done=8)], "b", 0, 10, range(2, 2)),
        ([consumer("a", consumed=0, done=2), consumer("b", consumed=0, done=2)], "b", 0, 10, range(2, 2)),
        ([consumer("a", consumed=0, done=2), consumer("b", consumed=0, done=10)], "a", 0, 10, range(2, 9)),
        ([consumer("a", consumed=0, done=2), consumer("b", problem="torn")], "a", 0, 10, range(0)),
        ([consumer("a", needs=7), consumer("b", consumed=0, done=3)], "a", 0, 10, range(3)),
        ([consumer("a", consumed=0, done=2)], "a", 0, 10, range(0)),
        ([consumer("a", consumed=0, done=0), consumer("b", consumed=0, done=0)], "a", 0, 0, range(0)),
    ],
)
def test_chunks_that_only_one_consumer_keeps(
    others: list[Consumer], name: str, retired: int, published: int, expected: range
) -> None:
    found = freed(others, name, retired, published)
    assert list(found) == list(expected)
