"""`lazyshard rechunk` in processes of its own, killed at any moment; the rest: tests/conversion."""

import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from lazyshard import ChunkWriter, StreamReader
from lazyshard.cli import exits
from lazyshard.cli.main import main
from tests.cli.commands import DEADLINE_S, contents, environment, lazyshard, python
from tests.cli.test_adopt import on_terminal
from tests.stream.damage import delete, flip, found, stream
from tests.stream.streams import foreign, head, produce, rows, wait_until

pytestmark = pytest.mark.full

EFFORT: Final = re.compile(r" \(\d+\.\d s, [0-9.,]+ (bytes|kB|MB|GB)/s\)\n")


def test_rechunk_and_rechunk_again(tmp_path: Path) -> None:
    old, new = stream(tmp_path / "old"), tmp_path / "new"
    done = lazyshard("rechunk", old, new, "--samples-per-chunk", 3)
    assert (done.returncode, done.stderr) == (0, "")
    holds = f"{new} holds 2 chunks, 5 samples, 3 a chunk; ended"
    assert EFFORT.sub("\n", done.stdout) == f"made: {holds}; copied 45 bytes\n"
    assert len(EFFORT.findall(done.stdout)) == 1
    assert list(StreamReader(new)) == rows(0, 5)
    before = contents(new)
    done = lazyshard("rechunk", old, new, "--samples-per-chunk", 3)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"already made: {holds}, nothing to do\n"
    assert contents(new) == before


KILLED: Final = """
import os, sys
from lazyshard.store import durable
from lazyshard.stream import publishing

def killed(original):
    def publish(source, target):
        if target.name == sys.argv[3]:
            os.kill(os.getpid(), int(sys.argv[4]))
        done = original(source, target)
        if target.name + " done" == sys.argv[3]:
            os.kill(os.getpid(), int(sys.argv[4]))
        return done
    return publish

durable.rename = publishing.rename = killed(durable.rename)
durable._link = killed(durable._link)
from lazyshard.cli.main import main
sys.exit(main(["rechunk", sys.argv[1], sys.argv[2], "--samples-per-chunk", "3"]))
"""


@pytest.mark.parametrize(
    ("point", "then"),
    [
        ("stream.owner", "; copied 72 bytes"),
        ("stream.json", "; copied 72 bytes"),
        ("stream.json done", "; copied 72 bytes"),
        ("chunk_00000.jsonl", "; copied 72 bytes"),
        ("chunk_00000.jsonl done", "; copied 72 bytes"),
        ("chunk_00000.jsonl.completed", "; copied 72 bytes"),
        ("chunk_00000.jsonl.completed done", "; went on after 3 samples; copied 45 bytes"),
        ("chunk_00001.jsonl.completed done", "; went on after 6 samples; copied 18 bytes"),
        ("chunk_00002.jsonl done", "; went on after 6 samples; copied 18 bytes"),
        ("chunk_00002.jsonl.completed done", ", nothing to do"),
        ("stream.end", ", nothing to do"),
        ("stream.end done", ", nothing to do"),
    ],
)
def test_killed_at_a_step_and_run_again(point: str, then: str, tmp_path: Path) -> None:
    old, new = stream(tmp_path / "old", 8), tmp_path / "new"
    done = python("-c", KILLED, old, new, point, int(signal.SIGKILL))
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")
    done = lazyshard("rechunk", old, new, "--samples-per-chunk", 3)
    assert (done.returncode, done.stderr) == (0, "")
    holds = f"{new} holds 3 chunks, 8 samples, 3 a chunk; ended"
    assert EFFORT.sub("\n", done.stdout).partition(": ")[2] == f"{holds}{then}\n"
    assert (new / "chunk_00000.jsonl").read_bytes() == b'{"id":0}\n{"id":1}\n{"id":2}\n'
    assert list(StreamReader(new)) == rows(0, 8)
    assert not found(new)


def is_further(directory: Path, chunks: int, process: "subprocess.Popen[bytes]") -> bool:
    there = (directory / "head.json").exists() and head(directory).chunks >= chunks
    return there or process.poll() is not None


