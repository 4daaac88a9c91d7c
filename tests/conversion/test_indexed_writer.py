"""IndexedDatasets that Megatron Core writes and we read, and the other way round; killed writers; damaged files."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings

from lazyshard.conversion.indexed import IndexedReader
from lazyshard.conversion.indexed_writer import IndexedWriter
from lazyshard.errors import ExportExists, FileRefused, IndexedInvalid, ProducerLocked
from lazyshard.store import durable
from tests.conversion import megatron_core
from tests.conversion.megatron_core import Content, content, corpora, write
from tests.stream.streams import forked, names


@settings(max_examples=40)
@given(corpora())
def test_read_and_written_as_megatron_core_does(corpus: tuple[str, Any, Any]) -> None:
    dtype, documents, modes = corpus
    megatron_core.module()
    with tempfile.TemporaryDirectory() as folder:
        theirs, ours = Path(folder) / "theirs", Path(folder) / "ours"
        expected = megatron_core.build(theirs, dtype, documents, modes)
        assert content(theirs) == expected
        write(ours, dtype, documents, modes)
        for suffix in (".bin", ".idx"):
            assert Path(f"{ours}{suffix}").read_bytes() == Path(f"{theirs}{suffix}").read_bytes()
        if expected.sequences:
            assert megatron_core.read(ours, multimodal=modes is not None) == expected
        assert sorted(os.listdir(folder)) == ["ours.bin", "ours.idx", "theirs.bin", "theirs.idx"]


DOCUMENTS: Final = [[[1, 2], [3]], [], [[4, 5, 6]], [[]]]


def test_another_type_half_way(tmp_path: Path) -> None:
    prefix = tmp_path / "a"
    with IndexedWriter(prefix, "uint16", has_modes=False) as writer:
        writer.add_sequence(np.array([1, 65535]))
        writer.end_document()
        writer.widen("int32")
        writer.add_sequence(np.array([-7, 70000]))
        writer.end_document()
        writer.finish()
    assert content(prefix) == Content("int32", [[1, 65535], [-7, 70000]], [0, 1, 2], None)
    assert names(tmp_path) == ["a.bin", "a.idx"]


def test_writer_left_before_its_end_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), IndexedWriter(tmp_path / "a", "int32", has_modes=False) as writer:
        writer.add_sequence(np.array([1]))
        raise KeyError
    assert names(tmp_path) == []


def test_two_writers_of_one_name(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a", "int32", has_modes=False):
        with pytest.raises(ProducerLocked, match="a: another process is exporting to it"):
            IndexedWriter(tmp_path / "a", "int32", has_modes=False)
        write(tmp_path / "b", "int32", DOCUMENTS)
    assert names(tmp_path) == ["b.bin", "b.idx"]


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_what_is_there_is_replaced_only_when_told(suffix: str, tmp_path: Path) -> None:
    there = tmp_path / f"a{suffix}"
    there.write_bytes(b"precious")
    with pytest.raises(ExportExists, match=rf"a\{suffix}: is there already; .*--force"):
        IndexedWriter(tmp_path / "a", "int32", has_modes=False)
    assert names(tmp_path) == [there.name]
    assert there.read_bytes() == b"precious"
    write(tmp_path / "a", "int32", DOCUMENTS, replace=True)
    assert content(tmp_path / "a").sequences == [[1, 2], [3], [4, 5, 6], []]


def test_what_came_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a", "int32", has_modes=False) as writer:
        (tmp_path / "a.bin").write_bytes(b"precious")
        with pytest.raises(ExportExists):
            writer.finish()
    assert names(tmp_path) == ["a.bin"]
    assert (tmp_path / "a.bin").read_bytes() == b"precious"


def test_a_link_in_the_place_of_the_temporary_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "data").write_bytes(b"precious")
    (tmp_path / ".a.export").symlink_to("elsewhere")
    with pytest.raises(FileRefused, match="expected a directory, found a link"):
        IndexedWriter(tmp_path / "a", "int32", has_modes=False)
    assert (tmp_path / "elsewhere" / "data").read_bytes() == b"precious"


STEPS: Final = ("create", "write_all", "sync", "rename", "sync_directory", "remove")


def killed_at(step: int, work: Callable[[], None]) -> int:
    """Works in a child that gets SIGKILL in front of a durable step, or half way through if it is a write."""
    left = step

    def wrapped(name: str, original: Callable[..., Any], *arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            if name == "write_all":
                fd, data = arguments
                original(fd, bytes(data)[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)

    def patched() -> None:
        for name in STEPS:
            setattr(durable, name, functools.partial(wrapped, name, getattr(durable, name)))
        work()

    return forked(patched)


@pytest.mark.parametrize("older", [False, True], ids=["new", "in place of an older one"])
def test_killed_at_each_step_and_run_again(older: bool, tmp_path: Path) -> None:
    """Each run is killed a step later than the last, on what that one has left: whole, or not there, all the time."""
    prefix = tmp_path / "a"
    before = Content("int8", [[9]], [0, 1], None)
    expected = Content("int32", [[1, 2], [3], [4, 5, 6], []], [0, 2, 2, 3, 4], None)
    for step in itertools.count():
        for path in (f"{prefix}.bin", f"{prefix}.idx"):
            if older and not os.path.exists(path):
                write(prefix, "int8", [[[9]]], replace=True)
        code = killed_at(step, lambda: write(prefix, "int32", DOCUMENTS, replace=older))
        if (tmp_path / "a.idx").exists():
            assert content(prefix) in ([before, expected] if older else [expected])
        if code == 0:
            break
        assert code == -signal.SIGKILL
        if not older and (tmp_path / "a.idx").exists():
            # It was killed when all was done: from now on the name is taken.
            break
    assert content(prefix) == expected
    assert step >= 15
    write(prefix, "int32", DOCUMENTS, replace=True)
    assert names(tmp_path) == ["a.bin", "a.idx"]


def test_data_left_without_index_are_taken_over_also_twice(tmp_path: Path) -> None:
    """Killed between the two names, then again at the start of the next run: the third one still goes through."""
    prefix = tmp_path / "a"
    steps = itertools.count(14)
    while not (tmp_path / "a.bin").exists():
        assert killed_at(next(steps), lambda: write(prefix, "int32", DOCUMENTS)) == -signal.SIGKILL
    assert not (tmp_path / "a.idx").exists()
    for step in (0, 1, 2, 3, 4, 5, 6, 9):
        assert killed_at(step, lambda: write(prefix, "int32", DOCUMENTS)) == -signal.SIGKILL
    write(prefix, "int32", DOCUMENTS)
    assert content(prefix).sequences == [[1, 2], [3], [4, 5, 6], []]


def test_a_power_cut_finds_the_data_on_the_device_before_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    for name in ("sync", "rename", "sync_directory"):
        original = getattr(durable, name)

        def told(*arguments: Any, name: str = name, original: Any = original) -> Any:
            target = arguments[-1]
            done.append(name if isinstance(target, int) else f"{name} {target.name}")
            return original(*arguments)

        monkeypatch.setattr(durable, name, told)
    write(tmp_path / "a", "int32", DOCUMENTS)
    folder = tmp_path.name
    assert done == [
        *("sync", "sync", "sync_directory .a.export", "sync"),
        *("rename a.bin", f"sync_directory {folder}", "sync"),
        *("rename a.idx", f"sync_directory {folder}", "sync"),
    ]


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    write(tmp_path / "a", "int32", [[[number]] for number in range(1000)])
    return tmp_path / "a"


def test_opening_reads_no_more_of_a_large_file(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    pread = os.pread

    def counted(fd: int, count: int, offset: int) -> bytes:
        sizes.append(count)
        return pread(fd, count, offset)

    monkeypatch.setattr(os, "pread", counted)
    reader = IndexedReader(f"{pair}.idx")
    assert sum(sizes) == 34 + 8 + 8 + 4 + 8
    sizes.clear()
    reader.tokens(400, 3)
    assert sizes == [12]


def test_data_that_were_cut(pair: Path) -> None:
    os.truncate(f"{pair}.bin", 3998)
    with pytest.raises(IndexedInvalid, match=r"sequence 999 within the 3998 bytes of its \.bin file, found 1 tokens"):
        IndexedReader(f"{pair}.idx")


def test_files_that_are_cut_while_they_are_read(pair: Path) -> None:
    reader = IndexedReader(f"{pair}.idx")
    os.truncate(f"{pair}.bin", 10)
    with pytest.raises(IndexedInvalid, match=r"a\.bin: expected 12 bytes at byte 8, found its end at byte 10: the"):
        reader.tokens(8, 3)
    os.truncate(f"{pair}.idx", 2000)
    with pytest.raises(IndexedInvalid, match=r"a\.idx: expected the 20042 bytes that it had, found fewer"):
        reader.sequences(400, 600)


def test_an_index_of_another_name(pair: Path, tmp_path: Path) -> None:
    (tmp_path / "a.idx").rename(tmp_path / "index")
    with pytest.raises(IndexedInvalid, match=r"index: expected a name that ends in \.idx"):
        IndexedReader(tmp_path / "index")


def test_data_that_are_no_file(pair: Path, tmp_path: Path) -> None:
    (tmp_path / "a.bin").unlink()
    with pytest.raises(FileNotFoundError):
        IndexedReader(f"{pair}.idx")
    os.mkfifo(tmp_path / "a.bin")
    with pytest.raises(FileRefused):
        IndexedReader(f"{pair}.idx")
