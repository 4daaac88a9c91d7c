"""`--pack`, `--balance` and `--pad`: what packs, stripes and padded rows hold, and in which order they come."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lazyshard import StreamReader
from lazyshard.cli.main import main as lazyshard
from lazyshard.format.records import arrays_name, chunk_name
from lazyshard.format.row import encode_row
from lazyshard.format.seal import DealtByCost
from lazyshard.plan.balance import Cost
from lazyshard_producer.cli import main
from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.rows import sequences
from lazyshard_producer.rows.reader import MadeRow
from lazyshard_producer.sources.source import RowOrigin
from tests.harness.processes.producing import lengths, plain_sources, run_arguments
from tests.plan.evenness import evenness, step_costs
from tests.producer.rows.draining import make, numbers, samples, take, write
from tests.stream.streams import seal
from tests.tiers import full

COUNTED = "tests.producer.recipes:counted"
TOKENIZED = "tests.producer.recipes:tokenized"
DEALT: dict[str, Any] = {"balance": 2, "micro_batch_size": 2, "samples_per_chunk": 4, "seed": 7}


@pytest.mark.parametrize("encode", [None, COUNTED])
def test_packs_are_made_of_one_buffer_after_the_other(tmp_path: Path, encode: str | None) -> None:
    paths, out = write(tmp_path, [6, 5, 4, 5, 4, 9]), tmp_path / "out"
    more = ("--encode", encode) if encode else ()
    assert main(run_arguments(out, paths, 2, "--pack", 10, "--pack-buffer", 4, *more, "--no-progress")) == 0
    rows = list(StreamReader(out))
    assert [[one["id"][1] for one in row["pack"]] for row in rows] == [[0, 2], [1, 3], [4], [5]]
    assert [row["lengths"] for row in rows] == [[6, 4], [5, 5], [4], [9]]
    assert lengths(out) == [10, 10, 4, 9]


def test_an_encoded_pack_to_the_byte(tmp_path: Path) -> None:
    first, second = take(make(tmp_path / "out", write(tmp_path, [3, 2, 1]), encode=COUNTED, pack=4))
    sample = (
        b'{"id":[0,%d],"copy":null,"length":%d,'
        b'"input_ids":{"$array":["int32",[%d],%d]},"more":{"mask":{"$array":["bool",[%d],%d]}}}'
    )
    packed = b",".join([sample % (0, 3, 3, 0, 3, 16), sample % (2, 1, 1, 24, 1, 32)])
    assert first.line == b'{"pack":[' + packed + b'],"lengths":[3,1]}\n'
    parts = ("00000000 01000000 02000000", "00" * 4, "000001", "00" * 5, "00" * 4, "00" * 4, "00", "00" * 7)
    assert first.arrays == bytes.fromhex("".join(parts))
    assert json.loads(second.line)["lengths"] == [2]


@pytest.mark.parametrize("length", [1, 7])
def test_a_buffer_ends_by_its_bytes_too(length: int, tmp_path: Path) -> None:
    """Rows of 4 tokens: 2 go into a pack, and one is left over where the buffer ends after three of them."""
    paths = write(tmp_path, [4] * 6)
    (row,) = {len(taken.line) for taken in take(make(tmp_path / "out", paths, balance=1))}
    settings = make(tmp_path / "out", paths, pack=8, pack_buffer_bytes=2 * row + length)
    assert [len(samples([taken])) for taken in take(settings)] == [2, 1, 2, 1]


def test_a_pack_holds_no_more_bytes_than_readers_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "_PACK_BYTES", 20)
    place = RowOrigin("a", 1, 0)
    rows = [MadeRow(b'{"a":%d}\n' % number, place, 1, 1) for number in range(5)]  # of 8 bytes
    rows.append(MadeRow(b'{"a":"%s"}\n' % (b"x" * 20), place, 1, 1))
    packs = sequences.pack(10, rows, 0)
    assert [json.loads(pack.data)["lengths"] for pack in packs] == [[1, 1], [1, 1], [1], [1]]
    assert [(pack.tokens, pack.squares) for pack in packs] == [(2, 2), (2, 2), (1, 1), (1, 1)]


@pytest.mark.parametrize("more", [{"length_field": "tokens"}, {"columns": (("length", "tokens"),)}])
def test_the_length_may_have_another_name_and_come_from_a_transform(tmp_path: Path, more: dict[str, Any]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(encode_row({"tokens": 4}) + encode_row({"tokens": 6}))
    (found,) = take(make(tmp_path / "out", [path], pack=10, **more))
    assert found.row["lengths"] == [4, 6]


def test_length_may_be_one_of_numpys_integers(tmp_path: Path) -> None:
    paths = write(tmp_path, [4, 6, 3])
    encoded: dict[str, Any] = {"encode": "tests.producer.recipes:of_numpy"}
    assert [one.row["lengths"] for one in take(make(tmp_path / "out", paths, pack=10, **encoded))] == [[4, 6], [3]]
    assert [one.row["length"] for one in take(make(tmp_path / "out", paths, **encoded))] == [4, 6, 3]


@pytest.mark.parametrize("encode", [None, TOKENIZED])
def test_the_order_of_rows_that_are_dealt_is_pinned(tmp_path: Path, encode: str | None) -> None:
    dice = random.Random(0)
    paths = write(tmp_path, [dice.randrange(1, 9) for _ in range(13)])
    found = list(take(make(tmp_path / "out", paths, encode=encode, **DEALT)))
    # Two ranks with chunks of four rows and micro batches of two: 8 + 1 tokens meet 7 + 5, and 7 + 7 meet 8 + 5. Of the
    # five rows at the end, which are dealt row by row, 5 + 3 meet 6 + 3.
    assert [taken.tokens for taken in found] == [8, 1, 7, 7, 7, 5, 8, 5, 5, 6, 3, 3, 4]
    assert numbers(found) == [7, 2, 0, 5, 1, 3, 4, 6, 11, 8, 12, 10, 9]


def test_rows_that_fill_no_stripe_are_published_and_the_next_ones_begin_a_whole_one(tmp_path: Path) -> None:
    """A source that grows after its last rows were dealt: two chunks of four were begun with five rows."""
    lengths = [7, 7, 1, 5, 8, 7, 5, 7, 6, 4, 3, 5, 3, 2, 3, 5]
    settings = make(tmp_path / "out", write(tmp_path, lengths[:5]), **DEALT)
    short = list(take(settings))
    write(tmp_path, lengths)
    # The first chunk was published.
    rest = list(take(settings, short[3].position, 4))
    assert rest[0].line == short[4].line
    # In order up to the end of the stripe, then a stripe that is dealt.
    assert numbers(rest[1:4]) == [5, 6, 7]
    assert sorted(numbers(rest[4:])) == list(range(8, 16))
    assert numbers(rest[4:]) != list(range(8, 16))
    for taken in range(1, len(rest)):
        assert list(take(settings, rest[taken - 1].position, 4 + taken)) == rest[taken:]


def test_a_pack_costs_what_its_samples_do(tmp_path: Path) -> None:
    """All packs have 10 tokens; by squares they cost 100, 82, 52 and 50: the ranks of a step get neighbours."""
    assert Cost(1.0, 0.5).of_packs([10, 10], [100, 50]).tolist() == [60.0, 35.0]
    more: dict[str, Any] = {"pack": 10, "balance": 2, "cost_per_token": 0.0, "cost_per_token_squared": 1.0}
    found = list(take(make(tmp_path / "out", write(tmp_path, [10, 6, 5, 9, 4, 5, 1]), **more)))
    packs = [sorted(sample["length"] for sample in samples([taken])) for taken in found]
    # Two ranks with chunks of two: rank 0 has packs 0 and 1.
    assert sorted(sorted([packs[step], packs[2 + step]]) for step in range(2)) == [[[1, 9], [10]], [[4, 6], [5, 5]]]


@pytest.mark.parametrize("pack", [0, *full(64)])
def test_steps_are_even(tmp_path: Path, pack: int, capsys: pytest.CaptureFixture[str]) -> None:
    dice = random.Random(0)
    paths = write(tmp_path, [min(64, round(dice.lognormvariate(2, 1)) + 1) for _ in range(1500 if pack else 800)])
    options = ["--cost-per-token", 0, "--cost-per-token-squared", 1, "--encode", COUNTED, "--no-progress"]
    options += ["--pack", pack] if pack else []
    found = {}
    for ranks in (1, 4):
        out = tmp_path / str(ranks)
        assert main(run_arguments(out, paths, 40, *options, "--balance", ranks)) == 0
        found_lengths = [row["lengths"] if pack else [row["length"]] for row in StreamReader(out)]
        costs = np.array([float(sum(length * length for length in row)) for row in found_lengths])
        even = evenness(step_costs(costs, 4, 40, ended=True))
        assert even is not None
        found[ranks] = even.overall
        assert lengths(out) == [sum(row) for row in found_lengths]
        assert DealtByCost.read(seal(out, 0).source) == DealtByCost(ranks, 1, "length", 0.0, 1.0)
    assert (found[4] - 1) * 4 < found[1] - 1
    capsys.readouterr()
    assert lazyshard(["inspect", str(tmp_path / "4")]) == 0
    assert " ranks 4, micro batch size 1" in capsys.readouterr().out


def write_labeled(path: Path, lengths: list[int], **more: Any) -> Path:
    """A file of rows {"id": ..., "input_ids": [...], "labels": [...]} of these lengths."""
    rows = []
    for number, length in enumerate(lengths):
        tokens = [10 * (number + 1) + place for place in range(length)]
        rows.append(encode_row({"id": number, "input_ids": tokens, "labels": [-100, *tokens[1:]], **more}))
    path.write_bytes(b"".join(rows))
    return path


def test_padded_rows_to_the_byte(tmp_path: Path) -> None:
    path, out = write_labeled(tmp_path / "rows.jsonl", [2, 4], length=9, source="a"), tmp_path / "out"
    assert main(run_arguments(out, [path], 2, "--pad", 4, "--pad-token", 3, "--no-progress")) == 0
    assert (out / chunk_name(0)).read_bytes() == (
        b'{"id":0,"input_ids":[10,11,3,3],"labels":[-100,11,-100,-100],"length":2,"source":"a",'
        b'"attention_mask":[1,1,0,0]}\n'
        b'{"id":1,"input_ids":[20,21,22,23],"labels":[-100,21,22,23],"length":4,"source":"a",'
        b'"attention_mask":[1,1,1,1]}\n'
    )
    assert lengths(out) == [2, 4]


def test_padded_encoded_rows_to_the_byte(tmp_path: Path) -> None:
    path, out = write_labeled(tmp_path / "rows.jsonl", [1, 3]), tmp_path / "out"
    assert main(run_arguments(out, [path], 2, "--encode", TOKENIZED, "--pad", 3, "--no-progress")) == 0
    first, second = (out / chunk_name(0)).read_bytes().splitlines()
    assert first == (
        b'{"id":0,"copy":null,"length":1,"input_ids":{"$array":["int32",[3],0]},'
        b'"labels":{"$array":["int32",[3],16]},"attention_mask":{"$array":["int32",[3],32]}}'
    )
    assert second.startswith(b'{"id":1,"copy":null,"length":3,')
    words = np.frombuffer((out / arrays_name(0)).read_bytes()[:96], "<i4").reshape(6, 4)
    assert words[:, :3].tolist() == [[10, 0, 0], [-100] * 3, [1, 0, 0], [20, 21, 22], [-100, 21, 22], [1, 1, 1]]


def test_rows_of_swift_that_are_cut_may_be_of_any_length() -> None:
    common: dict[str, Any] = {"sources": plain_sources(["a"]), "out": "out", "samples_per_chunk": 1}
    common |= {"encode": "swift", "model": "m"}
    forms: list[dict[str, Any]] = [{"split": 8}, {"split": 8, "max_length": 16}, {"pad": 8}, {}]
    assert [Settings(**common, **more).swift["max_length"] for more in forms] == [2**31 - 1, 16, None, None]
