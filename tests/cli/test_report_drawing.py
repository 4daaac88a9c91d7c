"""The pictures of a report: well-formed SVG, in which everything lies where its number puts it."""

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyshard.cli.report_drawing import Bar, Mark, band, bars, columns
from lazyshard.cli.report_drawing_time import Line, lanes, lines, moment_tick
from lazyshard.cli.report_svg import WIDTH, escape, short, ticks

HOSTILE = "</svg><script>alert('x')</script>&\u202e\x00"


def drawn(picture: str) -> ElementTree.Element:
    # What is parsed was made here.
    return ElementTree.fromstring(picture)  # noqa: S314


def sizes(picture: str, name: str = "rect") -> list[tuple[float, float]]:
    """The x and width of each rectangle."""
    return [(float(one.attrib["x"]), float(one.attrib["width"])) for one in drawn(picture).iter(name)]


def texts(picture: str) -> list[str]:
    return ["".join(one.itertext()) for one in drawn(picture).iter("text")]


@pytest.mark.parametrize(
    ("highest", "found"),
    [
        (0, [0, 1]),
        (1, [0, 0.5, 1]),
        (7, [0, 2, 4, 6, 8]),
        (100, [0, 50, 100]),
        (101, [0, 50, 100, 150]),
        (math.inf, [0, 1]),
    ],
)
def test_ticks_are_round_and_reach_the_highest(highest: float, found: list[float]) -> None:
    assert ticks(highest) == found


@given(st.floats(1e-6, 1e15))
def test_ticks_are_few(highest: float) -> None:
    found = ticks(highest)
    assert highest <= found[-1] * (1 + 1e-9)
    assert 2 <= len(found) <= 5


def test_amounts_are_short() -> None:
    assert [short(value) for value in (0, 999, 1500, 2_000_000, 0.123456)] == ["0", "999", "1.5k", "2M", "0.123"]


def test_columns_are_as_high_as_their_counts_and_marks_lie_in_their_bin() -> None:
    picture = columns([10, 0, 5], [0, 10, 20, 40], [Mark(30, "p99 30")], "lengths")
    heights = [float(one.attrib["height"]) for one in drawn(picture).iter("rect")]
    assert heights == [150.0, 0.0, 75.0]
    (mark,) = [one for one in drawn(picture).iter("line") if one.attrib["class"] == "mark"]
    (_, _), (_, _), (last, width) = sizes(picture)
    assert float(mark.attrib["x1"]) == pytest.approx(last - 1 + (width + 2) / 2, abs=0.2)
    assert "p99 30" in texts(picture)


def test_a_bin_that_is_not_empty_is_seen() -> None:
    heights = [float(one.attrib["height"]) for one in drawn(columns([1, 10**6], [0, 1, 2], [], "x")).iter("rect")]
    assert heights[0] == 1.0


def test_bars_are_as_long_as_their_values_and_leave_room_for_their_text() -> None:
    picture = bars([Bar("a", 10.0, "10 rows"), Bar("b", 5.0, "5 rows"), Bar("c", 0.0, "none")], "x", mark=5.0)
    (_, first), (_, second), (_, third) = sizes(picture)
    assert second == pytest.approx(first / 2, abs=0.1)
    assert third > 0
    assert first + len("10 rows") * 7 < WIDTH
    places = {line.attrib["x1"] for line in drawn(picture).iter("line")}
    assert places == {f"{1 + first / 2:.1f}"}


def test_long_labels_are_cut_and_said_whole_to_who_points_at_the_bar() -> None:
    picture = bars([Bar("x" * 500, 1.0, "1")], "x")
    assert max(map(len, texts(picture))) <= 60
    assert "x" * 500 in picture


def test_lines_begin_left_and_end_right() -> None:
    picture = lines([Line([(100.0, 0.0), (150.0, 10.0), (200.0, 5.0)]), Line([(200.0, 10.0)], "b")], "rows")
    (points,) = [one.attrib["points"] for one in drawn(picture).iter("polyline")]
    assert points == "46.0,164.0 227.0,14.0 408.0,89.0"
    (dot,) = drawn(picture).iter("circle")
    assert (dot.attrib["cx"], dot.attrib["cy"], dot.attrib["class"]) == ("408.0", "14.0", "b")


def test_lines_of_one_moment_are_drawn() -> None:
    assert len(list(drawn(lines([Line([(5.0, 0.0)])], "x")).iter("circle"))) == 1


def test_lanes_put_stretches_to_their_times() -> None:
    picture = lanes([("sft", [(0.0, 100.0, "a", "all"), (50.0, 50.0, "c", "here")]), ("eval", [])], "waits")
    widths = [(one.attrib["class"], one.attrib["width"]) for one in drawn(picture).iter("rect")]
    assert widths == [("empty", "408"), ("a", "408.0"), ("empty", "408")]
    (dot,) = drawn(picture).iter("circle")
    assert dot.attrib["cx"] == "210.0"


def test_a_band_is_as_wide_as_the_picture_however_small_its_parts() -> None:
    picture = band([(1.0, "a", "one"), *[(1e-9, "b", "little")] * 40], "chunks")
    (group,) = drawn(picture).iter("{http://www.w3.org/2000/svg}g") if "xmlns" in picture else drawn(picture).iter("g")
    found = re.fullmatch(r"scale\((\S+) 1\)", group.attrib["transform"])
    assert found is not None
    last, width = sizes(picture)[-1]
    assert (last + width) * float(found[1]) <= WIDTH
    assert min(width for _, width in sizes(picture)) == 2.0


@pytest.mark.parametrize(
    "picture",
    [
        columns([1], [0, 1], [Mark(0, HOSTILE)], HOSTILE),
        bars([Bar(HOSTILE, 1.0, HOSTILE)], HOSTILE),
        lines([Line([(0.0, 1.0)])], HOSTILE),
        lanes([(HOSTILE, [(0.0, 1.0, "a", HOSTILE)])], HOSTILE),
        band([(1.0, "a", HOSTILE)], HOSTILE),
        columns([], [0], [], ""),
        bars([], ""),
        lanes([], ""),
        band([], ""),
    ],
)
def test_pictures_are_well_formed_whatever_the_text(picture: str) -> None:
    assert drawn(picture).tag == "svg"
    assert "<script" not in picture
    assert "\u202e" not in picture


def test_text_is_escaped_and_nothing_hides_in_it() -> None:
    assert escape('<b a="1">&\'\u202e\n') == "&lt;b a=&quot;1&quot;&gt;&amp;&#x27;\\u202e\\n"


def test_times_are_as_exact_as_the_axis_is_short() -> None:
    at = 1_700_000_000.25
    assert [moment_tick(at, span) for span in (2, 60, 7200, 1e6)] == ["13:20.25", "22:13:20", "22:13", "Nov 14"]
    assert moment_tick(1e30, 60) == "?"
