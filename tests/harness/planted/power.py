"""Mistakes to plant into a life: what careful code forgets, and only a power cut shows. Each changes this process."""

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from tests.harness.disks import Filesystem
from tests.harness.planted import points
from tests.harness.planted.planting import around

_LIVES: Final = "tests.harness.power.lives"


def _nothing(*arguments: object, **named: object) -> None:
    return None


_NOT_DONE: Final[dict[str, tuple[str, ...]]] = {  # Functions of modules that do nothing
    "rows_not_synced": ("lazyshard.stream.publishing:sync",),
    # After a rename the directory is not synced: readers are told of what a cut takes back.
    "names_not_synced": ("lazyshard.store.durable:sync_directory", "lazyshard.stream.publishing:sync_directory"),
    "nothing_synced_on_restart": ("lazyshard.stream.lock:sync_directory",),  # A start believes what it sees
    "refused_rows_not_synced": ("lazyshard_producer.rows.refusals:sync",),
    "journal_not_synced": ("lazyshard_producer.following.journal:sync",),
    "what_comes_back_stays": ("lazyshard.stream.lock:complete_retirement",),  # Nor when a cut has brought it back
    "cursor_name_not_synced": ("lazyshard.stream.cursor:sync_directory",),
}

_NOT_DURABLE: Final = {  # Modules that leave it to the system when what they publish comes onto the device
    "seal_not_synced": "lazyshard.stream.publishing",  # The names of seal and end are durable, not their content
    "nothing_synced_on_restart": "lazyshard.stream.lock",
    "end_only_told": "lazyshard.stream.head",  # The head is a hint like all before it
    "retired_mark_not_synced": "lazyshard.stream.listing",
}


def _deleted_before_the_mark() -> None:
    listing: Any = import_module("lazyshard.stream.listing")

    def late(write_mark: Any, directory: Path, folder: Path | None, mark: Any) -> None:
        first = listing.read_retired(directory, mark.stream_id)
        for chunk in range(first, mark.chunks_before):
            listing.remove(directory / listing.records.seal_name(chunk))
            listing.remove(directory / listing.records.chunk_name(chunk))
        listing.sync_directory(directory)
        write_mark(directory, folder, mark)

    around(listing, "_write_mark", late)


def _deleting_only_once() -> None:
    """What is left of retired chunks is deleted chunk by chunk, and half of one is a failure."""
    recovery: Any = import_module("lazyshard.stream.lock")

    def complete(directory: Path, listing: Any) -> None:
        for chunk in sorted({int(name[6:11]) for name in listing.leftovers}):
            os.unlink(directory / f"chunk_{chunk:05d}.jsonl.completed")
            os.unlink(directory / f"chunk_{chunk:05d}.jsonl")

    recovery.complete_retirement = complete


def _side_file_not_synced() -> None:
    pieces: Any = import_module("lazyshard.stream.publishing")

    def finish_rows_alone(chunk: Any) -> None:
        chunk.rows.finish()
        sync, pieces.sync = pieces.sync, _nothing
        chunk.arrays.finish()
        pieces.sync = sync

    pieces.OpenChunk.finish = finish_rows_alone


def _cursor_not_synced() -> None:
    cursor: Any = import_module("lazyshard.stream.cursor")
    write = cursor.write_new
    cursor.write_new = lambda path, data, **_: write(path, data)


def _cursor_in_place() -> None:
    cursor: Any = import_module("lazyshard.stream.cursor")
    durable: Any = import_module("lazyshard.store.durable")

    def write(directory: Path, value: Any, *, check: Any = _nothing) -> None:
        folder = cursor._make_folder(directory)
        check()
        fd = durable.create(folder / cursor.cursor_name(value.consumer))
        durable.write_all(fd, value.encode())
        durable.sync(fd)
        os.close(fd)
        cursor.sync_directory(folder)

    lives: Any = import_module(_LIVES)
    cursor.write_cursor = lives.write_cursor = write


_OTHERWISE: Final[dict[str, Callable[[], None]]] = {
    "deleted_before_the_mark": _deleted_before_the_mark,
    "deleting_only_once": _deleting_only_once,
    "side_file_not_synced": _side_file_not_synced,
    "side_file_named_after_the_seal": points.side_file_named_after_the_seal,
    "side_file_made_again": points.side_file_made_again,
    "other_arrays_after_a_restart": points.other_arrays_after_a_restart,
    "side_files_that_come_back_stay": points.side_files_deleted_only_once,  # Nor when a cut has brought them back
    "cursor_not_synced": _cursor_not_synced,
    "cursor_in_place": _cursor_in_place,
    "committed_before_the_checkpoint": lambda: vars(import_module(_LIVES)).update(COMMIT_FIRST=True),
}


def plant(name: str) -> None:
    for place in _NOT_DONE.get(name, ()):
        module, _, function = place.partition(":")
        setattr(import_module(module), function, _nothing)
    if name in _NOT_DURABLE:
        _leave_to_the_system(import_module(_NOT_DURABLE[name]))
    if name in _OTHERWISE:
        _OTHERWISE[name]()


def _leave_to_the_system(module: Any) -> None:
    publish = module.publish_bytes

    def hint(data: bytes, target: Path, temporary: Path, *, durable: bool = True, **named: bool) -> None:
        publish(data, target, temporary, durable=False, **named)
        if durable and module.__name__.endswith(".publishing"):
            import_module("lazyshard.store.durable").sync_directory(target.parent)

    module.publish_bytes = hint


OF_A_PRODUCER: Final[list[tuple[str, Filesystem, str, int, str]]] = [
    ("rows_not_synced", "ext4", "plain", 40, "chunk 0 is not what was sealed: b''"),
    ("rows_not_synced", "xfs", "plain", 40, "chunk 0 is not what was sealed: b''"),
    ("seal_not_synced", "ext4", "plain", 40, "chunk 0 cannot be read"),
    ("seal_not_synced", "xfs", "plain", 40, "chunk 0 cannot be read"),
    ("names_not_synced", "ext4", "plain", 50, "chunks were told, "),
    ("names_not_synced", "xfs", "plain", 42, "chunks were told, "),
    ("end_only_told", "ext4", "plain", 74, "and of no end"),
    ("refused_rows_not_synced", "ext4", "plain", 38, "bytes of quarantine.jsonl, which has 0"),
    ("journal_not_synced", "xfs", "followed", 48, "the last run exits with"),
    ("retired_mark_not_synced", "xfs", "retained", 76, "retired.json: expected a JSON object, found b''"),
    ("deleted_before_the_mark", "ext4", "retained", 72, "a cursor does not count"),
    ("deleting_only_once", "ext4", "retained", 78, "No such file"),
    ("what_comes_back_stays", "xfs", "retained", 198, "left over"),
    ("side_file_not_synced", "xfs", "encoded", 34, "chunk_00000.arrays is not what was to be sealed: b''"),
    ("side_file_named_after_the_seal", "ext4", "encoded", 30, "chunk_00000.arrays missing"),
    ("side_file_made_again", "ext4", "encoded", 50, "changed after it was sealed"),
    ("other_arrays_after_a_restart", "xfs", "encoded", 50, "is not what was to be sealed"),
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

OF_A_RESTART: Final = "nothing_synced_on_restart"  # Found by a cut in the recovery
