"""`lazyshard inspect --shuffle`; the arithmetic: tests/plan/test_shuffle_distance."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lazyshard.cli.main import main
from tests.cli.commands import contents
from tests.stream.streams import foreign, produce


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    assert main(["inspect", *map(str, arguments)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out.splitlines()


def values(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    (line,) = shown(capsys, *arguments, "--json")
    return json.loads(line)


def test_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream = produce(tmp_path / "s", 4008, 10)
    before = contents(stream)
    page = shown(capsys, stream, "--shuffle", "--ranks", 4, "--batch-size", 5, "--window", "0,2,all")
    assert page == [
        str(stream),
        "  4,008 samples in chunks of 10, ended",
        "  4 ranks, 1,000 samples each in an epoch; dealt by chunk; a step is 5 samples a rank",
        "",
        "            neighbours                      drawn in turn         one chunk",
        "  window    expected  measured  in steps    expected  measured    expected  measured",
        "       0        1.60      1.60      0.32        3.99      3.97        5.00      5.00",
        "       2        7.12      7.14      1.43       25.59     25.72        2.89      2.91",
        "     all       334.3     331.9     66.38       1,337     1,332        1.04      1.04",
        "",
        "  neighbours     two samples side by side in the stream: how many samples a rank draws from one to the other",
        "  drawn in turn  two samples that a rank draws one after the other: how many samples apart in the stream",
        "  one chunk      of a rank's samples in a step, how many lie in the chunk of one of them, itself included",
        "",
        "  neighbours are 334 apart at the most: --window all, all of a rank in one window",
    ]
    assert contents(stream) == before


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream = produce(tmp_path / "s", 40, 10)
    found = values(capsys, stream, "--shuffle", "--ranks", 2, "--batch-size", 5, "--window", "0")
    # Chunks 0 and 2 are rank 0's. From the end of a chunk to the next one: 9 back within a stripe, 1 to the next.
    assert found == {
        "stream": str(stream),
        "samples": 40,
        "ended": True,
        "samples_per_chunk": 10,
        "ranks": 2,
        "unit": 10,
        "batch_size": 5,
        "rank_samples": 20,
        "largest_neighbours": 7,
        "windows": [
            {
                "window": 0,
                "positions": 0,
                "expected": {
                    "neighbours": round((36 + 9 + 1 + 9) / 39, 6),
                    "neighbours_steps": round((36 + 9 + 1 + 9) / 39 / 5, 6),
                    "in_turn": round((18 + 11) / 19, 6),
                    "same_chunk": 5.0,
                },
                "measured": {
                    "neighbours": round((36 + 9 + 1 + 9) / 39, 6),
                    "neighbours_steps": round((36 + 9 + 1 + 9) / 39 / 5, 6),
                    "in_turn": round((18 + 11) / 19, 6),
                    "same_chunk": 5.0,
                    "samples": 40,
                },
            }
        ],
    }


def test_defaults_are_one_rank_and_the_windows_of_ms_swift(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = values(capsys, produce(tmp_path / "s", 40, 2), "--shuffle")
    assert (found["ranks"], found["unit"], found["batch_size"]) == (1, 2, 1)
    assert [(one["window"], one["positions"]) for one in found["windows"]] == [(0, 0), (2, 4), (8, 16)]


def test_auto_stands_for_batches_where_ranks_outnumber_chunks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--shuffle", "--unit", "auto", "--ranks", 8, "--batch-size", 4, "--window", 2)
    assert values(capsys, produce(tmp_path / "s", 70, 10), *arguments)["unit"] == 4
    live = produce(tmp_path / "live", 70, 10, end=False)
    assert main(["inspect", str(live), *map(str, arguments)]) == 2
    assert "certain once 80 samples are published or the stream has ended; there are 70" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("unit", "samples", "positions"),
    [("chunk", 10, 20), ("sample", 1, 20), ("batch", 4, 20), ("7", 7, 21), ("auto", 10, 20)],
)
def test_windows_hold_whole_units(
    unit: str, samples: int, positions: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = values(
        capsys, produce(tmp_path / "s", 400, 10), "--shuffle", "--unit", unit, "--batch-size", 4, "--window", 2
    )
    assert (found["unit"], found["windows"][0]["positions"]) == (samples, positions)


def test_a_growing_stream_is_measured_as_far_as_it_can_be_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = produce(tmp_path / "s", 100, 10, end=False)
    found = values(capsys, stream, "--shuffle", "--ranks", 2, "--window", "0,2,3,8")
    assert (found["rank_samples"], found["largest_neighbours"]) == (None, None)
    # 5 stripes of 2 chunks: 2 windows of 2, 1 of 3, none of 8.
    assert [one["measured"]["samples"] for one in found["windows"]] == [100, 80, 60, 0]
    assert found["windows"][3]["measured"]["neighbours"] is None
    assert found["windows"][3]["expected"]["neighbours"] == pytest.approx(81 / 3, abs=1)
    page = shown(capsys, stream, "--shuffle", "--ranks", 2, "--window", "0,8")
    assert page[1:3] == [
        "  100 samples in chunks of 10, published so far",
        "  2 ranks; dealt by chunk; a step is 1 sample a rank",
    ]
    assert page[7].split() == ["8", "27.30", "-", "-", "54.91", "-", "1.00", "-"]
    assert page[-1] == "  not measured: 8; too little is published for every rank's first window"


def test_empty_stream_has_nothing_to_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = values(capsys, produce(tmp_path / "s", 0, 10, end=False), "--shuffle", "--window", "0,2")
    assert [one["measured"]["samples"] for one in found["windows"]] == [0, 0]


def test_directory_of_another_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = foreign(tmp_path / "f", b"{}\n{}\n", b"{}\n{}\n", end=True)
    found = values(capsys, directory, "--shuffle", "--ranks", 2, "--window", 0)
    assert (found["samples_per_chunk"], found["windows"][0]["measured"]["samples"]) == (2, 4)


def test_no_row_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream = produce(tmp_path / "s", 40, 10)
    for chunk in stream.glob("chunk_*.jsonl"):
        os.truncate(chunk, 0)
    assert values(capsys, stream, "--shuffle", "--window", "all")["windows"][0]["measured"]["samples"] == 40


def test_of_a_long_stream_whole_windows_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lazyshard.plan.shuffle_measured.measure.__defaults__", (800,))
    page = shown(capsys, produce(tmp_path / "s", 40_000, 1000), "--shuffle", "--ranks", 2, "--unit", 10, "--window", 0)
    # 8 stretches of 4 of the 2,000 stripes, and what lies behind each.
    assert page[-1] == "  measured in whole windows of 640 samples or more, of 40,000"
