"""Source files that are not there, are something else, or have changed between two runs."""

import os
from pathlib import Path

import pytest

from lazyshard_producer.cli import main
from tests.harness.processes.commands import Commands
from tests.harness.processes.producing import assert_one_line, chunk_files, rows, run_arguments


def test_what_is_no_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("dangling").symlink_to("nowhere")
    Path("loop").symlink_to("loop")
    Path("a.jsonl").write_bytes(rows(0, 3))
    Path("b.jsonl").write_bytes(rows(0, 3))
    for option, path, says in (
        ("--source", "missing", "missing: expected a readable file, found no such file"),
        ("--source", "loop", "symbolic links"),
        ("--source", "folder", "folder: expected a file, found a directory"),
        ("--source", "/dev/null", "/dev/null: expected a plain file"),
        ("--source", "web/*.jsonl", "web/*.jsonl: expected files that match"),
        ("--follow", "nowhere", "nowhere: expected a readable directory"),
        ("--follow", "b.jsonl", "b.jsonl: expected a directory"),
    ):
        assert main(run_arguments(Path("out"), [Path("a.jsonl")], 2, option, path)) == 4
        assert_one_line(capsys.readouterr().err, says)
    assert not Path("out").exists()


def main_as_nobody(arguments: list[str]) -> int:
    # What a refusal imports may lie where only root can look.
    main(["run", "--source", "/dev/null", "--out", "nowhere", "--samples-per-chunk", "1"])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    return main(arguments)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to run the command as somebody else")
def test_an_unreadable_file_is_refused_with_path_and_uid(nursery: Commands) -> None:
    source = Path("/dev/shm") / f"lazyshard-unreadable-{os.getpid()}.jsonl"
    source.write_bytes(rows(0, 3))
    source.chmod(0)
    try:
        ended = nursery.call(main_as_nobody, run_arguments(Path("/dev/shm/nowhere"), [source]))
    finally:
        source.unlink()
    assert ended.status == 4, ended.said
    assert f"error: {source}: " in ended.said and "uid 65534" in ended.said


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "incoming"
    path.mkdir()
    (path / "a.jsonl").write_bytes(rows(0, 10))
    (path / "a.csv").write_bytes(rows(10, 20))
    (path / "_END").touch()
    return path


def test_sources_that_are_one_or_are_in_the_stream(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_bytes(rows(0, 10))
    tables, table = tmp_path / "tables", tmp_path / "tables" / "a.parquet"
    tables.mkdir()
    parquet.write_table(pyarrow.Table.from_pylist([{"id": 0}]), table)
    (tmp_path / "twice").hardlink_to(directory / "a.csv")
    (tmp_path / "link").symlink_to(directory)
    mixed = ("--follow", directory, "--weight", 1, "--source", f"{tmp_path}/link/a.jsonl", "--weight", 1)
    once, outside = "every source once", "outside the stream's directory"
    for out, sources, says in (
        ("out", ("--source", tables, table), f"{table}: expected {once}"),
        ("out", ("--source", directory / "a.csv", tmp_path / "twice"), f"{tmp_path}/twice: expected {once}"),
        ("out", mixed, f"link/a.jsonl: expected {once}"),
        ("out", ("--source", "a", "a"), f"a: expected {once}, found the same file as a"),
        ("incoming", ("--follow", directory), outside),
        ("incoming", ("--source", directory / "a.csv"), outside),
    ):
        assert main(run_arguments(tmp_path / out, [], 5, *sources)) == 4
        assert_one_line(capsys.readouterr().err, says)
    assert not (tmp_path / "out").exists()
    assert sorted(path.name for path in directory.iterdir()) == ["_END", "a.csv", "a.jsonl"]


class Halfway:
    """A stream of 10 rows a chunk with 2 chunks, stopped by a bad line 4 rows later; it is mended."""

    def __init__(self, folder: Path) -> None:
        self.a, self.b, self.out = folder / "a", folder / "b", folder / "out"
        self.a.write_bytes(rows(0, 15))
        self.b.write_bytes(rows(15, 24) + b"bad\n" + rows(24, 40))
        assert main(run_arguments(self.out, [self.a, self.b])) == 3
        self.before = chunk_files(self.out)
        assert len(self.before) == 2
        self.b.write_bytes(rows(15, 40))

    def run(self, *sources: Path) -> int:
        return main(run_arguments(self.out, sources or (self.a, self.b)))


@pytest.fixture
def halfway(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Halfway:
    stream = Halfway(tmp_path)
    capsys.readouterr()
    return stream


@pytest.mark.parametrize(
    ("changed", "data", "order", "says"),
    [
        ("a", b" " + rows(0, 15)[1:], "ab", "{a}: not the file"),  # the first byte
        ("b", rows(15, 20)[:-1] + b" " + rows(20, 40), "ab", "{b}: not the file"),  # the last committed byte
        ("b", rows(115, 140), "ab", "{b}: not the file"),
        ("a", rows(0, 14), "ab", f"{{a}}: expected at least the {len(rows(0, 15))} bytes"),
        ("a", None, "ab", "{a}: expected a readable file"),
        ("c", rows(0, 1), "ba", "source 1 was {a}, now it is {b}"),
        ("c", rows(0, 1), "cab", "source 1 was {a}, now it is {c}"),
    ],
)
def test_changed_sources_are_refused(
    changed: str, data: bytes | None, order: str, says: str, halfway: Halfway, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {name: halfway.a.with_name(name) for name in "abc"}
    if data is None:
        paths[changed].unlink()
    else:
        paths[changed].write_bytes(data)
    assert halfway.run(*(paths[name] for name in order)) == 4
    assert_one_line(capsys.readouterr().err, says.format(**paths))
    assert chunk_files(halfway.out) == halfway.before
    assert not (halfway.out / "stream.end").exists()
