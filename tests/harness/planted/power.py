"""Mistakes to plant into a life: what careful code forgets, and only a power cut shows. Each changes this process."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any, Final

from tests.harness.disks import Filesystem


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _nothing(*arguments: object, **named: object) -> None:
    return None


def rows_not_synced() -> None:
    """The rows of a chunk are not on the device when its seal is."""
    _module("lazyshard.stream.open_chunk").sync = _nothing


def seal_not_synced() -> None:
    """The names of a seal and of the end are durable, what is in them is not."""
    durable = _module("lazyshard.store.durable")
    publish = durable.publish_bytes

    def without_content(data: bytes, target: Path, temporary: Path, *, durable: bool = True) -> None:
        publish(data, target, temporary, durable=False)
        if durable:
            _module("lazyshard.store.durable").sync_directory(target.parent)

    _module("lazyshard.stream.publishing").publish_bytes = without_content


def names_not_synced() -> None:
    """After a rename the directory is not synced: readers are told of what a cut takes back."""
    _module("lazyshard.store.durable").sync_directory = _nothing
    _module("lazyshard.stream.publishing").sync_directory = _nothing


def nothing_synced_on_restart() -> None:
    """A start believes the seals that it sees; taking the ownership, which syncs the same directory, is no help."""
    _module("lazyshard.stream.recovery").sync_directory = _nothing
    lock = _module("lazyshard.stream.lock")
    publish = lock.publish_bytes
    lock.publish_bytes = lambda data, target, temporary: publish(data, target, temporary, durable=False)


def end_only_told() -> None:
    """What readers are told last is a hint like all before it: the head of a stream that has ended is not synced."""
    announcer = _module("lazyshard.stream.head")
    publish = announcer.publish_bytes
    announcer.publish_bytes = lambda data, target, temporary, durable: publish(data, target, temporary, durable=False)


def refused_rows_not_synced() -> None:
    """A seal's position counts refused rows that are not on the device."""
    _module("lazyshard_producer.rows.refusals").sync = _nothing


def journal_not_synced() -> None:
    """A seal names a part of a followed directory's journal that is not on the device."""
    _module("lazyshard_producer.following.journal").sync = _nothing


def retired_mark_not_synced() -> None:
    """Chunks are deleted on the word of a mark that is not on the device."""
    retire = _module("lazyshard.stream.retire")
    publish = retire.publish_bytes
    retire.publish_bytes = lambda data, target, temporary: publish(data, target, temporary, durable=False)


def deleted_before_the_mark() -> None:
    """Chunks are deleted first, and what says so is written afterwards."""
    retire = _module("lazyshard.stream.retire")
    write_mark = retire._write_mark

    def late(directory: Path, folder: Path | None, mark: Any) -> None:
        first = retire.read_retired(directory, mark.stream_id)
        for chunk in range(first, mark.chunks_before):
            retire.remove(directory / retire.seal_name(chunk))
            retire.remove(directory / retire.chunk_name(chunk))
        retire.sync_directory(directory)
        write_mark(directory, folder, mark)

    retire._write_mark = late


def deleting_only_once() -> None:
    """What is left of retired chunks is deleted chunk by chunk, and half of one is a failure."""

    def complete(directory: Path, listing: Any) -> None:
        retire = _module("lazyshard.stream.retire")
        for chunk in sorted({int(name[6:11]) for name in listing.leftovers}):
            os.unlink(directory / retire.seal_name(chunk))
            os.unlink(directory / retire.chunk_name(chunk))

    _module("lazyshard.stream.recovery").complete_retirement = complete


def what_comes_back_stays() -> None:
    """Retired chunks that a cut has brought back are not deleted again."""
    _module("lazyshard.stream.recovery").complete_retirement = _nothing


def side_file_not_synced() -> None:
    """The arrays of a chunk are not on the device when its seal is."""
    _module("lazyshard.stream.open_chunk").OpenChunk.finish = _finish_rows_alone


def _finish_rows_alone(chunk: Any) -> None:
    chunk._file.finish()
    piece = _module("lazyshard.stream.open_chunk")
    sync, piece.sync = piece.sync, _nothing
    chunk.arrays.file.finish()
    piece.sync = sync


def side_file_named_after_the_seal() -> None:
    """The file of a chunk's arrays gets its name when the chunk is sealed already."""
    publishing = _module("lazyshard.stream.publishing")
    rename, publish_bytes = publishing.rename, publishing.publish_bytes
    late = []

    def rename_rows(source: Path, target: Path) -> None:
        if target.suffix == ".arrays":
            late.append((source, target))
        else:
            rename(source, target)

    def publish_and_name(data: bytes, target: Path, temporary: Path) -> None:
        publish_bytes(data, target, temporary)
        while late:
            rename(*late.pop())

    publishing.rename, publishing.publish_bytes = rename_rows, publish_and_name


