"""Attacks of who can write into a stream's directory, called against the real code, and with a weakness planted."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard import ChunkWriter, StreamReader
from lazyshard.cli.main import main as lazyshard_main
from lazyshard.errors import FileRefused, LazyShardError
from lazyshard.format.state import Cursor
from lazyshard.store import durable
from lazyshard.stream.cursor import write_cursor
from lazyshard_producer.cli import main as producer_main
from lazyshard_producer.following.journal import FollowState

NAMES: Final = (  # Names that lead elsewhere, or that no file can have; a consumer must have none of them
    *("", ".", "..", "../x", "../../etc/passwd", "/etc/passwd", "a/b", "a\0b", "a\nb", "a\x1b[2Jb", "a\x9bb"),
    *("a" * 300, "\ud800"),
)

ESCAPES: Final = "\x1b]0;owned\x07\x1b[2J\x9b31m\x08\r\n\u202egnp.exe\u2028"
"""Sets a title, clears the screen, colours, overwrites, begins a line, turns the direction of writing."""

SECRET: Final = b'{"password": "kept to myself"}\n'


def write_stream(directory: Path, rows: int = 4, per_chunk: int = 2, *, end: bool = True, row: Any = None) -> Path:
    writer = ChunkWriter(directory, per_chunk)
    for number in range(rows):
        writer.write(row or {"id": number})
    writer.close(end)
    return directory


def edit(file: Path, **values: Any) -> None:
    file.write_bytes(json.dumps(json.loads(file.read_bytes()) | values).encode("utf-8", "surrogatepass"))


def outside(place: Path) -> Path:
    """Makes a folder that has nothing to do with any stream, with a file that is nobody else's affair."""
    place.mkdir()
    (place / "secret").write_bytes(SECRET)
    return place


def unchanged(place: Path) -> bool:
    return sorted(path.name for path in place.iterdir()) == ["secret"] and (place / "secret").read_bytes() == SECRET


def link_to(target: Path) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def second_name_of(target: Path) -> Callable[[Path], None]:
    return lambda path: os.link(target, path)


def command(*arguments: object) -> int:
    return lazyshard_main([str(one) for one in arguments])


def producer(*arguments: object) -> int:
    return producer_main([str(one) for one in arguments])


def shown(text: str) -> str:
    return "".join(char for char in text if not char.isprintable() and char != "\n")


def link_out_of_the_stream_is_not_read(place: Path) -> None:
    """Who can make links in a stream's directory must not have a reader's files read by it."""
    elsewhere = outside(place / "elsewhere")
    stream = write_stream(place / "stream")
    data = stream / "chunk_00000.jsonl"
    (elsewhere / "secret").write_bytes(data.read_bytes())
    data.unlink()
    data.symlink_to(elsewhere / "secret")
    with pytest.raises(FileRefused):
        StreamReader(stream, max_wait=0).read(0)


def temporary_file_is_always_new(place: Path) -> None:
    """Whatever waits under the name of a temporary file: a second name, a link, a pipe; none is written to."""
    elsewhere = outside(place / "elsewhere")
    plants = (
        second_name_of(elsewhere / "secret"),
        link_to(elsewhere / "secret"),
        link_to(elsewhere / "new"),
        os.mkfifo,
    )
    for number, plant in enumerate(plants):
        temporary, target = place / f"temporary-{number}", place / f"target-{number}"
        plant(temporary)
        durable.publish_bytes(b"published", target, temporary)
        assert target.read_bytes() == b"published"
        assert not target.is_symlink()
        assert target.stat().st_nlink == 1
    assert unchanged(elsewhere)


def recovery_removes_nothing_elsewhere(place: Path) -> None:
    """A producer that starts clears `.tmp`; it must be its own, also if it becomes a link after the look at it."""
    elsewhere = outside(place / "elsewhere")
    (place / ".tmp").symlink_to(elsewhere)
    with pytest.raises(OSError):
        durable.clear_folder(place / ".tmp")
    assert unchanged(elsewhere)


def cursors_folder_leads_nowhere(place: Path) -> None:
    """A trainer writes its cursor with its own rights, so the folder must not be somebody else's choice."""
    elsewhere = outside(place / "elsewhere")
    stream = write_stream(place / "stream", end=False)
    (stream / "cursors").symlink_to(elsewhere)
    with pytest.raises(FileRefused):
        write_cursor(stream, Cursor("sft", None, 0, 0, {}, 1.0))
    assert unchanged(elsewhere)


def journal_names_no_other_directory(place: Path) -> None:
    """A producer opens files by the names in its journal, and publishes what is in them."""
    elsewhere = outside(place / "elsewhere")
    (place / "incoming").mkdir()
    name = f"../{elsewhere.name}/secret"
    assert (place / "incoming" / name).read_bytes() == SECRET
    with pytest.raises(ValueError):
        FollowState().apply({"file": name, "offset": len(SECRET)})


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def assert_kept(place: Path, mask: int, made: int) -> None:
    found = [path for path in place.rglob("*") if not path.is_symlink()]
    assert len(found) >= made, found
    for path in found:
        expected = (0o777 if path.is_dir() else 0o666) & ~mask
        assert path.stat().st_mode & 0o7777 == expected, f"{path}: {path.stat().st_mode & 0o7777:o}, not {expected:o}"


def umask_is_kept(place: Path, mask: int = 0o027) -> None:
    with umask(mask), ChunkWriter(place / "stream", 2) as writer:
        for number in range(3):
            writer.write({"id": number})
        assert_kept(place, mask, 5)


def no_error_moves_the_cursor(place: Path) -> None:
    """What a producer writes of itself is shown by readers when they give up waiting."""
    stream = write_stream(place / "stream", end=False)
    edit(stream / "head.json", state="waiting", note=ESCAPES, host=ESCAPES)
    with pytest.raises(LazyShardError) as caught:
        StreamReader(stream, max_wait=0).read(100)
    assert str(caught.value).isprintable()


Guard = Callable[[Path], None]

GUARDS: Final[tuple[Guard, ...]] = (
    link_out_of_the_stream_is_not_read,
    temporary_file_is_always_new,
    recovery_removes_nothing_elsewhere,
    cursors_folder_leads_nowhere,
    journal_names_no_other_directory,
    umask_is_kept,
    no_error_moves_the_cursor,
)