def test_killed_again_and_again(tmp_path: Path) -> None:
    """Whatever the moment, what is published is a prefix of the stream, and in the end it is all there once."""
    old, new = stream(tmp_path / "old", 1500, per_chunk=7), tmp_path / "new"
    killed = 0
    while True:
        published = head(new).chunks if (new / "head.json").exists() else 0
        with subprocess.Popen(
            [sys.executable, "-m", "lazyshard.cli", "rechunk", str(old), str(new), "--samples-per-chunk", "3"],
            env=environment(),
            stdout=subprocess.DEVNULL,
        ) as process:
            # So much further at the least; the last time it comes to its end before.
            wait_until(partial(is_further, new, published + 90, process), "90 more chunks")
            process.kill()
        killed += process.returncode == -signal.SIGKILL
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
    assert killed >= 1
    assert list(StreamReader(new)) == rows(0, 1500)
    assert not found(new)


def test_interrupted_and_run_again(tmp_path: Path) -> None:
    old, new = stream(tmp_path / "old", 8), tmp_path / "new"
    done = python("-c", KILLED, old, new, "chunk_00001.jsonl.completed done", int(signal.SIGINT))
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "lazyshard: interrupted; run the same command again to go on\n"
    done = lazyshard("rechunk", old, new, "--samples-per-chunk", 3)
    assert done.returncode == 0
    assert "; went on after 6 samples; copied 18 bytes (" in done.stdout
    assert list(StreamReader(new)) == rows(0, 8)


