"""The folder of kept samples: bounded, read by many, changed by anybody, and never a wrong sample."""

import contextlib
import errno
import itertools
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard.data.encode_cache import FOLDER, KEPT_SUFFIX, KeptSamples
from lazyshard.errors import FileRefused
from lazyshard.format import arrays
from lazyshard.format.arrays import Kept, encode_sample, slot_at
from lazyshard.store import durable
from tests.harness.processes.kill_points import KillPoint, When
from tests.stream.streams import forked, open_descriptors, raised, running, wait_until

ROWS: Final = 4
LINE: Final = 99
PLENTY: Final = 1 << 20


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def record(chunk: int, row: int, size: int = 0) -> bytes:
    return encode_sample({"id": [chunk, row], "x": "x" * size}, key(chunk), row, LINE)


def keep(kept: KeptSamples, chunk: int, row: int, size: int = 0) -> bool:
    return kept.keep(key(chunk), ROWS, row, LINE, record(chunk, row, size))


def find(kept: KeptSamples, chunk: int, row: int) -> Any:
    found = kept.find(key(chunk), ROWS, row, LINE)
    assert found is None or isinstance(found, Kept)
    return None if found is None else found.sample["id"]


def taken(directory: Path) -> int:
    return sum(path.stat().st_size for path in (directory / FOLDER).glob(f"*{KEPT_SUFFIX}"))


def refused(kept: KeptSamples) -> None:
    for call in (lambda: find(kept, 1, 2), lambda: keep(kept, 1, 2), lambda: kept.claim(key(1), 2)):
        raised(FileRefused, call)


def test_files_are_made_by_the_umask_but_not_for_all(tmp_path: Path) -> None:
    for umask, folder_mode, file_mode in ((0o027, 0o750, 0o640), (0, 0o775, 0o666)):
        old = os.umask(umask)
        try:
            kept = KeptSamples(tmp_path / str(umask), PLENTY)
            kept.claim(key(1), 0)
            assert keep(kept, 1, 0) and keep(KeptSamples(tmp_path / str(umask), PLENTY), 1, 0)
        finally:
            os.umask(old)
        folder = tmp_path / str(umask) / FOLDER
        assert {stat.S_IMODE(path.stat().st_mode) for path in (folder.parent, folder)} == {folder_mode}
        assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {file_mode}
        assert sorted(path.name for path in folder.iterdir()) == [".claims", ".room", f"{key(1).hex()}{KEPT_SUFFIX}"]
        # Another process finds what one has kept, and does not keep it again.
        assert taken(folder.parent) == slot_at(ROWS) + len(record(1, 0))


def test_directory_that_others_may_change_is_refused(tmp_path: Path) -> None:
    for mode, taken_as_it_is in {0o700: 1, 0o755: 1, 0o775: 1, 0o1777: 1, 0o777: 0, 0o757: 0}.items():
        named = tmp_path / oct(mode)
        named.mkdir()
        named.chmod(mode)
        if taken_as_it_is:
            assert keep(KeptSamples(named, PLENTY), 1, 2)
            assert find(KeptSamples(named, PLENTY), 1, 2) == [1, 2]
        else:
            refused(KeptSamples(named, PLENTY))
            assert list(named.iterdir()) == []
    folder = tmp_path / FOLDER
    folder.mkdir()
    folder.chmod(0o777)
    refused(KeptSamples(tmp_path, PLENTY))
    folder.rmdir()
    folder.symlink_to("/tmp")
    refused(KeptSamples(tmp_path, PLENTY))


def test_directory_of_another_user_but_root_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = tmp_path / "named"
    named.mkdir(mode=0o755)
    owner = 4242
    real, seen = Path.stat, Path.lstat

    def owned(path: Path, found: os.stat_result) -> os.stat_result:
        return os.stat_result([*found[:4], owner, *found[5:]]) if path.name in ("named", "link") else found

    monkeypatch.setattr(Path, "stat", lambda path, **more: owned(path, real(path, **more)))
    monkeypatch.setattr(Path, "lstat", lambda path: owned(path, seen(path)))
    refused(KeptSamples(named, PLENTY))
    owner = 0
    assert keep(KeptSamples(named, PLENTY), 1, 2)
    # A link of somebody else's can be led elsewhere at any moment.
    (tmp_path / "link").symlink_to(named)
    assert find(KeptSamples(tmp_path / "link", PLENTY), 1, 2) == [1, 2]
    monkeypatch.setattr(Path, "stat", real)
    owner = 4242
    refused(KeptSamples(tmp_path / "link", PLENTY))


