"""Deleting old chunks stopped at every step, by a kill and by a power cut, and what the next producer makes of it."""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import signal
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard import ChunkWriter, StreamReader
from lazyshard.errors import ChunkRetired, LazyShardError
from lazyshard.format.names import HEAD_RESERVE, arrays_name, chunk_name, seal_name, tokens_name
from lazyshard.format.records import Retired
from lazyshard.store import durable
from lazyshard.stream import read_retired, retire
from lazyshard.stream.retire import list_kept
from tests.harness.disks import fast_folder
from tests.harness.tally import Violation
from tests.harness.writers.crashes import WHEN, Killer
from tests.stream import arrays
from tests.stream.streams import forked, names, needs_root, rows

pytestmark = pytest.mark.full
CHUNKS: Final = 6
GONE: Final = 4
"""Chunks of two rows, of which so many are deleted, in two passes."""

Files = dict[str, bytes]


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    with fast_folder(tmp_path) as directory:
        yield directory


def live(directory: Path) -> Files:
    """A stream that goes on, with measured lengths; returns the files of its chunks."""
    with pytest.raises(KeyboardInterrupt), ChunkWriter(directory, 2) as writer:
        for row in rows(0, 2 * CHUNKS):
            writer.write(row, source=row["id"] + 1)
        raise KeyboardInterrupt
    for chunk in range(CHUNKS):
        (directory / tokens_name(chunk)).write_bytes(b"{}")
    return {path.name: path.read_bytes() for path in directory.glob("chunk_*")}


def both_passes(directory: Path) -> None:
    retire.retire(directory, GONE - 1, CHUNKS)
    retire.retire(directory, GONE, CHUNKS)


def check(directory: Path, files: Files) -> int:
    """Checks what every instant must keep; returns the first chunk that counts."""
    mark = read_retired(directory)
    for chunk in range(mark, CHUNKS):
        for name in (chunk_name(chunk), seal_name(chunk), tokens_name(chunk)):
            path = directory / name
            if not path.exists() or path.read_bytes() != files[name]:
                raise Violation(f"{name} is gone or changed, and retired are only the chunks below {mark}")
    head = (directory / "head.json").read_bytes()
    try:
        for _ in range(2):
            reader = StreamReader(directory, max_wait=0)
            if reader.seen.samples != 2 * CHUNKS:
                raise Violation(f"a reader is told of {reader.seen.samples} samples")
            _check_samples(reader, mark)
            # And by the listing.
            (directory / "head.json").unlink(missing_ok=True)
    except LazyShardError as error:
        raise Violation(f"a reader died: {type(error).__name__}: {error}") from error
    (directory / "head.json").write_bytes(head)
    return mark


def _check_samples(reader: StreamReader, mark: int) -> None:
    for sample in range(2 * CHUNKS):
        try:
            row = reader.read(sample)
        except ChunkRetired:
            if sample // 2 >= mark:
                raise Violation(f"sample {sample} is called retired, the mark is {mark}") from None
            continue
        if row != {"id": sample}:
            raise Violation(f"sample {sample} is {row}")


def go_on(directory: Path, files: Files) -> None:
    """The next producer opens the stream, clears what was left, and finishes it."""
    mark = check(directory, files)
    with ChunkWriter(directory) as writer:
        if (writer.published_samples, writer.source) != (2 * CHUNKS, 2 * CHUNKS):
            raise Violation(f"goes on from {writer.source} with {writer.published_samples} published")
        if check(directory, files) != mark:
            raise Violation("opening the stream has retired chunks")
        listing = list_kept(directory)
        own = (writer.check_owner(), writer.check_owner() / HEAD_RESERVE)
        temporary = [str(path) for path in (directory / ".tmp").rglob("*") if path not in own]
        if listing.leftovers or listing.first != mark or temporary:
            raise Violation(f"left over: {listing.leftovers} and {temporary}")
        both_passes(directory)
        if list_kept(directory).first != GONE:
            raise Violation("could not be gone on with")
        writer.write({"id": 2 * CHUNKS}, source=2 * CHUNKS + 1)
    reader = StreamReader(directory)
    kept = [reader.read(sample) for sample in range(2 * GONE, 2 * CHUNKS + 1)]
    if kept != rows(2 * GONE, 2 * CHUNKS + 1) or not reader.seen.ended:
        raise Violation(f"in the end there is {kept}")
    expected = {"stream.json", "head.json", "stream.end", "stream.owner", "retired.json", ".producer.lock"}
    expected |= {name(chunk) for chunk in range(GONE, CHUNKS + 1) for name in (chunk_name, seal_name)}
    expected |= {tokens_name(chunk) for chunk in range(GONE, CHUNKS)}
    if set(names(directory)) - {"cursors"} != expected:
        raise Violation(f"in the end there are {names(directory)}")


def killed(at: int, when: str, work: Callable[[], object], mutant: Callable[[], None] | None = None) -> bool:
    """Does the work in a fork that kills itself at a durable step; returns whether there was such a step."""

    def child() -> None:
        if mutant is not None:
            mutant()
        Killer(at, when).install()
        work()

    code = forked(child)
    if code not in (0, -signal.SIGKILL):
        raise Violation(f"exit code {code}")
    return code != 0


def sweep(root: Path, when: str, mutant: Callable[[], None] | None = None) -> int:
    """Kills at every step in turn; returns at how many."""
    for at in itertools.count(1):
        directory = root / f"{when}_{at}"
        files = live(directory)
        if not killed(at, when, lambda directory=directory: both_passes(directory), mutant):  # type: ignore[misc]
            return at - 1
        go_on(directory, files)
    raise AssertionError("never done")