def test_follow(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    with (
        ChunkWriter(old, 2) as writer,
        subprocess.Popen(
            [sys.executable, "-m", "lazyshard.cli", "rechunk", str(old), str(new), "--samples-per-chunk=3", "--follow"],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        for row in rows(0, 5):
            writer.write(row)
        wait_until(lambda: (new / "head.json").exists() and head(new).samples == 3, "the first chunk of the copy")
        writer.close()
        out, error = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, error) == (0, "")
    assert f"made: {new} holds 2 chunks, 5 samples, 3 a chunk; ended; copied 45 bytes" in out
    assert list(StreamReader(new)) == rows(0, 5)


def test_follow_gives_up_in_time(tmp_path: Path) -> None:
    produce(tmp_path / "old", 4, end=False)
    done = lazyshard(
        "rechunk", tmp_path / "old", tmp_path / "new", "--samples-per-chunk", 3, "--follow", "--max-wait", 0
    )
    assert (done.returncode, done.stdout) == (75, "")
    assert done.stderr.startswith(f"lazyshard: error: waiting for chunk 2 of {tmp_path}/old (0 s of at most 0 s): ")
    assert done.stderr.endswith(", or wait longer with --max-wait\n")
    assert done.stderr.count("\n") == 1


def test_end_at_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = stream(tmp_path / "old", 7), tmp_path / "new"
    flip("chunk_00002.jsonl", 3)(old)
    arguments = ["rechunk", str(old), str(new), "--samples-per-chunk", "3"]
    assert main(arguments) == 5
    assert "chunk_00002.jsonl: row 0 (byte 0): expected XXH3 " in capsys.readouterr().err
    assert main([*arguments, "--end-at-damage"]) == 0
    where = f"ended before what is damaged ({old}/chunk_00002.jsonl: row 0 (byte 0): "
    shown = capsys.readouterr()
    assert shown.out.startswith(f"made: {new} holds 2 chunks, 4 samples, 3 a chunk; {where}")
    assert "; went on after 3 samples; copied 9 bytes (" in shown.out
    assert main([*arguments, "--end-at-damage"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(f"already made: {new} holds 2 chunks, 4 samples, 3 a chunk; {where}")
    assert list(StreamReader(new)) == rows(0, 4)
    assert not found(new)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["{old}", "{new}"], 2, "Missing option '--samples-per-chunk'"),
        (["{old}", "--samples-per-chunk", "3"], 2, "Missing argument 'OUT'"),
        (["{old}", "{old}", "--samples-per-chunk", "3"], 2, "is the directory of the stream itself, or lies in it"),
        (["{old}", "{old}/new", "--samples-per-chunk", "3"], 2, "is the directory of the stream itself, or lies in it"),
        (["{old}", "", "--samples-per-chunk", "3"], 2, "'' is not a directory"),
        (["", "{new}", "--samples-per-chunk", "3"], 2, "'' is not a directory"),
        (["{old}", "{old}/stream.json", "--samples-per-chunk", "3"], 2, "stream.json' is not a directory"),
        (["{old}", "{new}", "--samples-per-chunk", "0"], 2, "--samples-per-chunk"),
        (["{old}", "{new}", "--samples-per-chunk", "3", "--max-wait", "1"], 2, "goes with --follow only"),
        (["{old}", "{new}", "--samples-per-chunk", "3", "--follow", "--max-wait", "nan"], 2, "'--max-wait'"),
        (["{open}", "{new}", "--samples-per-chunk", "3"], 3, "has not ended; "),
        (["{old}", "{open}", "--samples-per-chunk", "2"], 5, "found one not made by `lazyshard rechunk`"),
        (["{old}", "{open}", "--samples-per-chunk", "3"], 5, "the stream has 2 samples per chunk, asked for 3"),
        (["{old}", "{foreign}", "--samples-per-chunk", "3"], 3, "holds chunk files but no stream.json"),
        (["{nothing}", "{new}", "--samples-per-chunk", "3"], 5, "there is no stream"),
        (["{damaged}", "{new}", "--samples-per-chunk", "3"], 5, "row 0 (byte 0): expected XXH3 "),
    ],
)
def test_refusal(
    options: list[str], code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {name: tmp_path / name for name in ("old", "new", "open", "foreign", "nothing", "damaged")}
    stream(places["old"])
    stream(places["open"], 4, end=False)
    foreign(places["foreign"], b"{}\n")
    places["nothing"].mkdir()
    flip("chunk_00000.jsonl", 3)(stream(places["damaged"]))
    before = {name: contents(place) for name, place in places.items() if name != "new"}
    assert main(["rechunk", *(option.format(**places) for option in options)]) == code
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert shown.err.startswith("lazyshard: error: ")
    assert message in shown.err
    assert {name: contents(place) for name, place in places.items() if name != "new"} == before


def test_copy_that_another_process_makes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ChunkWriter(tmp_path / "new", 3):
        assert main(["rechunk", str(stream(tmp_path / "old")), str(tmp_path / "new"), "--samples-per-chunk", "3"]) == 6
        assert f"process {os.getpid()} on " in capsys.readouterr().err


def test_foreign_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign(tmp_path / "old", b'{"id":0}\r\n{"id":1}', b'{"id":2}', end=True)
    assert main(["rechunk", str(tmp_path / "old"), str(tmp_path / "new"), "--samples-per-chunk", "3"]) == 0
    assert list(StreamReader(tmp_path / "new")) == rows(0, 3)
    assert main(["inspect", str(tmp_path / "new")]) == 0
    delete("chunk_00000.jsonl.completed")(tmp_path / "old")
    capsys.readouterr()
    assert main(["rechunk", str(tmp_path / "old"), str(tmp_path / "other"), "--samples-per-chunk", "3"]) == 3
    assert "chunk 0 is not complete, so nothing tells how many samples a chunk has" in capsys.readouterr().err


def test_help_lists_the_exit_codes() -> None:
    done = lazyshard("rechunk", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    codes = {int(code) for code in re.findall(r"^ +(\d+)  \S", done.stdout, re.MULTILINE)}
    of_others = {exits.UNTRIED, exits.NOT_PROVEN}
    assert codes == {value for value in vars(exits).values() if isinstance(value, int)} - of_others


@pytest.mark.parametrize(("samples", "bar"), [(80, True), (6, False)])
def test_bar_on_a_terminal_where_chunks_are_many(samples: int, bar: bool, tmp_path: Path) -> None:
    old = stream(tmp_path / "old", samples)
    code, shown = on_terminal("rechunk", old, tmp_path / "new", "--samples-per-chunk", 3)
    assert code == 0
    assert ("copying" in shown and "40/40" in shown) is bar
    assert "made: " in shown.replace("\r\n", "\n").rstrip("\n").rpartition("\n")[2]
