"""`lazyshard forget` in processes of its own. What removing durably means: tests/stream/test_consumers*.py."""

import io
import json
import os
import re
import time
from pathlib import Path

import pytest

from lazyshard.cli.forget import freed
from lazyshard.cli.main import main
from lazyshard.stream.cursor import Consumer, list_consumers
from lazyshard.stream.listing import retire
from tests.cli.commands import consumer, lazyshard
from tests.stream.damage import checkpoint, reads
from tests.stream.streams import produce

TWO_HOURS_S = 7201.0  # Two hours, and nearly a minute until that is said otherwise
A2, B8 = consumer("a", 0, done=2), consumer("b", 0, done=8)


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
    assert os.listdir(stream / "cursors") == ["sft.json"]
    done = lazyshard("forget", stream, "sft", "--yes", "--json")
    told = {"stream": str(stream), "consumer": "sft", "forgotten": True, "samples": 16, "chunks_before": 8}
    assert (done.returncode, json.loads(done.stdout)) == (0, told)
    assert "it is the only consumer" in done.stderr
    assert consumers(stream) == []


def test_what_is_told_of_a_consumer(tmp_path: Path) -> None:
    with_two_consumers(tmp_path)
    (tmp_path / "cursors" / "torn.json").write_bytes(b"")
    out = lazyshard("forget", tmp_path, "torn", "--yes").stdout.splitlines()
    assert out[1].startswith(f"  checkpoint  unknown: {tmp_path}/cursors/torn.json: ")
    assert out[2].startswith("without it, chunks 0 to 1 may be deleted (2 chunks, about ")
    assert "without it, no further chunk may be deleted" in lazyshard("forget", tmp_path, "sft", "--yes").stdout
    reads(tmp_path, "new", 1, time.time())
    assert re.search(r"none\n.*\nit was last active \d+ s ago", lazyshard("forget", tmp_path, "new", "--yes").stdout)
    assert consumers(tmp_path) == ["old run"]
    done = lazyshard("forget", tmp_path, "old run")
    assert (done.returncode, done.stderr.count("\n"), "--yes" in done.stderr) == (2, 1, True)
    # In a directory without a stream.
    (bare := tmp_path / "bare").mkdir()
    for name in ("a", "b"):
        checkpoint(bare, name, 1, 0, 0.0)
    done = lazyshard("forget", bare, "a", "--yes")
    assert (done.returncode, "cannot determine which chunks" in done.stdout, consumers(bare)) == (0, True, ["b"])


class Typed(io.StringIO):
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
    last = "forgotten: sft" if forgotten else "nothing was changed"
    assert (shown.err, shown.out.splitlines()[-1]) == ("forget it? [y/N] ", last)
    assert consumers(tmp_path) == (["old run"] if forgotten else ["old run", "sft"])


@pytest.mark.parametrize(
    ("others", "name", "retired", "published", "expected"),
    [
        ([A2, B8], "a", 0, 10, range(2, 8)),
        ([A2, B8], "a", 5, 10, range(5, 8)),
        ([A2, B8], "b", 0, 10, range(2, 2)),
        ([A2, consumer("b", 0, done=2)], "b", 0, 10, range(2, 2)),
        ([A2, consumer("b", 0, done=10)], "a", 0, 10, range(2, 9)),
        ([A2, consumer("b", problem="torn")], "a", 0, 10, range(0)),
        ([consumer("a", needs=7), consumer("b", 0, done=3)], "a", 0, 10, range(3)),
        ([A2], "a", 0, 10, range(0)),
        ([consumer("a", 0, done=0), consumer("b", 0, done=0)], "a", 0, 0, range(0)),
    ],
)
def test_what_one_alone_keeps(others: list[Consumer], name: str, retired: int, published: int, expected: range) -> None:
    assert list(freed(others, name, retired, published)) == list(expected)
