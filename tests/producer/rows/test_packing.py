"""`--pack`, `--balance`, `--pad`, `--split`: what rows that are made of others hold, and in which order they come."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from lazyshard import LazyShardedSequences, Split, StreamReader
from lazyshard.errors import RowInvalid, StreamMismatch
from lazyshard.format.records import arrays_name, chunk_name
from lazyshard.format.row import encode_row
from lazyshard.plan.balance import Cost
from lazyshard_producer.cli import main
from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.position import decode_position
from lazyshard_producer.rows import sequences
from lazyshard_producer.rows.reader import MadeRow
from lazyshard_producer.sources.source import RowOrigin
from tests.harness.processes.producing import lengths, plain_sources, run_arguments
from tests.producer.rows.draining import Taken, make, numbers, samples, take, write
from tests.stream.streams import raised

RECIPES = "tests.producer.recipes"
COUNTED = f"{RECIPES}:counted"
TOKENIZED = f"{RECIPES}:tokenized"
DEALT: dict[str, Any] = {"balance": 2, "micro_batch_size": 2, "samples_per_chunk": 4, "seed": 7}
BOS, EOS, FIRST, LAST = 1, 2, 3, 4


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
    packs = sequences.pack(10, 1, rows, 0)
    assert [json.loads(pack.data)["lengths"] for pack in packs] == [[1, 1], [1, 1], [1], [1]]
    assert [(pack.tokens, pack.squares) for pack in packs] == [(2, 2), (2, 2), (1, 1), (1, 1)]


@pytest.mark.parametrize(
    "more", [{"length_field": "n"}, {"columns": (("length", "n"),)}, {"encode": f"{RECIPES}:of_numpy"}]
)
def test_the_length_may_have_another_name_and_be_one_of_numpys_integers(tmp_path: Path, more: dict[str, Any]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(encode_row({"id": 1, "n": length, "length": length}) for length in (4, 6, 3)))
    assert [one.row["lengths"] for one in take(make(tmp_path / "out", [path], pack=10, **more))] == [[4, 6], [3]]


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


def test_padded_rows_to_the_byte(out: Path, tmp_path: Path) -> None:
    path, row = tmp_path / "rows.jsonl", {"length": 9, "source": "a"}
    first = encode_row({"id": 0, "input_ids": [10, 11], "labels": [-100, 11], **row})
    path.write_bytes(first + encode_row({"id": 1, "input_ids": [20, 21, 22, 23], "labels": [-100, 21, 22, 23], **row}))
    assert main(run_arguments(out, [path], 2, "--pad", 4, "--pad-token", 3, "--no-progress")) == 0
    assert (out / chunk_name(0)).read_bytes() == (
        b'{"id":0,"input_ids":[10,11,3,3],"labels":[-100,11,-100,-100],"length":2,"source":"a",'
        b'"attention_mask":[1,1,0,0]}\n'
        b'{"id":1,"input_ids":[20,21,22,23],"labels":[-100,21,22,23],"length":4,"source":"a",'
        b'"attention_mask":[1,1,1,1]}\n'
    )
    assert lengths(out) == [2, 4]


def test_padded_encoded_rows_to_the_byte(out: Path, tmp_path: Path) -> None:
    paths = write(tmp_path, [1, 3], labels=True)
    assert main(run_arguments(out, paths, 2, "--encode", TOKENIZED, "--pad", 3, "--no-progress")) == 0
    first, second = (out / chunk_name(0)).read_bytes().splitlines()
    assert first == (
        b'{"id":[0,0],"copy":null,"length":1,"input_ids":{"$array":["int32",[3],0]},'
        b'"labels":{"$array":["int32",[3],16]},"attention_mask":{"$array":["int32",[3],32]}}'
    )
    assert second.startswith(b'{"id":[0,1],"copy":null,"length":3,')
    words = np.frombuffer((out / arrays_name(0)).read_bytes()[:96], "<i4").reshape(6, 4)
    assert words[:, :3].tolist() == [[10, 0, 0], [-100] * 3, [1, 0, 0], [11, 12, 13], [-100, 12, 13], [1, 1, 1]]


def test_rows_of_swift_that_are_cut_may_be_of_any_length() -> None:
    common: dict[str, Any] = {"sources": plain_sources(["a"]), "out": "out", "samples_per_chunk": 1}
    common |= {"encode": "swift", "model": "m"}
    forms: list[dict[str, Any]] = [{"split": 8}, {"split": 8, "max_length": 16}, {"pad": 8}, {}]
    assert [Settings(**common, **more).swift["max_length"] for more in forms] == [2**31 - 1, 16, None, None]


def drain(settings: Settings, start: Any = None, samples: int = 0) -> Iterator[Taken]:
    """Yields the sequences as the loop would, from a stream of so many on."""
    for taken in take(settings, start, samples):
        assert taken.tokens == taken.row["length"] == len(taken.row["input_ids"])
        yield taken


def tokens_of(found: Sequence[Taken]) -> list[list[int]]:
    return [taken.row["input_ids"] for taken in found]


def cut(documents: list[list[int]], settings: Settings) -> list[list[int]]:
    """The sequences as one would write them first: one row of all tokens, cut again and again."""
    framed = [[settings.split_bos, *tokens, settings.split_eos] for tokens in documents]
    left = [token for tokens in framed for token in tokens if token is not None]
    found: list[list[int]] = []
    whole, overlap = settings.split + settings.split_overlap, settings.split_overlap
    every_bos, every_eos = settings.split_every_bos, settings.split_every_eos
    while len(left) > (overlap if found else 0):
        line = left if every_bos is None or left[0] == settings.split_bos else [every_bos, *left]
        short = len(line) < whole
        line, left = line[:whole], line[whole:]
        if every_eos is not None and line[-1] != settings.split_eos:
            left = left if short else [line.pop(), *left]
            line.append(every_eos)
        left = line[-1:] * overlap + left if not short else []
        found.append(line)
    return found


FRAMES: list[dict[str, int]] = [
    {},
    {"split_eos": EOS},
    {"split_bos": BOS, "split_eos": EOS, "split_overlap": 1},
    {"split_bos": BOS, "split_every_bos": BOS},
    {"split_eos": EOS, "split_every_bos": FIRST, "split_every_eos": LAST},
    {"split_overlap": 1},
]


@hypothesis_settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_going_on_after_any_sequence(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = tmp_path_factory.mktemp("run")
    files = data.draw(st.lists(st.lists(st.integers(1, 14), max_size=9), min_size=1, max_size=3))
    size, frame = data.draw(st.integers(3, 9)), data.draw(st.sampled_from(FRAMES))
    weighted, encoded = data.draw(st.booleans()), data.draw(st.booleans())
    transform = data.draw(st.sampled_from([None, "twice", "some"]))
    rows = make(
        directory / "out",
        write(directory, *files),
        [random.Random(file).uniform(0.1, 2) for file in range(len(files))] if weighted else None,
        split=0,
        transform=transform and f"{RECIPES}:{transform}",
        shuffle=data.draw(st.sampled_from([0, 0, 4])),
    )
    settings = replace(rows, split=size, encode=TOKENIZED if encoded else None, **frame)  # type: ignore[arg-type]
    whole = list(drain(settings))
    assert tokens_of(whole) == cut(tokens_of(list(take(rows))), settings)
    for number, taken in enumerate(whole, 1):
        assert list(drain(settings, taken.position, number)) == whole[number:]


def test_the_rows_to_the_byte(tmp_path: Path) -> None:
    paths = write(tmp_path, [3, 2, 4], labels=True)
    found = list(drain(make(tmp_path / "out", paths, split=5, split_eos=EOS)))
    assert b"".join(taken.line for taken in found) == (
        b'{"input_ids":[10,11,12,2,13],"labels":[-100,11,12,2,-100],"position_ids":[0,1,2,3,0],"length":5}\n'
        b'{"input_ids":[14,2,15,16,17],"labels":[14,2,-100,16,17],"position_ids":[0,1,0,1,2],"length":5}\n'
        b'{"input_ids":[18,2],"labels":[18,2],"position_ids":[0,1],"length":2}\n'
    )
    first, second = drain(make(tmp_path / "out", write(tmp_path, [1, 2]), split=2, encode=TOKENIZED))
    line = b'{"input_ids":{"$array":["int32",[%d],0]},"position_ids":{"$array":["int32",[%d],8]},"length":%d}\n'
    assert (first.line, second.line) == (line % (2, 2, 2), line % (1, 1, 1))
    assert first.arrays == bytes.fromhex("0a000000 0b000000 00000000 00000000")


def test_least_and_greatest_token_ids_and_labels_are_int32(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(encode_row({"input_ids": [0, 2**31 - 1], "labels": [-(2**31), 2**31 - 1]}))
    (found,) = drain(make(tmp_path / "out", [path], split=2, encode=TOKENIZED))
    assert tokens_of([found]) == [[0, 2**31 - 1]]
    assert (found.line.count(b"int32"), found.line.count(b"int64")) == (3, 0)


def test_positions_tell_the_row_and_the_token(tmp_path: Path) -> None:
    settings = make(tmp_path / "out", write(tmp_path, [4, 7, 1]), split=5, split_eos=EOS)
    taken = list(drain(settings))
    positions = [decode_position(one.position, "out") for one in taken]
    lines = [position.sources[0]["line"] for position in positions if position.sources[0] is not None]
    # Five tokens are the first row; then five of eight of the second one; then all of the rest (behind a blank line).
    assert lines == [1, 1, 4]
    assert [(one.skip, one.cut, one.unit) for one in positions] == [(0, 0, ()), (1, 5, (1,)), (0, 0, ())]
    raised(StreamMismatch, decode_position, {**taken[1].position, "skip": 0, "unit": [], "skipped": ""}, "out")


@pytest.mark.parametrize("form", [{"size": 7, "eos": EOS}, {"size": 6, "bos": BOS, "eos": EOS, "overlap": 1}])
def test_the_sequences_are_those_that_are_made_at_run_time(tmp_path: Path, form: dict[str, int]) -> None:
    paths = write(tmp_path, [5, 9, 1, 20, 3, 3, 8], labels=True)
    options = [part for name, value in form.items() if name != "size" for part in (f"--split-{name}", value)]
    split = run_arguments(tmp_path / "split", paths, 3, "--split", form["size"], *options, "--no-progress")
    # Encoded rows have their lengths in the seals.
    raw = run_arguments(tmp_path / "raw", paths, 2, "--encode", TOKENIZED, "--no-progress")
    assert (main(split), main(raw)) == (0, 0)
    expected = LazyShardedSequences(tmp_path / "raw", form=Split(**form), dp_rank=0, dp_size=1, at_end="complete")
    found = list(StreamReader(tmp_path / "split"))
    assert [{**row, "length": None} for row in found] == [
        {**{name: values.tolist() for name, values in one.items()}, "length": None} for one in expected
    ]
    assert lengths(tmp_path / "split") == [len(row["input_ids"]) for row in found]


def test_a_book_is_cut_into_sequences_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "_MOST", 2)
    settings = make(tmp_path / "out", write(tmp_path, [1, 20]), split=2)
    found = list(drain(settings))
    assert tokens_of(found) == [[token, token + 1] for token in range(10, 30, 2)] + [[30]]
    for number, taken in enumerate(found, 1):
        assert list(drain(settings, taken.position, number)) == found[number:]


def test_a_row_that_is_begun_goes_on_though_its_file_has_grown(tmp_path: Path) -> None:
    settings = make(tmp_path / "out", write(tmp_path, [4, 4]), split=5)
    first, second = drain(settings)
    write(tmp_path, [4, 4, 4])
    assert tokens_of(list(drain(settings, first.position, 1))) == [[15, 16, 17, 18, 19], [20, 21]]
    assert tokens_of(list(drain(settings, second.position, 2))) == [[18, 19, 20, 21]]


def test_rows_with_and_without_labels_make_no_sequence(tmp_path: Path) -> None:
    """Nor may one of them be left out: that would move all tokens behind it."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(encode_row({"input_ids": [7], "labels": [7]}) + encode_row({"input_ids": [8]}))
    settings = make(tmp_path / "out", [path], split=2, on_bad_row="skip")
    caught = raised(RowInvalid, lambda: list(drain(settings)))
    # The row that differs, not the first one of the sequence.
    assert (caught.file, caught.line) == (str(path), 2)
    assert tokens_of(list(drain(replace(settings, columns=(("input_ids", "input_ids"),))))) == [[7, 8]]


@pytest.mark.parametrize(("option", "encode"), [("split", ()), ("pad", ("--encode", TOKENIZED))])
def test_of_sequences_no_others_are_made(out: Path, tmp_path: Path, option: str, encode: tuple[str, ...]) -> None:
    """What pads a row would count as its tokens, and where documents begin would be forgotten."""
    assert main(run_arguments(out, write(tmp_path, [3, 4]), 10, f"--{option}", 5, *encode, "--no-progress")) == 0
    raised(StreamMismatch, LazyShardedSequences, out, None, form=Split(4), dp_rank=0, dp_size=1)
    assert not encode or StreamReader(out).encoding == {"kind": "function", "function": TOKENIZED, "form": option}