def test_nothing_else_is_ever_written_to(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_bytes(b"mine")
    puts: list[Callable[[Path, Path], object]] = [os.link, os.symlink, lambda mine, path: os.mkfifo(path)]
    for number, put in enumerate(puts):
        for name in (".room", ".claims", f"{key(1).hex()}{KEPT_SUFFIX}"):
            kept = KeptSamples(tmp_path / f"{number}{name}", PLENTY)
            kept.folder.mkdir(parents=True)
            put(mine, kept.folder / name)
            with pytest.raises(OSError, match=name):
                kept.claim(key(1), 0) if name == ".claims" else keep(kept, 1, 0)
    assert mine.read_bytes() == b"mine"


def test_bound_is_kept_and_what_was_used_longest_ago_goes(tmp_path: Path) -> None:
    # Each chunk takes 160 + 4 * 1,000 bytes and more; five fit, with the spare part.
    kept, most = KeptSamples(tmp_path, 24_000), 24_000
    now = time.time_ns()
    for chunk in range(1, 10):
        for row in range(ROWS):
            assert keep(kept, chunk, row, 1000)
            assert taken(tmp_path) <= most
        # Times that do not depend on the clock of the filesystem.
        path = tmp_path / FOLDER / f"{key(chunk).hex()}{KEPT_SUFFIX}"
        os.utime(path, ns=(now, now - (1_000_000_000 if chunk == 1 else 2_000_000_000 - chunk)))
    there = [chunk for chunk in range(1, 10) if find(KeptSamples(tmp_path, most), chunk, 0) is not None]
    # The first one was used later than the ones behind it.
    assert there == [1, 6, 7, 8, 9]


def test_what_can_never_fit_puts_nothing_out_and_other_files_do_not_count(tmp_path: Path) -> None:
    kept = KeptSamples(tmp_path, 2000)
    assert keep(kept, 1, 0)
    others = [tmp_path / FOLDER / name for name in ("notes.txt", f"{'g' * 32}{KEPT_SUFFIX}", f"x{KEPT_SUFFIX}")]
    for other in others:
        other.write_bytes(bytes(5000))
    assert not keep(kept, 2, 0, 2000)
    assert find(kept, 1, 0) == [1, 0]
    # The file that is added to does not go for its own rows.
    assert keep(kept, 1, 1, 1500)
    assert not keep(kept, 1, 2, 1500)
    assert [find(kept, 1, row) for row in range(3)] == [[1, 0], [1, 1], None]
    assert keep(kept, 3, 0, 1500)
    assert [find(kept, chunk, 0) for chunk in (1, 3)] == [None, [3, 0]]
    assert all(other.stat().st_size == 5000 for other in others)


def test_room_is_free_although_a_reader_has_the_file_open(tmp_path: Path) -> None:
    reader, kept = KeptSamples(tmp_path, 3000), KeptSamples(tmp_path, 3000)
    assert keep(kept, 1, 0, 2000)
    assert find(reader, 1, 0) == [1, 0]
    (path,) = (tmp_path / FOLDER).glob(f"*{KEPT_SUFFIX}")
    with path.open("rb") as held:
        assert keep(kept, 2, 0, 2000)
        assert os.fstat(held.fileno()).st_size == 0
    assert find(reader, 1, 0) is None
    assert (reader.damaged, kept.damaged) == (0, 0)
    # Kept anew, in another file: who had the old one open finds it, and who writes does not write to the old one.
    assert keep(reader, 1, 0, 2000)
    assert [find(reader, 1, 0), find(kept, 1, 0), find(kept, 2, 0)] == [[1, 0], [1, 0], None]


def test_count_that_cannot_be_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, count in enumerate((b"", b"x", bytes(24), b"y" * 100, None)):
        here = tmp_path / str(number)
        assert keep(KeptSamples(here, 3000), 1, 0, 2000)
        file = here / FOLDER / ".room"
        before = file.read_bytes()
        assert keep(KeptSamples(here, 30_000), 2, 0, 2000)
        # After a restart of the machine: a count that did not come onto the device any more.
        file.write_bytes(before if count is None else count)
        if count is None:
            monkeypatch.setattr("lazyshard.data.encode_cache.this_boot", lambda: "anew")
        assert keep(KeptSamples(here, 4500), 3, 0, 2000)
        assert taken(here) <= 4500


def whole(tmp_path: Path) -> tuple[Path, bytes]:
    """Makes a small file of two rows of three, and returns it with its bytes."""
    kept = KeptSamples(tmp_path, PLENTY)
    for row in (0, 2):
        keep(kept, 1, row)
    (path,) = (tmp_path / FOLDER).glob(f"*{KEPT_SUFFIX}")
    return path, path.read_bytes()


def damaged(data: bytes) -> Iterator[bytes]:
    """Yields a file changed at every byte, cut before each, and with each stretch of it somewhere else."""
    for at in range(len(data)):
        for change in (1, 0x80, 0xFF):
            yield data[:at] + bytes([data[at] ^ change]) + data[at + 1 :]
        yield data[:at]
        yield data[:at] + bytes(len(data) - at)
    slots = [data[64 + row * 24 : 88 + row * 24] for row in range(ROWS)]
    for one in slots:
        for other in slots:
            yield data[:64] + one + other + other + one + data[64 + 24 * ROWS :]


@pytest.mark.parametrize("digests", [True, False])
def test_damage_is_never_a_wrong_sample(digests: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something that was never kept comes back from a file damaged in any of these ways only without the digests."""
    if not digests:
        monkeypatch.setattr(arrays, "_digest", lambda data: 0)
    path, data = whole(tmp_path)
    wrong = 0
    for one in damaged(data):
        path.write_bytes(one)
        kept = KeptSamples(tmp_path, PLENTY)
        for row in range(ROWS):
            try:
                found = find(kept, 1, row)
            except (KeyError, TypeError, AssertionError):
                found = "something else"
            wrong += found not in (None, [1, row]) or (found is not None and row not in (0, 2))
        if wrong:
            break
    assert (wrong == 0) is digests


WRITE = os.pwrite
MOST: Final = 5000


def fill(directory: Path) -> None:
    """Keeps rows of three chunks, of which two fit, unless the right ones are kept already."""
    kept = KeptSamples(directory, MOST)
    for chunk in (1, 2, 3):
        for row in range(2):
            before = find(kept, chunk, row)
            if before is not None:
                assert before == [chunk, row]
            elif kept.claim(key(chunk), row):
                keep(kept, chunk, row, 950)
                kept.release(key(chunk), row)
            else:
                raise AssertionError(f"somebody still holds row {row} of chunk {chunk}")


@pytest.mark.few(1)
@pytest.mark.parametrize("when", ["before", "half", "after"])
def test_killed_at_any_call_the_next_process_goes_on(tmp_path: Path, when: When) -> None:
    for kills in itertools.count():
        here = tmp_path / str(kills)

        def work(number: int = kills + 1, here: Path = here) -> None:
            KillPoint(number, when, among=("pwrite", "ftruncate", "unlink", "mkdir")).install()
            fill(here)

        ended = forked(work)
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
        for _ in range(2):
            fill(here)
            assert taken(here) <= MOST, f"killed at call {kills}: more than may be taken"
        assert find(KeptSamples(here, MOST), 3, 1) == [3, 1], f"killed at call {kills}: nothing is kept"
    assert kills >= 3 * 6


def test_lock_of_a_stopped_process_holds_nobody_up_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "LOCK_S", 0.01)
    kept = KeptSamples(tmp_path, PLENTY)
    assert keep(kept, 1, 0)
    with contextlib.ExitStack() as until_the_end:
        with durable.locked(tmp_path / FOLDER / ".room") as locked:
            assert locked is not None
            assert not keep(kept, 1, 1)
            assert find(kept, 1, 0) == [1, 0]
            # A fork does not keep the lock of its parent.
            until_the_end.enter_context(running(signal.pause))
        # For a while it does not even try, so that not each sample waits.
        assert not keep(kept, 1, 1)
        assert keep(KeptSamples(tmp_path, PLENTY), 1, 1)


def test_few_files_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyshard.data.encode_cache._OPEN_FILES", 3)
    kept = KeptSamples(tmp_path, PLENTY)
    keep(kept, 0, 0)
    before = open_descriptors()
    for chunk in range(20):
        keep(kept, chunk, 0)
        assert find(kept, chunk, 0) == [chunk, 0]
    assert open_descriptors() <= before + 2
    del kept
    wait_until(lambda: open_descriptors() < before, "all are closed")


def test_device_that_refuses_leaves_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, beginning = KeptSamples(tmp_path, PLENTY), arrays.encode_head(key(1), ROWS)
    for row, fails in ((0, beginning), (1, record(1, 1)[:16])):
        size = taken(tmp_path)

        def refused(fd: int, data: bytes, offset: int, fails: bytes = fails) -> int:
            if not bytes(data).startswith(fails):
                return WRITE(fd, data, offset)
            WRITE(fd, bytes(data)[: len(data) // 2], offset)
            raise OSError(errno.ENOSPC, "no space")

        with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
            patch.setattr(os, "pwrite", refused)
            keep(kept, 1, row)
        assert not row or taken(tmp_path) == size
        assert [find(kept, 1, one) for one in range(2)] == [[1, 0] if row else None, None]
        assert keep(kept, 1, row)
        assert [find(one, 1, row) for one in (kept, KeptSamples(tmp_path, PLENTY))] == [[1, row]] * 2
