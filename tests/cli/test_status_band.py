"""The band, the chunks of each rank and the mixture, as `lazyshard status` writes them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lazyshard.cli.status import status_values
from lazyshard.cli.status_view import SIGNS, band_line, legend, share_words, source_words, status_lines, window_words
from lazyshard.format.blend_state import BlendShare
from lazyshard.format.seal import MixedSource
from lazyshard.inspection.band import Band, ChunkState, ChunkStretch, OpenWindow
from tests.cli.looks import outlook, survey, told


def band(*stretches: tuple[int, ChunkState]) -> Band:
    first, made = 0, []
    for stop, state in stretches:
        made.append(ChunkStretch(first, stop, state))
        first = stop
    return Band(first, tuple(made), (), {})


def test_a_chunk_is_a_character_while_there_is_room() -> None:
    short = band((2, "deleted"), (3, "done"), (4, "taken"), (6, "reading"), (8, "ready"), (9, "awaited"))
    assert band_line(short, 60) == "..-=##++?"
    assert legend(short) == ". deleted, - done, = taken, # read now, + ready, ? awaited"


def test_what_is_read_is_seen_in_the_longest_stream() -> None:
    long = band((400_000, "done"), (400_001, "reading"), (1_000_000, "ready"))
    line = band_line(long, 10)
    assert line == "----#+++++"
    assert legend(long) == "- done, # read now, + ready"


@pytest.mark.parametrize("width", [1, 7, 66])
@pytest.mark.parametrize("state", SIGNS)
def test_every_line_is_as_wide_as_asked(state: ChunkState, width: int) -> None:
    assert band_line(band((1000, state)), width) == SIGNS[state] * width


def test_of_an_empty_stream_there_is_no_line() -> None:
    assert band_line(band(), 66) == ""


def test_chunks_of_each_rank() -> None:
    assert window_words(OpenWindow(6, 10, 2, 1), 10) == "chunks 6 to 9 (rank 0: 6, 8; rank 1: 7, 9)"
    assert window_words(OpenWindow(6, 7, 1, 1), 10) == "chunk 6 (rank 0: 6)"
    assert window_words(OpenWindow(6, 8, 2), 10) == "chunks 6 to 7 (shared by ranks: 6, 7)"
    assert window_words(OpenWindow(6, 8, 2, 1, 7), 10) == "chunks 6 to 7 (rank 0: 7; shared by ranks: 6)"
    assert window_words(OpenWindow(1024, 1536, 512, 1), 1536) == "chunks 1,024 to 1,535, by 512 ranks"
    assert window_words(OpenWindow(0, 16, 16, 1), 16) == "chunks 0 to 15, by 16 ranks"


def test_chunks_that_are_waited_for() -> None:
    assert window_words(OpenWindow(6, 10, 2, 1), 9) == "chunk 9, to read chunks 6 to 9 (rank 0: 6, 8; rank 1: 7, 9)"
    assert window_words(OpenWindow(6, 8, 2, 1), 6) == "chunks 6 to 7 (rank 0: 6; rank 1: 7)"
    looked = survey(consumers=(told(consumed=12_330, done=1233, needs=1236, ranks=3),))
    text = " ".join("\n".join(status_lines(outlook(looked), watching=True)).split())
    assert " waits for chunks 1,234 to 1,235, to read chunks 1,233 to 1,235 (rank 0: 1,233; rank 1: 1,234; " in text
    assert "read now" not in text
    assert " now chunk" not in text


def test_mixture() -> None:
    assert source_words(MixedSource("web", 0.7, 0.6994, 1399, False)) == "web: 69.9%, 1,399 rows; weight 70.0%"
    assert source_words(MixedSource("web", 0.7, None, 0, False)) == "web: none yet; weight 70.0%"
    assert source_words(MixedSource("a\nb", 0.0, 0.5, 1, True)) == "a\\nb: 50.0%, 1 row; finished"


def test_blend_of_a_consumer() -> None:
    assert share_words(BlendShare("/data/a\nb", 0.8, 79), 0.79) == "/data/a\\nb: 79.0%, 79 samples; weight 80.0%"
    assert share_words(BlendShare("/data/a", 1.0, 0), None) == "/data/a: none yet; weight 100.0%"
    one = told(consumed=100, done=10, needs=20)
    assert one.cursor is not None
    blended = replace(one.cursor, blend=(BlendShare("/data/a", 0.5, 100), BlendShare("/data/b", 0.5, 300)))
    looked = survey(consumers=(replace(one, cursor=blended),))
    lines = status_lines(outlook(looked), watching=True)
    start = lines.index("  blend       /data/a: 25.0%, 100 samples; weight 50.0%")
    assert lines[start + 1] == "              /data/b: 75.0%, 300 samples; weight 50.0%"
    (values,) = status_values(outlook(looked))["consumers"]
    assert values["blend"] == [
        {"stream": "/data/a", "weight": 0.5, "share": 0.25, "consumed_samples": 100},
        {"stream": "/data/b", "weight": 0.5, "share": 0.75, "consumed_samples": 300},
    ]


def test_page_of_a_run_that_tells_how_it_deals() -> None:
    looked = survey(
        consumers=(told(consumed=11_640, done=1164, needs=1170, ranks=3),),
        census={"retired": 200},
        mixture=(MixedSource("web", 0.75, 0.5, 2, False), MixedSource("code", 0.25, 0.5, 2, False)),
    )
    lines = status_lines(outlook(looked), watching=True)
    start = lines.index(next(line for line in lines if line.startswith("band")))
    assert lines[start : start + 4] == [
        "band          ..........----------------------------------------------------#+++",
        "              . deleted, - done, = taken, # read now, + ready",
        "mixture       web: 50.0%, 2 rows; weight 75.0%",
        "              code: 50.0%, 2 rows; weight 25.0%",
    ]
    text = " ".join("\n".join(lines).split())
    assert " now chunks 1,167 to 1,169 (rank 0: 1,167; rank 1: 1,168; rank 2: 1,169) rate " in text
    assert "band" not in "\n".join(status_lines(outlook(looked), watching=False))
