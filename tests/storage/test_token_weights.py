"""Shares of tokens become shares of samples, by what the seals say."""

from __future__ import annotations

from pathlib import Path

import pytest

import lazyshard
from lazyshard import ChunkWriter
from lazyshard.errors import LengthsMissing, StreamInvalid, StreamMissing
from lazyshard.storage.token_weights import mean_tokens
from tests.storage.streams import foreign, produce


def measured(directory: Path, lengths: list[int], per_chunk: int = 2, *, end: bool = True) -> Path:
    writer = ChunkWriter(directory, per_chunk)
    for number, length in enumerate(lengths):
        writer.write({"id": number}, tokens=length)
    writer.close(end)
    return directory


def test_a_stream_of_longer_samples_gives_fewer_of_them(tmp_path: Path) -> None:
    short, long = measured(tmp_path / "short", [10, 30]), measured(tmp_path / "long", [50, 70, 60])
    assert (mean_tokens(short), mean_tokens(long)) == (20.0, 60.0)
    assert lazyshard.weights_by_tokens([(short, 0.5), (long, 0.5)]) == (0.75, 0.25)
    assert lazyshard.weights_by_tokens([(short, 3), (long, 1)]) == (0.9, 0.1)


def test_some_seals_stand_for_all(tmp_path: Path) -> None:
    stream = measured(tmp_path / "s", [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6], end=False)
    assert mean_tokens(stream) == 3.5
    assert mean_tokens(stream, 1) == 4.0
    assert mean_tokens(stream, 2) == (2 + 5) / 2
    assert mean_tokens(stream, 3) == (2 + 4 + 6) / 3


def test_what_is_not_known_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(LengthsMissing, match="how long the samples of chunk 0 are in tokens is not known"):
        mean_tokens(produce(tmp_path / "plain", 2))
    with pytest.raises(StreamInvalid, match="no chunk is there yet"):
        mean_tokens(produce(tmp_path / "empty", 0, end=False))
    with pytest.raises(StreamInvalid, match="another program fills it"):
        mean_tokens(foreign(tmp_path / "foreign", b'{"id":0}\n'))
    with pytest.raises(StreamInvalid, match="no tokens at all"):
        mean_tokens(measured(tmp_path / "none", [0, 0]))
    with pytest.raises(StreamMissing):
        mean_tokens(tmp_path / "nothing")
    with pytest.raises(ValueError, match="a share is a number above 0, got 0"):
        lazyshard.weights_by_tokens([(tmp_path / "plain", 0)])