@pytest.mark.parametrize("when", ["before", "after"])
def test_deleting_chunks_with_arrays_killed_at_any_step_leaves_none_of_their_files(when: str, root: Path) -> None:
    for at in itertools.count(1):
        directory = arrays.produce(root / f"{when}_{at}", 2 * CHUNKS, end=False)
        if not killed(at, when, lambda directory=directory: both_passes(directory)):  # type: ignore[misc]
            break
        ChunkWriter(directory, arrays=True).close(end=False)
        mark = read_retired(directory)
        expected = {name(chunk) for chunk in range(mark, CHUNKS) for name in (arrays_name, chunk_name, seal_name)}
        assert {name for name in names(directory) if name.startswith("chunk_")} == expected
        reader = StreamReader(directory, max_wait=0)
        found = [arrays.values(reader.read(sample)) for sample in range(2 * mark, 2 * CHUNKS)]
        assert found == arrays.expected(2 * mark, 2 * CHUNKS)
    assert at > 20


@pytest.mark.parametrize("when", WHEN)
def test_deleting_killed_at_any_step_loses_nothing_above_the_mark(when: str, root: Path) -> None:
    assert sweep(root, when) > 20


def test_next_producer_killed_at_any_step_while_it_clears_up_gets_through(root: Path) -> None:
    for at in itertools.count(1):
        directory = root / f"stream_{at}"
        files = live(directory)
        # Half of it is deleted when the first one dies.
        assert killed(12, "before", lambda: retire.retire(directory, GONE, CHUNKS))  # noqa: B023
        if not killed(at, WHEN[at % 3], lambda: ChunkWriter(directory).close(end=False)):  # noqa: B023
            break
        go_on(directory, files)
    assert at > 15, "the steps were not met"


def test_harness_detects_files_that_go_before_the_mark(root: Path) -> None:
    def mutant() -> None:
        write_mark = retire._write_mark

        def late(directory: Path, folder: Path | None, mark: Retired) -> None:
            for chunk in range(mark.chunks_before):
                retire.remove(directory / seal_name(chunk))  # type: ignore[attr-defined]
            write_mark(directory, folder, mark)

        retire._write_mark = late

    with pytest.raises(Violation):
        sweep(root, "after", mutant)


def test_any_files_that_a_power_cut_brings_back_are_cleared(root: Path) -> None:
    files = live(root / "stream")
    retire.retire(root / "stream", 2, CHUNKS)
    gone = sorted(set(files) - set(names(root / "stream")))
    assert len(gone) == 6
    for back in itertools.chain.from_iterable(itertools.combinations(gone, size) for size in range(7)):
        for name in back:
            (root / "stream" / name).write_bytes(files[name])
        assert check(root / "stream", files) == 2
        ChunkWriter(root / "stream").close(end=False)
        assert set(names(root / "stream")).isdisjoint(gone)
    go_on(root / "stream", files)


@pytest.fixture
def device(root: Path) -> Iterator[Path]:
    """A filesystem of its own, on an image; returns where it is mounted."""
    image, point = root / "image", root / "mount"
    point.mkdir()
    with open(image, "wb") as file:
        file.truncate(16 << 20)
    maker = shutil.which("mkfs.ext4", path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin")))
    if maker is None:
        pytest.skip("mkfs.ext4 is not installed")
    made = subprocess.run([maker, "-q", image], capture_output=True, text=True, check=False)
    if made.returncode or not mount(image, point):
        pytest.skip(f"cannot mount an image: {made.stderr.strip()}")
    try:
        yield point
    finally:
        subprocess.run(["umount", "-l", point], check=True)


def mount(image: Path, point: Path) -> bool:
    return not subprocess.run(["mount", "-o", "loop", image, point], capture_output=True, check=False).returncode


SHUTDOWN: Final = 0x8004587D
NO_LOG_FLUSH: Final = 2
"""`FS_IOC_SHUTDOWN` of Linux: from now on nothing reaches the device, as when power is lost."""


def cut_power(point: Path) -> None:
    fd = os.open(point, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
    finally:
        os.close(fd)


class PowerCut(Killer):
    """Loses power at the step instead, and the process with it."""

    def __init__(self, at: int, point: Path) -> None:
        super().__init__(0, "before")
        self._cut_at = at
        self._point = point

    def wrap(self, step: Callable[..., Any], halves: bool) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            self.steps += 1
            if self.steps == self._cut_at:
                cut_power(self._point)
                os.kill(os.getpid(), signal.SIGKILL)
            return step(*arguments, **named)

        return wrapped


@needs_root
def test_deleting_cut_short_by_power_loss_at_any_step_loses_nothing_above_the_mark(root: Path, device: Path) -> None:
    for at in itertools.count(1):
        stream = device / f"stream_{at}"
        files = live(stream)
        os.sync()

        def work(at: int = at, stream: Path = stream) -> None:
            PowerCut(at, device).install()
            both_passes(stream)
            # Nothing that has returned comes back.
            cut_power(device)

        code = forked(work)
        subprocess.run(["umount", device], check=True)
        assert mount(root / "image", device)
        if code == 0:
            assert check(stream, files) == GONE
            assert list_kept(stream).leftovers == []
        go_on(stream, files)
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert at > 20, "the steps were not met"


def test_durable_module_is_what_the_harness_wraps() -> None:
    assert retire.remove is durable.remove  # type: ignore[attr-defined]
    assert retire.publish_bytes is durable.publish_bytes  # type: ignore[attr-defined]
    assert retire.sync_directory is durable.sync_directory  # type: ignore[attr-defined]
