"""Source files that are not there, are something else, or have changed between two runs."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lazyshard_producer.cli import main
from tests.harness.processes.environment import environment
from tests.harness.processes.producing import (
    assert_one_line,
    chunk_files,
    ids,
    rows,
    run_arguments,
    seal,
    sources_in_seals,
)


def missing(path: Path) -> None:
    pass


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (missing, "no such file"),
    "a link to nothing": (dangling, "no such file"),
    "a loop of links": (loop, "symbolic links"),
    "a directory": (Path.mkdir, "found a directory"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_plain_file_is_refused(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, reason = KINDS[kind]
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_bytes(rows(0, 3))
    make(bad)
    assert main(run_arguments(tmp_path / "out", [good, bad])) == 4
    assert_one_line(capsys.readouterr().err, str(bad), reason)
    assert not (tmp_path / "out").exists()


def test_a_device_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(run_arguments(tmp_path / "out", [Path("/dev/null")])) == 4
    assert_one_line(capsys.readouterr().err, "/dev/null: expected a plain file", "found a device")


def test_a_link_to_a_plain_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(rows(0, 3))
    (tmp_path / "b").symlink_to("a")
    assert main(run_arguments(tmp_path / "out", [tmp_path / "b"])) == 0
    assert ids(tmp_path / "out") == [0, 1, 2]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to run the command as somebody else")
def test_an_unreadable_file_is_refused_with_path_and_uid(tmp_path: Path) -> None:
    source = Path("/dev/shm") / f"lazyshard-unreadable-{os.getpid()}.jsonl"
    source.write_bytes(rows(0, 3))
    source.chmod(0)
    # The package and the interpreter may lie where only root can look, so the uid changes after all is loaded.
    code = (
        "import contextlib, io, os, sys; from lazyshard_producer.cli import main\n"
        "with contextlib.redirect_stderr(io.StringIO()):\n"
        "    main(['run', '--source', '/dev/null', '--out', 'nowhere', '--samples-per-chunk', '1'])\n"
        "os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534); sys.exit(main())"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, *run_arguments(Path("/dev/shm/nowhere"), [source])],
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        source.unlink()
    assert done.returncode == 4, done.stderr
    assert_one_line(done.stderr, str(source), "uid 65534 may not read it")


def test_the_same_file_twice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_bytes(rows(0, 3))
    b.hardlink_to(a)
    assert main(run_arguments(tmp_path / "out", [a, b])) == 4
    assert_one_line(capsys.readouterr().err, f"{b}: expected every source once, found the same file as {a}")


def test_a_source_inside_the_stream_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").write_bytes(rows(0, 3))
    assert main(run_arguments(tmp_path, [tmp_path / "a"])) == 4
    assert_one_line(capsys.readouterr().err, "outside the stream's directory")
    assert os.listdir(tmp_path) == ["a"]


class Halfway:
    """A stream of 10 rows a chunk with 2 chunks, stopped by a bad line in the second file 4 rows later."""

    def __init__(self, folder: Path) -> None:
        self.a, self.b, self.out = folder / "a", folder / "b", folder / "out"
        self.a.write_bytes(rows(0, 15))
        self.b.write_bytes(rows(15, 24) + b"bad\n" + rows(24, 40))
        assert main(run_arguments(self.out, [self.a, self.b])) == 3
        self.before = chunk_files(self.out)

    def mend(self) -> None:
        self.b.write_bytes(rows(15, 40))

    def run(self, *sources: Path) -> int:
        return main(run_arguments(self.out, sources or (self.a, self.b)))


@pytest.fixture
def halfway(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Halfway:
    stream = Halfway(tmp_path)
    assert len(stream.before) == 2
    capsys.readouterr()
    return stream


def test_a_mended_line_behind_the_committed_part_is_accepted(halfway: Halfway) -> None:
    halfway.mend()
    assert halfway.run() == 0
    assert ids(halfway.out) == list(range(40))


@pytest.mark.parametrize(
    "change",
    ["first byte", "last committed byte", "truncated", "other file", "removed", "swapped", "one fewer", "put in front"],
)
def test_changed_sources_are_refused(
    change: str, halfway: Halfway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    halfway.mend()
    a, b = halfway.a, halfway.b
    sources, reason = [a, b], ""
    if change == "first byte":
        a.write_bytes(b" " + a.read_bytes()[1:])
        reason = f"{a}: not the file whose rows are published: expected XXH3 "
    elif change == "last committed byte":
        data = bytearray(b.read_bytes())
        data[len(rows(15, 20)) - 1] = ord(" ")
        b.write_bytes(data)
        reason = f"{b}: not the file whose rows are published: expected XXH3 "
    elif change == "truncated":
        a.write_bytes(rows(0, 14))
        reason = f"{a}: expected at least the {len(rows(0, 15))} bytes that were read, found {len(rows(0, 14))}"
    elif change == "other file":
        b.write_bytes(rows(115, 140))
        reason = f"{b}: not the file"
    elif change == "removed":
        a.unlink()
        reason = f"{a}: expected a readable file, found no such file"
    elif change == "swapped":
        sources = [b, a]
        reason = f"source 1 was {a}, now it is {b}"
    elif change == "one fewer":
        sources = [a]
        reason = f"source 2 was {b}, now it is missing"
    else:
        (tmp_path / "c").write_bytes(rows(0, 1))
        sources = [tmp_path / "c", a, b]
        reason = f"source 1 was {a}, now it is {tmp_path / 'c'}"
    assert halfway.run(*sources) == 4
    assert_one_line(capsys.readouterr().err, reason)
    assert chunk_files(halfway.out) == halfway.before
    assert not (halfway.out / "stream.end").exists()


def test_grown_and_appended_sources_are_read(halfway: Halfway, tmp_path: Path) -> None:
    halfway.mend()
    halfway.a.write_bytes(rows(0, 15) + rows(100, 102))
    halfway.b.write_bytes(rows(15, 45))
    (tmp_path / "c").write_bytes(rows(200, 203))
    assert halfway.run(halfway.a, halfway.b, tmp_path / "c") == 0
    assert ids(halfway.out) == [*range(20), 100, 101, *range(20, 45), 200, 201, 202]


def test_the_seal_says_where_every_source_stands(halfway: Halfway) -> None:
    first, second = seal(halfway.out, 1)["source"]["sources"]
    assert (first["path"], first["offset"], first["line"]) == (str(halfway.a), len(rows(0, 15)), 15)
    assert (second["path"], second["offset"], second["line"]) == (str(halfway.b), len(rows(15, 20)), 5)
    assert seal(halfway.out, 0)["source"]["sources"][1] == {"kind": None, "path": str(halfway.b)}


def test_the_last_shorter_chunk_has_its_position_too(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_bytes(rows(0, 13))
    b.write_bytes(b"\n")
    assert main(run_arguments(tmp_path / "out", [a, b])) == 0
    last = sources_in_seals(tmp_path / "out")[-1]["sources"]
    assert [entry["offset"] for entry in last] == [a.stat().st_size, 1]


def test_a_stream_of_another_program_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lazyshard import ChunkWriter

    writer = ChunkWriter(tmp_path / "out", 1)
    writer.write({"id": 0})
    writer.close(end=False)
    (tmp_path / "a").write_bytes(rows(0, 3))
    assert main(run_arguments(tmp_path / "out", [tmp_path / "a"], 1)) == 5
    assert_one_line(capsys.readouterr().err, "another program wrote the stream")
    assert ids(tmp_path / "out") == [0]


def snapshot(out: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.iterdir() if path.is_file()}


def test_an_ended_stream_is_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, out = tmp_path / "a", tmp_path / "b", tmp_path / "out"
    a.write_bytes(rows(0, 13))
    assert main(run_arguments(out, [a])) == 0
    before = snapshot(out)
    out.chmod(stat.S_IRUSR | stat.S_IXUSR)
    capsys.readouterr()

    assert main(run_arguments(out, [a])) == 0
    captured = capsys.readouterr()
    assert captured.err == f"already ended: {out} holds 13 samples in 2 chunks; nothing to do\n"
    assert captured.out == ""

    a.write_bytes(rows(0, 14))
    b.write_bytes(rows(14, 15))
    assert main(run_arguments(out, [a, b])) == 5
    more, new = len(rows(13, 14)), len(rows(14, 15))
    told = f"not in it: {a} ({more} bytes behind byte {len(rows(0, 13))}), {b} ({new} bytes). Nothing can be added"
    assert_one_line(capsys.readouterr().err, told)

    a.unlink()
    assert main(run_arguments(out, [a])) == 0
    assert main(run_arguments(out, [b])) == 5
    capsys.readouterr()

    assert main(run_arguments(out, [a], 5)) == 5
    assert_one_line(capsys.readouterr().err, "10 samples per chunk, asked for 5")
    assert snapshot(out) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--source", "web/*.jsonl"), "web/*.jsonl: expected files that match, found none"),
        (("--follow", "nowhere"), "nowhere: expected a readable directory, found no such file or directory"),
        (("--follow", "a.jsonl"), "a.jsonl: expected a directory, found something else; give a file with --source"),
        (("--source", "."), ".: expected a file, found a directory"),
    ],
)
def test_what_is_not_there_is_named_for_what_it_should_be(
    arguments: tuple[str, str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_bytes(rows(0, 3))
    assert main(["run", *arguments, "--out", "out", "--samples-per-chunk", "2"]) == 4
    assert_one_line(capsys.readouterr().err, words)
