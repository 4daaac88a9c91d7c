"""Lengths in tokens, sealed or measured later: when they count, when they do not, and what becomes of them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import lazyshard
from lazyshard import ChunkWriter, StreamReader
from lazyshard.errors import FileRefused, LengthsMissing, MeasureLocked, StreamInvalid, StreamMissing, TokensInvalid
from lazyshard.format import Tokens, seal_digest
from lazyshard.format.names import seal_name, tokens_name
from lazyshard.inspection.inspection import overview
from lazyshard.inspection.row_facts import mean_tokens
from lazyshard.inspection.verification import verify
from lazyshard.stream.opening import open_now
from lazyshard.stream.retire import list_kept, read_retired, retire
from lazyshard.stream.token_lengths import chunk_tokens, measuring, write_tokens
from tests.security.hostile import ESCAPES, outside, unchanged
from tests.stream.damage import edit, found
from tests.stream.lengths import HOSTILE, lengths_of, measured, sealed
from tests.stream.streams import foreign, names, produce, rows


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    """Chunks of 2, 2 and 1 rows."""
    return produce(tmp_path / "s", 5)


def test_measured_lengths_count_for_more_than_sealed_ones(tmp_path: Path) -> None:
    directory = sealed(tmp_path / "s", [1, 2, 3, 4, 5])
    assert lengths_of(directory) == [1, 2, 3, 4, 5]
    measured(directory, [30, 40], first=1)
    assert lengths_of(directory) == [1, 2, 30, 40, 5]
    assert (chunk_tokens(directory, 0).measure, chunk_tokens(directory, 1).measure) == (None, "by hand")
    assert mean_tokens(directory) == 78 / 5
    assert overview(directory).tokens.total == 78


def test_chunk_without_lengths_is_named(stream: Path) -> None:
    measured(stream, [1, 2])
    with pytest.raises(LengthsMissing, match=r"chunk 1 are in tokens is not known.*lazyshard measure") as caught:
        lengths_of(stream)
    assert (caught.value.chunk, caught.value.directory) == (1, str(stream))


def test_two_measures_are_not_mixed(stream: Path) -> None:
    measured(measured(stream, [1, 2]), [3, 4], [5], measure="otherwise", first=1)
    with pytest.raises(LengthsMissing, match=r"chunk 0 was measured by by hand, chunk 1 by otherwise;.*--replace"):
        lengths_of(stream)


def test_file_of_another_seal_counts_as_none(stream: Path) -> None:
    """As after a power cut that took a chunk back, which was then made anew."""
    measured(stream, [1, 2], [3, 4], [5])
    edit(seal_name(1), sealed_at=1.5)(stream)
    assert chunk_tokens(stream, 1).lengths is None
    assert [finding[:2] for finding in found(stream)] == [("leftover other-chunk", tokens_name(1))]


@pytest.mark.parametrize("damage", HOSTILE)
def test_file_that_is_not_as_it_was_written_is_an_error(damage: str, stream: Path) -> None:
    measured(stream, [1, 2], [3, 4], [5])
    HOSTILE[damage](stream)
    with pytest.raises(TokensInvalid, match=r"chunk_00001.jsonl.tokens.*; remove the file, or have `lazy"):
        lengths_of(stream)
    (finding,) = verify(stream).findings
    assert (finding.severity, finding.kind, finding.file) == ("damage", "invalid", tokens_name(1))
    assert "lazyshard measure" in finding.remedy
    # Nobody who trains looks at it.
    assert list(StreamReader(stream)) == rows(0, 5)


def test_lengths_of_another_number_of_rows_are_refused(stream: Path) -> None:
    measured(stream, [1, 2], [3, 4, 5])
    with pytest.raises(TokensInvalid, match="expected lengths of 2 rows, found 3"):
        chunk_tokens(stream, 1)


def test_pipe_and_link_in_its_place_are_refused(stream: Path, tmp_path: Path) -> None:
    os.mkfifo(stream / tokens_name(0))
    (tmp_path / "secret").write_bytes(b"{}")
    (stream / tokens_name(1)).symlink_to(tmp_path / "secret")
    for chunk, found_there in enumerate(("found a named pipe", "out of the stream")):
        with pytest.raises(TokensInvalid, match=found_there):
            chunk_tokens(stream, chunk)
    assert [finding[:2] for finding in found(stream)] == [
        ("damage invalid", tokens_name(0)),
        ("damage invalid", tokens_name(1)),
    ]


def test_folder_and_lock_that_are_links_are_not_followed(stream: Path, tmp_path: Path) -> None:
    elsewhere = outside(tmp_path / "elsewhere")
    (stream / ".measure").symlink_to(elsewhere)
    with pytest.raises(FileRefused), measuring(stream):
        pass
    (stream / ".measure").unlink()
    (stream / ".measure").mkdir()
    (stream / ".measure" / "lock").symlink_to(elsewhere / "secret")
    with pytest.raises(OSError), measuring(stream):
        pass
    assert unchanged(elsewhere)


def test_messages_hold_no_control_characters(stream: Path) -> None:
    measured(measured(stream, [1, 2]), [3, 4], [5], measure=ESCAPES, first=1)
    with pytest.raises(LengthsMissing) as caught:
        lengths_of(stream)
    assert str(caught.value).isprintable()
    edit(tokens_name(0), xxh3=ESCAPES)(stream)
    with pytest.raises(TokensInvalid) as refused:
        lengths_of(stream)
    assert str(refused.value).isprintable()


def test_verification_looks_at_them(stream: Path) -> None:
    measured(stream, [1, 2], [3, 4], [5])
    assert found(stream) == found(stream, quick=True) == []
    (stream / tokens_name(9)).write_bytes(b"")
    assert found(stream) == [("leftover other-chunk", tokens_name(9), "a published chunk beside it", "none")]


def test_they_go_with_their_chunk(tmp_path: Path) -> None:
    directory = measured(produce(tmp_path / "s", 10, end=False), [1, 2], [3, 4], [5, 6])
    assert retire(directory, 2, 5) == 2
    assert [name for name in names(directory) if name.endswith(".tokens")] == [tokens_name(2)]


def test_what_a_killed_deletion_has_left_the_next_start_removes(tmp_path: Path) -> None:
    directory = measured(produce(tmp_path / "s", 10, end=False), [1, 2], [3, 4])
    left = (directory / tokens_name(0)).read_bytes()
    retire(directory, 2, 5)
    (directory / tokens_name(0)).write_bytes(left)
    assert list_kept(directory).leftovers == [tokens_name(0)]
    assert [finding[:2] for finding in found(directory)] == [("leftover retired", tokens_name(0))]
    ChunkWriter(directory, 2).close(end=False)
    assert tokens_name(0) not in names(directory)
    assert list_kept(directory).leftovers == []


def test_next_start_of_a_producer_leaves_the_others_alone(tmp_path: Path) -> None:
    directory = measured(produce(tmp_path / "s", 4, end=False), [1, 2], [3, 4])
    produce(directory, 6)
    assert [name for name in names(directory) if name.endswith(".tokens")] == [tokens_name(0), tokens_name(1)]
    assert list(StreamReader(directory)) == rows(0, 6)


def test_lengths_of_a_chunk_that_was_deleted_meanwhile_do_not_stay(tmp_path: Path) -> None:
    directory = produce(tmp_path / "s", 10, end=False)
    digest = seal_digest((directory / seal_name(0)).read_bytes())
    (directory / ".measure").mkdir()
    stream_id = open_now(directory).stream_id
    assert stream_id is not None
    retire(directory, 1, 5)
    assert read_retired(directory) == 1
    assert not write_tokens(directory, Tokens(0, digest, np.array([1, 2], np.uint32), "m"), stream_id)
    assert tokens_name(0) not in names(directory)
    with pytest.raises(LengthsMissing, match="chunk 0 was deleted by the stream's producer"):
        lengths_of(directory)


def test_one_measures_at_a_time_and_clears_what_was_left(stream: Path) -> None:
    with measuring(stream):
        (stream / ".measure" / "left").touch()
        with pytest.raises(MeasureLocked, match="another process is measuring it already"), measuring(stream):
            pass
    with measuring(stream):
        assert set(names(stream / ".measure")) <= {"lock"}


def test_who_clears_the_folder_on_another_machine_delays_a_write_only(
    stream: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lazyshard.store import durable
    from lazyshard.stream import token_lengths

    calls = []
    publish = durable.publish_bytes

    def cleared_once(data: bytes, target: Path, temporary: Path) -> None:
        calls.append(target)
        if len(calls) == 1:
            raise FileNotFoundError(2, "No such file", str(temporary))
        publish(data, target, temporary)

    monkeypatch.setattr(token_lengths, "publish_bytes", cleared_once)
    measured(stream, [1, 2])
    assert (len(calls), chunk_tokens(stream, 0).measure) == (2, "by hand")


def test_a_stream_of_longer_samples_gives_fewer_of_them(tmp_path: Path) -> None:
    short, long = sealed(tmp_path / "short", [10, 30]), sealed(tmp_path / "long", [50, 70, 60])
    assert (mean_tokens(short), mean_tokens(long)) == (20.0, 60.0)
    assert lazyshard.weights_by_tokens([(short, 0.5), (long, 0.5)]) == (0.75, 0.25)
    assert lazyshard.weights_by_tokens([(short, 3), (long, 1)]) == (0.9, 0.1)


def test_some_seals_stand_for_all(tmp_path: Path) -> None:
    stream = sealed(tmp_path / "s", [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6], end=False)
    assert mean_tokens(stream) == 3.5
    assert mean_tokens(stream, 1) == 4.0
    assert mean_tokens(stream, 2) == (2 + 5) / 2
    assert mean_tokens(stream, 3) == (2 + 4 + 6) / 3


def test_what_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LengthsMissing):
        mean_tokens(produce(tmp_path / "plain", 2))
    for stream in (
        produce(tmp_path / "empty", 0, end=False),
        foreign(tmp_path / "foreign", b'{"id":0}\n'),
        sealed(tmp_path / "none", [0, 0]),
    ):
        with pytest.raises(StreamInvalid):
            mean_tokens(stream)
    with pytest.raises(StreamMissing):
        mean_tokens(tmp_path / "nothing")
    with pytest.raises(ValueError, match="a share is a number above 0, got 0"):
        lazyshard.weights_by_tokens([(tmp_path / "plain", 0)])