def side_file_made_again() -> None:
    """A start writes the last side file anew, with other bytes."""
    _module("tests.harness.planted.points").side_file_made_again()


def other_arrays_after_a_restart() -> None:
    """A run that goes on seals arrays that are whole, and none of its rows'."""
    _module("tests.harness.planted.points").other_arrays_after_a_restart()


def side_files_that_come_back_stay() -> None:
    """Of retired chunks that a cut has brought back, or left in half, the side files are not deleted."""
    retire = _module("lazyshard.stream.retire")
    there = retire._is_there
    retire._is_there = lambda directory, chunk, arrays: there(directory, chunk, False)

    def complete(directory: Path, listing: Any) -> None:
        for name in listing.leftovers:
            if not name.endswith(".arrays"):
                retire.remove(directory / name)
        retire.sync_directory(directory)

    _module("lazyshard.stream.recovery").complete_retirement = complete


def cursor_not_synced() -> None:
    """The name of a cursor is durable, what is in it is not."""
    _module("lazyshard.stream.cursor").sync = _nothing


def cursor_name_not_synced() -> None:
    """A consumer is told that its cursor is durable, and its name is not."""
    _module("lazyshard.stream.cursor").sync_directory = _nothing


def cursor_in_place() -> None:
    """A cursor is written over the one before, without a file of its own."""
    cursor = _module("lazyshard.stream.cursor")

    def write(directory: Path, value: Any, *, check: Any = _nothing) -> None:
        folder = cursor._make_folder(directory)
        check()
        fd = cursor.create(folder / cursor.cursor_name(value.consumer))
        cursor.write_all(fd, value.encode())
        cursor.sync(fd)
        os.close(fd)
        cursor.sync_directory(folder)

    cursor.write_cursor = write
    _module("tests.harness.power.lives").write_cursor = write


def committed_before_the_checkpoint() -> None:
    """The cursor is moved on, and then the checkpoint is saved for which it stands."""
    _module("tests.harness.power.training").COMMIT_FIRST = True


OF_A_PRODUCER: Final[list[tuple[str, Filesystem, str, int, str]]] = [
    ("rows_not_synced", "ext4", "plain", 40, "chunk 0 has 0 bytes"),
    ("rows_not_synced", "xfs", "plain", 40, "chunk 0 has 0 bytes"),
    ("seal_not_synced", "ext4", "plain", 40, "chunk_00000.jsonl.completed: expected a JSON object, found b''"),
    ("seal_not_synced", "xfs", "plain", 40, "chunk_00000.jsonl.completed: expected a JSON object, found b''"),
    ("names_not_synced", "ext4", "plain", 50, "chunks were told, "),
    ("names_not_synced", "xfs", "plain", 42, "chunks were told, "),
    ("end_only_told", "ext4", "plain", 74, "and of no end"),
    ("refused_rows_not_synced", "ext4", "plain", 38, "bytes of quarantine.jsonl, which has 0"),
    ("journal_not_synced", "xfs", "followed", 48, "the last run exits with"),
    ("retired_mark_not_synced", "xfs", "retained", 76, "retired.json: expected a JSON object, found b''"),
    ("deleted_before_the_mark", "ext4", "retained", 72, "sealed are [1, 2], with data"),
    ("deleting_only_once", "ext4", "retained", 78, "No such file"),
    ("what_comes_back_stays", "xfs", "retained", 198, "left over"),
    ("side_file_not_synced", "xfs", "encoded", 34, "chunk_00000.arrays has 0 bytes"),
    ("side_file_named_after_the_seal", "ext4", "encoded", 30, "sealed, chunk_00000.arrays is missing"),
    ("side_file_made_again", "ext4", "encoded", 50, "which is not what was sealed"),
    ("other_arrays_after_a_restart", "xfs", "encoded", 50, "the seal of chunk "),
    ("side_files_that_come_back_stay", "xfs", "encoded retained", 84, "left over: ['chunk_00000.arrays']"),
]
"""Name, filesystem, scene, the call from which on the power is cut, and part of what the harness says."""

OF_A_CONSUMER: Final[list[tuple[str, Filesystem, int, str]]] = [
    ("cursor_not_synced", "ext4", 12, "trainer.json: expected a JSON object, found b''"),
    ("cursor_not_synced", "xfs", 12, "trainer.json: expected a JSON object, found b''"),
    ("cursor_name_not_synced", "ext4", 28, "committed up to"),
    ("cursor_in_place", "xfs", 12, "trainer.json: expected a JSON object, found b''"),
    ("committed_before_the_checkpoint", "ext4", 24, "the cursor stands at 4"),
]

OF_A_RESTART: Final = "nothing_synced_on_restart"
"""Found by a cut in the recovery."""
