"""`lazyshard inspect --balance`; the arithmetic: tests/plan/test_balance."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lazyshard import ChunkWriter
from lazyshard.cli.main import main
from lazyshard.format import Tokens, seal_digest
from lazyshard.inspection import inspection_balance
from tests.cli.commands import contents, fill

MADE = {"balance": 2, "micro_batch_size": 2, "length_field": "n", "cost_per_token": 1.0}


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    assert main(["inspect", *map(str, arguments)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out.splitlines()


def values(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    (line,) = shown(capsys, *arguments, "--json")
    return json.loads(line)


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main(["inspect", *map(str, arguments)])
    printed = capsys.readouterr()
    assert printed.out == ""
    return code, printed.err


def put_tokens(stream: Path, chunk: int, lengths: list[int]) -> None:
    """Leaves measured lengths beside a seal."""
    digest = seal_digest((stream / f"chunk_{chunk:05d}.jsonl.completed").read_bytes())
    tokens = Tokens(chunk, digest, np.array(lengths, np.uint32), "a test", 1.0)
    (stream / f"chunk_{chunk:05d}.jsonl.tokens").write_bytes(tokens.encode())


def produce(
    directory: Path, lengths: list[int], per_chunk: int, *, sealed: bool = True, end: bool = True, made: Any = None
) -> Path:
    writer = ChunkWriter(directory, per_chunk)
    for number, length in enumerate(lengths):
        writer.write({"id": number, "n": length}, tokens=length if sealed else None, source={"recipe": made or {}})
    writer.close(end=end)
    return directory


def test_measured_lengths_count_for_more_than_sealed_ones_and_than_fields(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sealed = produce(tmp_path / "sealed", [7, 7, 7, 7], 2)
    put_tokens(sealed, 1, [1, 3])
    assert shown(capsys, sealed, "--balance", 2)[4] == (
        "  all rows looked at, lengths of 2 as measured since they were sealed, 2 from the seals"
    )
    bare = produce(tmp_path / "bare", [7, 7, 7, 7], 2, sealed=False)
    put_tokens(bare, 0, [2, 4])
    found = values(capsys, bare, "--balance", 2, "--length-field", "n", "--cost-per-token-squared", 0)
    assert (found["lengths_from_seals"], found["lengths_measured"]) == (0, 2)
    # Steps of (2, 7) and (4, 7), tokens of which the half as measured.
    assert found["ranks"][1]["as_it_is"]["overall"] == pytest.approx(14 / 10)
    put_tokens(bare, 1, [1, 1])
    # No row has to tell anything any more.
    assert shown(capsys, bare, "--balance", 2)[4] == "  all rows looked at, lengths as measured since they were sealed"


def test_torn_file_of_lengths_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream = produce(tmp_path / "s", [7, 7, 7, 7], 2)
    (stream / "chunk_00001.jsonl.tokens").write_bytes(b"{")
    code, error = refused(capsys, stream, "--balance", 2)
    assert code == 5
    assert "chunk_00001.jsonl.tokens: expected a JSON object" in error


def test_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Two ranks, chunks of four: steps of (1, 2), (2, 2), (9, 3) and (4, 4), then two of (5, 5), row by row.
    stream = produce(tmp_path / "s", [1, 2, 9, 4, 2, 2, 3, 4, 5, 5, 5, 5], 4)
    before = contents(stream)
    page = shown(capsys, stream, "--balance", 2, "--cost-per-token-squared", 0)
    assert page[:9] == [
        str(stream),
        "  12 samples in chunks of 4, ended",
        "  not dealt by cost",
        "  micro batches of 1 row; a row costs 1 * tokens + 0 * tokens^2",
        "  all rows looked at, lengths from the seals",
        "",
        "                  as it is                              by chance                       "
        "      dealt for 2 ranks",
        "  ranks  steps    overall     mean      p99    worst    overall     mean      p99    worst    overall     mean"
        "      p99    worst",
        "      1     12      1.000    1.000    1.000    1.000      1.000    1.000    1.000    1.000      1.000    1.000"
        "    1.000    1.000",
    ]
    assert page[9].startswith("      2      6      1.149    1.139    1.492    1.500")
    assert page[10].startswith("      4      3      ")
    assert contents(stream) == before


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream = produce(tmp_path / "s", [4, 1, 1, 4], 2, made=MADE | {"micro_batch_size": 1})
    # Steps of (4, 1) and (1, 4). Dealt for these ranks by this cost: so that is not done once more.
    even = {"steps": 2, "overall": 1.6, "mean": 1.6, "p99": 1.6, "worst": 1.6, "between": 1.0}
    found = values(capsys, stream, "--balance", 2)
    by_chance = found["ranks"][1].pop("by_chance")
    assert by_chance["steps"] == 2
    assert found == {
        "stream": str(stream),
        "samples": 4,
        "ended": True,
        "samples_per_chunk": 2,
        "dealt_by_cost": {
            "ranks": 2,
            "micro_batch_size": 1,
            "length_field": "n",
            "cost_per_token": 1.0,
            "cost_per_token_squared": 0.0,
        },
        "micro_batch_size": 1,
        "cost_per_token": 1.0,
        "cost_per_token_squared": 0.0,
        "looked_at": 4,
        "lengths_from_seals": 4,
        "lengths_measured": 0,
        "packed": False,
        "ranks": [
            {
                "ranks": 1,
                "as_it_is": {"steps": 4, "overall": 1.0, "mean": 1.0, "p99": 1.0, "worst": 1.0, "between": 1.6},
                "by_chance": {"steps": 4, "overall": 1.0, "mean": 1.0, "p99": 1.0, "worst": 1.0, "between": 1.6},
                "dealt": None,
            },
            {"ranks": 2, "as_it_is": even, "dealt": None},
            {
                "ranks": 4,
                "as_it_is": {"steps": 1, "overall": 1.6, "mean": 1.6, "p99": 1.6, "worst": 1.6, "between": 1.0},
                "by_chance": {"steps": 1, "overall": 1.6, "mean": 1.6, "p99": 1.6, "worst": 1.6, "between": 1.0},
                "dealt": None,
            },
        ],
    }


def test_what_the_stream_was_dealt_for_is_taken_where_nothing_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = produce(tmp_path / "s", [1, 2, 3, 4] * 4, 4, sealed=False, made=MADE)
    found = values(capsys, stream, "--balance", 4)
    assert (found["micro_batch_size"], found["cost_per_token_squared"]) == (2, 0.0)
    assert (found["looked_at"], found["lengths_from_seals"]) == (16, 0)
    assert [one["ranks"] for one in found["ranks"]] == [2, 4, 8]
    assert found["ranks"][1]["dealt"]["steps"] == 2
    page = shown(capsys, stream, "--balance", 2)
    assert page[2] == "  dealt by cost for 2 ranks with micro batches of 2"
    assert page[4] == "  all rows looked at, lengths from the field 'n'"
    assert page[-1] == "  a shuffle window puts rows into other steps: read a stream that is dealt by cost without one"


def test_what_is_given_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream = produce(tmp_path / "s", [1, 2, 3, 4] * 4, 4, sealed=False, made=MADE)
    arguments = ("--micro-batch-size", 3, "--length-field", "id", "--cost-per-token", 2, "--cost-per-token-squared", 1)
    found = values(capsys, stream, "--balance", 3, *arguments)
    assert (found["micro_batch_size"], found["cost_per_token"], found["cost_per_token_squared"]) == (3, 2.0, 1.0)
    assert [one["ranks"] for one in found["ranks"]] == [3, 6]
    # Chunks of four hold no whole micro batches of three.
    assert [one["dealt"] for one in found["ranks"]] == [None, None]
    assert any(
        line.startswith("  not dealt: chunks of 4") for line in shown(capsys, stream, "--balance", 3, *arguments)
    )


def test_a_directory_of_another_program_has_lengths_in_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = fill(tmp_path / "s", *(b'{"length":%d}\n{"length":2}\n' % number for number in range(1, 5)))
    for number in range(4):
        (stream / f"chunk_{number:05d}.jsonl.completed").touch()
    found = values(capsys, stream, "--balance", 2)
    assert (found["samples"], found["lengths_from_seals"], found["ranks"][1]["as_it_is"]["steps"]) == (8, 0, 4)


def test_of_a_growing_stream_what_fills_no_stripe_is_not_dealt_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = produce(tmp_path / "s", [5] * 10, 2, end=False)
    found = values(capsys, stream, "--balance", 2)
    assert [one["as_it_is"]["steps"] for one in found["ranks"]] == [10, 4, 2]
    assert shown(capsys, stream, "--balance", 2)[1] == "  10 samples in chunks of 2, published so far"


def test_a_stream_without_a_row_has_no_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream = produce(tmp_path / "s", [], 4, end=False)
    page = shown(capsys, stream, "--balance", 2)
    assert page[4] == "  no row looked at"
    assert page[8] == "      1      0          -        -        -        -          -        -        -        -"


def test_of_a_long_stream_evenly_spaced_pieces_are_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection_balance, "SAMPLED_ROWS", 24)
    dice = random.Random(0)
    stream = produce(tmp_path / "s", [dice.randrange(1, 9) for _ in range(103)], 2)
    # Pieces of eight rows, a chunk for each of four ranks.
    assert values(capsys, stream, "--balance", 2)["looked_at"] == 24
    assert shown(capsys, stream, "--balance", 2)[4] == "  24 rows looked at, lengths from the seals"
    assert values(capsys, stream, "--balance", 2, "--all")["looked_at"] == 103


def test_a_row_without_a_length_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream = produce(tmp_path / "s", [1, 2, 3], 2, sealed=False)
    code, error = refused(capsys, stream, "--balance", 2)
    assert code == 3
    assert "chunk_00000.jsonl: row 0 (byte 0): expected its length in tokens in the field 'length'" in error
    assert "found none among id, n; name the field with --length-field" in error


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--micro-batch-size", 2), "--micro-batch-size: goes with --balance"),
        (("--length-field", "n"), "--length-field: goes with --balance"),
        (("--cost-per-token", 2), "--cost-per-token: goes with --balance"),
        (("--balance", 2, "--shuffle"), "--shuffle: goes with none of"),
        (("--balance", 2, "--full"), "--balance: goes with none of"),
        (("--balance", 2, "--chunk", 0), "--balance: goes with none of"),
        (("--balance", 0), "--balance"),
        (("--balance", 2, "--cost-per-token", -1), "--cost-per-token"),
        (("--balance", 2, "--cost-per-token", 0, "--cost-per-token-squared", 0), "cannot both be 0"),
    ],
)
def test_mistakes(
    arguments: tuple[object, ...], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = produce(tmp_path / "s", [1, 2, 3], 2)
    code, said = refused(capsys, stream, *arguments)
    assert code == 2
    assert error in said
