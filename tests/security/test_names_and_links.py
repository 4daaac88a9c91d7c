"""Names that files hold, links, second names and pipes: none becomes a path, or is followed, without a look at it."""

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from lazyshard import ChunkWriter
from lazyshard.errors import FileRefused, LazyShardError
from lazyshard.format.state import Cursor, ReadingHint
from lazyshard.inspection.verification import verify
from lazyshard.store.files import read_file, read_given_file
from lazyshard.stream import CursorOwner, forget_consumer, list_consumers, read_cursor, read_reading
from lazyshard.stream.cursor import write_cursor, write_reading
from lazyshard.stream.listing import retire
from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.following import journal
from lazyshard_producer.following.reading import PlainFile
from lazyshard_producer.position import FilePosition
from lazyshard_producer.ray_pieces import SEALS, piece_path
from lazyshard_producer.rows.refusals import Quarantine
from lazyshard_producer.sources.source import RowOrigin, open_regular
from lazyshard_swift.checkpoints import parse
from lazyshard_swift.errors import PositionInvalid
from tests.security import guards
from tests.stream.streams import raised, refusal_of
from tests.tiers import full


@pytest.mark.parametrize("name", [*guards.NAMES, ".sft", "sft.reading"], ids=ascii)
def test_no_name_is_taken_for_a_path(name: str, tmp_path: Path) -> None:
    for use in (forget_consumer, read_cursor, read_reading, CursorOwner):
        raised(ValueError, use, tmp_path, name)
    text = json.dumps({"format": 1, "stream": name, "directory": name, "consumer": name})
    for data in (text.encode(), name.encode("utf-8", "replace")):
        raised(PositionInvalid, parse, data, "lazyshard.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [*filter(None, guards.NAMES), "a.jsonl", "journal", 5, None], ids=ascii)
def test_position_names_a_journal_and_no_path(name: Any, tmp_path: Path) -> None:
    position = {"kind": "follow", "path": "in", "bytes": 0, "digest": "", "read": 0, "blank": 0, "journal": name}
    given = (position, tmp_path / ".producer.sources", "in")
    refusal_of(SourceRefused, "no position to continue from", journal.resume, *given)
    assert list(tmp_path.iterdir()) == []


FILES: Final = (
    *("stream.json", "head.json", "stream.end", "stream.owner", "retired.json", "chunk_00000.jsonl"),
    *("chunk_00001.jsonl.completed", "chunk_00001.jsonl.tokens", "quarantine.jsonl", "cursors/sft.json"),
    "cursors/sft.reading.json",
)

KINDS: Final = ("link", "pipe", "folder")

COMMANDS: Final = (
    *(("status",), ("inspect",), ("inspect", "0"), ("verify", "--jobs", "1"), ("trace",), ("audit",)),
    ("forget", "sft", "--yes"),
)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    return guards.outside(tmp_path / "elsewhere")


def put(file: Path, plant: Callable[[Path], None]) -> None:
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    plant(file)


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, KINDS[number % 3]) for number, name in enumerate(FILES)]
    + full(*[(name, KINDS[(number + 1) % 3]) for number, name in enumerate(FILES)]),
)
def test_commands_neither_follow_nor_block(
    name: str, kind: str, tmp_path: Path, elsewhere: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stream = guards.write_stream(tmp_path / "stream")
    write_cursor(stream, Cursor("sft", None, 0, 0, {}, 1.0))
    put(stream / name, {"link": guards.link_to(elsewhere / "secret"), "pipe": os.mkfifo, "folder": os.mkdir}[kind])
    for arguments in COMMANDS:
        code = guards.command(arguments[0], stream, *arguments[1:])
        out, err = capfd.readouterr()
        assert code in (0, 2, 3, 5, 7), (arguments, code, err)
        assert "Traceback" not in err
        assert "kept to myself" not in out + err
    assert guards.unchanged(elsewhere)


@pytest.mark.parametrize("name", ["stream.json", "head.json", "stream.end", "stream.owner", "retired.json"])
def test_writer_replaces_or_refuses_but_never_writes_through(name: str, tmp_path: Path, elsewhere: Path) -> None:
    stream = guards.write_stream(tmp_path / "stream", end=False)
    for plant in (guards.link_to(elsewhere / "secret"), guards.link_to(elsewhere / "new"), os.mkfifo):
        put(stream / name, plant)
        with contextlib.suppress(LazyShardError, OSError), ChunkWriter(stream, 2) as writer:
            writer.write({"id": 9})
        assert guards.unchanged(elsewhere)


@pytest.mark.parametrize("folder", [".tmp", "cursors"])
def test_folder_that_is_a_link_is_refused(folder: str, tmp_path: Path, elsewhere: Path) -> None:
    stream = guards.write_stream(tmp_path / "stream", rows=6, end=False)
    identity = ChunkWriter(stream)
    identity.close(end=False)
    (stream / folder).symlink_to(elsewhere)
    if folder == ".tmp":
        for call in (lambda: ChunkWriter(stream, 2), lambda: retire(stream, 1, 3)):
            raised(FileRefused, call)
    else:
        (elsewhere / "sft.json").write_bytes(Cursor("sft", identity.stream_id, 0, 3, {}, 1.0).encode())
        raised(FileRefused, write_cursor, stream, Cursor("sft", None, 0, 0, {}, 1.0))
        raised(FileRefused, list_consumers, stream)
        for use in (read_cursor, forget_consumer, CursorOwner):
            raised(FileRefused, use, stream, "sft")
        assert not write_reading(stream, ReadingHint("sft", identity.stream_id, 1, 0, 1, 1.0))
        assert read_reading(stream, "sft") is None
        (elsewhere / "sft.json").unlink()
        assert guards.command("verify", stream, "--jobs", "1") in (0, 5)
    assert verify(stream).findings
    assert guards.unchanged(elsewhere)


def test_lock_files_are_neither_followed_nor_overwritten(tmp_path: Path, elsewhere: Path) -> None:
    stream = guards.write_stream(tmp_path / "stream", end=False)
    for plant in (guards.link_to(elsewhere / "secret"), guards.link_to(elsewhere / "new")):
        put(stream / ".producer.lock", plant)
        raised(OSError, ChunkWriter, stream, 2)
        put(stream / "cursors" / ".sft.lock", plant)
        raised(OSError, CursorOwner, stream, "sft")
    put(stream / ".producer.lock", guards.second_name_of(elsewhere / "secret"))
    ChunkWriter(stream, 2).close(end=False)
    # The token of a run is written into its lock file: not into a second name of somebody's file.
    put(stream / "cursors" / ".sft.lock", guards.second_name_of(elsewhere / "secret"))
    CursorOwner(stream, "sft").close()
    put(stream / "cursors" / ".sft.lock", os.mkfifo)  # Nor does a pipe hang anybody
    CursorOwner(stream, "sft").close()
    assert guards.unchanged(elsewhere)


@pytest.mark.parametrize("kind", ["link", "link to nothing", "second name", "pipe"])
def test_quarantine_is_written_to_no_other_file(kind: str, tmp_path: Path, elsewhere: Path) -> None:
    plants = {"link": guards.link_to(elsewhere / "secret"), "link to nothing": guards.link_to(elsewhere / "new")}
    plants["second name"] = guards.second_name_of(elsewhere / "secret")
    put(tmp_path / "out" / "quarantine.jsonl", plants.get(kind, os.mkfifo))
    with pytest.raises(FileRefused):
        quarantine = Quarantine(tmp_path / "out", 0, check_owner=lambda: tmp_path)
        quarantine.add(RowOrigin("a.jsonl", 1, 0), "no JSON", b"x")
        quarantine.sync()
    assert guards.unchanged(elsewhere)


def test_followed_file_and_piece_of_a_ray_write_that_became_links_are_not_read(tmp_path: Path, elsewhere: Path) -> None:
    path = tmp_path / "incoming" / "a.jsonl"
    path.parent.mkdir()
    path.symlink_to(elsewhere / "secret")
    raised(LazyShardError, lambda: PlainFile(str(path), 1000, FilePosition()).read())
    raised(LazyShardError, open_regular, str(path), links_out=False)
    with open_regular(str(path)) as file:  # A source that the user names may be a link to anywhere
        assert file.read() == guards.SECRET
    folder = tmp_path / "pieces"
    folder.mkdir()
    for number, plant in enumerate((guards.link_to(elsewhere / "secret"), os.mkfifo)):
        piece_path(folder, number).mkdir()
        plant(piece_path(folder, number) / SEALS)
        raised(FileRefused, read_file, piece_path(folder, number) / SEALS)


def test_checkpoint_may_be_a_link_but_no_pipe(tmp_path: Path, elsewhere: Path) -> None:
    folder = tmp_path / "checkpoint-1"  # The cache of a model hub is made of links
    folder.mkdir()
    (folder / "lazyshard.json").symlink_to(elsewhere / "secret")
    assert read_given_file(folder / "lazyshard.json") == guards.SECRET
    raised(FileRefused, read_file, folder / "lazyshard.json")
    os.mkfifo(folder / "pipe")
    raised(FileRefused, read_given_file, folder / "pipe")
