"""Rows that are encoded, packed and dealt by cost together: what is published, and going on after any row of it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from lazyshard import StreamReader
from lazyshard.cli.main import main as lazyshard
from lazyshard.format.arrays import fill_row
from lazyshard.format.batch import decode_pack
from lazyshard.format.names import seal_name
from lazyshard.format.row import encode_row
from lazyshard.format.seal import Seal
from lazyshard.plan.balance import Cost
from lazyshard_producer.cli import main
from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.errors import SettingInvalid, SourceRefused
from lazyshard_producer.rows import sequences
from lazyshard_producer.rows.reader import MadeRow
from lazyshard_producer.rows.sequences import packing
from lazyshard_producer.sources.source import RowOrigin
from tests.harness.processes.producing import run_arguments
from tests.plan.evenness import evenness, step_costs
from tests.producer.rows import draining
from tests.producer.rows.draining import Taken, take, write_lengths

ENCODE = "tests.producer.encoders:counted"
RECIPES = "tests.producer.recipes"


def make(out: Path, paths: Sequence[Path], weights: Sequence[float] | None = None, **more: Any) -> Settings:
    return draining.make(out, paths, weights, **({"samples_per_chunk": 2} | more))


def samples_of(taken: Taken) -> list[dict[str, Any]]:
    """The samples of a row, each looked at: its arrays are what its encoder has made."""
    row = json.loads(taken.line)
    fill_row(row, np.frombuffer(taken.arrays, np.uint8))
    pack = decode_pack(row)
    samples = [row] if pack is None else pack.rows
    lengths = [sample["length"] for sample in samples]
    assert taken.tokens == sum(lengths)
    if pack is not None:
        assert pack.lengths == lengths
    for sample in samples:
        if "input_ids" in sample:
            assert sample["input_ids"].tolist() == list(range(sample["length"]))
            assert sample["more"]["mask"].tolist() == [number > 1 for number in range(sample["length"])]
    return samples


@hypothesis_settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    files=st.lists(st.lists(st.integers(1, 10), max_size=14), min_size=1, max_size=3),
    weighted=st.booleans(),
    encoded=st.booleans(),
    packed=st.sampled_from([{}, {"pack": 10, "pack_buffer": 5}, {"pack": 10, "pack_buffer": 100}, {"pack": 12}]),
    bytes_of_buffer=st.sampled_from([1, 300, 1 << 30]),
    ranks=st.sampled_from([None, 1, 2, 3]),
    transform=st.sampled_from([None, "twice", "five"]),
)
def test_going_on_after_any_row(
    tmp_path_factory: pytest.TempPathFactory,
    files: list[list[int]],
    weighted: bool,
    encoded: bool,
    packed: dict[str, int],
    bytes_of_buffer: int,
    ranks: int | None,
    transform: str | None,
) -> None:
    directory = tmp_path_factory.mktemp("run")
    more: dict[str, Any] = {"encode": ENCODE if encoded else None, **packed}
    if packed:
        more["pack_buffer_bytes"] = bytes_of_buffer
    elif ranks is None:
        ranks = 2
    settings = make(
        directory / "out",
        write_lengths(directory, files),
        [random.Random(file).uniform(0.1, 2) for file in range(len(files))] if weighted else None,
        transform=transform and f"{RECIPES}:{transform}",
        balance=ranks,
        **more,
    )
    whole = list(take(settings))
    ids = [[file, number] for file, lengths in enumerate(files) for number in range(len(lengths))]
    times = {None: 1, "twice": 2, "five": 5}[transform]
    assert sorted(sample["id"] for taken in whole for sample in samples_of(taken)) == sorted(ids * times)
    assert all((taken.tokens or 0) <= more.get("pack", 10) for taken in whole)
    for number, taken in enumerate(whole, 1):
        # The same rows with the same positions, so seals come out the same too.
        assert list(take(settings, taken.position, number)) == whole[number:]


def test_an_encoded_pack_to_the_byte(tmp_path: Path) -> None:
    first, second = take(make(tmp_path / "out", write_lengths(tmp_path, [[3, 2, 1]]), encode=ENCODE, pack=4))
    assert first.line == (
        b'{"pack":['
        b'{"id":[0,0],"copy":null,"length":3,"input_ids":{"$array":["int32",[3],0]},"more":{"mask":{"$array":["bool",[3],16]}}},'
        b'{"id":[0,2],"copy":null,"length":1,"input_ids":{"$array":["int32",[1],24]},"more":{"mask":{"$array":["bool",[1],32]}}}'
        b'],"lengths":[3,1]}\n'
    )
    parts = ("00000000 01000000 02000000", "00" * 4, "000001", "00" * 5, "00" * 4, "00" * 4, "00", "00" * 7)
    assert first.arrays == bytes.fromhex("".join(parts))
    assert json.loads(second.line)["lengths"] == [2]


def test_encoded_rows_are_dealt_as_raw_ones_of_these_lengths(tmp_path: Path) -> None:
    dice = random.Random(0)
    paths = write_lengths(tmp_path, [[dice.randrange(1, 9) for _ in range(13)]])
    more: dict[str, Any] = {"samples_per_chunk": 4, "balance": 2, "micro_batch_size": 2, "seed": 7}
    encoded = [samples_of(taken) for taken in take(make(tmp_path / "out", paths, encode=ENCODE, **more))]
    raw = [samples_of(taken) for taken in take(make(tmp_path / "out", paths, **more))]
    assert [row["id"] for (row,) in encoded] == [row["id"] for (row,) in raw]
    assert [row["length"] for (row,) in encoded] == [8, 1, 7, 7, 7, 5, 8, 5, 5, 6, 3, 3, 4]


def test_a_pack_costs_what_its_samples_do(tmp_path: Path) -> None:
    """All packs have 10 tokens; by squares they cost 100, 82, 52 and 50: the ranks of a step get neighbours."""
    more: dict[str, Any] = {"pack": 10, "balance": 2, "cost_per_token": 0.0, "cost_per_token_squared": 1.0}
    found = list(take(make(tmp_path / "out", write_lengths(tmp_path, [[10, 6, 5, 9, 4, 5, 1]]), **more)))
    packs = [sorted(sample["length"] for sample in samples_of(taken)) for taken in found]
    # Two ranks with chunks of two: rank 0 has packs 0 and 1.
    steps = sorted(sorted([packs[step], packs[2 + step]]) for step in range(2))
    assert steps == [[[1, 9], [10]], [[4, 6], [5, 5]]]


def test_steps_of_packs_are_even(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dice = random.Random(0)
    paths = write_lengths(tmp_path, [[min(64, round(dice.lognormvariate(2, 1)) + 1) for _ in range(2000)]])
    options = ["--pack", 64, "--cost-per-token", 0, "--cost-per-token-squared", 1, "--encode", ENCODE, "--no-progress"]
    found = {}
    for name, dealt in (("dealt", ["--balance", 4]), ("in order", ["--balance", 1])):
        assert main(run_arguments(tmp_path / name, paths, 40, *options, *dealt)) == 0
        rows = list(StreamReader(tmp_path / name))
        costs = [float(sum(length * length for length in row["lengths"])) for row in rows]
        even = evenness(step_costs(np.array(costs), 4, 40, ended=True))
        assert even is not None
        found[name] = even.overall
        seal = Seal.decode((tmp_path / name / seal_name(0)).read_bytes(), 0)
        assert seal.tokens is not None
        assert seal.tokens.tolist() == [sum(row["lengths"]) for row in rows[:40]]
    assert (found["dealt"] - 1) * 5 < found["in order"] - 1
    capsys.readouterr()
    assert lazyshard(["inspect", str(tmp_path / "dealt")]) == 0
    assert "  balance            dealt by cost for 4 ranks, micro batches of 1" in capsys.readouterr().out.splitlines()


def test_a_cost_by_squares_of_samples() -> None:
    assert Cost(1.0, 0.5).of_packs([10, 10], [100, 50]).tolist() == [60.0, 35.0]


def test_a_stripe_that_is_begun_is_dealt_as_before_though_its_file_has_grown(tmp_path: Path) -> None:
    """The buffers of the last stripe were of four rows and of two; what has been added makes buffers of its own."""
    paths = write_lengths(tmp_path, [[9, 8, 7, 6, 5, 4]])
    settings = make(tmp_path / "out", paths, pack=10, pack_buffer=4, balance=4)
    before = list(take(settings))
    write_lengths(tmp_path, [[9, 8, 7, 6, 5, 4, 6, 5]])
    for number, taken in enumerate(before[:-1], 1):
        after = list(take(settings, taken.position, number))
        assert [one.line for one in after[: len(before) - number]] == [one.line for one in before[number:]]
        rest = [sample["length"] for one in after[len(before) - number :] for sample in samples_of(one)]
        assert sorted(rest) == [5, 6]


@pytest.mark.parametrize("length", [1, 7])
def test_a_buffer_ends_by_its_bytes_too(length: int, tmp_path: Path) -> None:
    """Rows of 4 tokens: 2 go into a pack, and one is left over where the buffer ends after three of them."""
    paths = write_lengths(tmp_path, [[4] * 6])
    (row,) = {len(taken.line) for taken in take(make(tmp_path / "out", paths, balance=1))}
    settings = make(tmp_path / "out", paths, pack=8, pack_buffer_bytes=2 * row + length)
    assert [len(samples_of(taken)) for taken in take(settings)] == [2, 1, 2, 1]


def test_a_pack_holds_no_more_bytes_than_readers_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "_PACK_BYTES", 20)
    place = RowOrigin("a", 1, 0)
    rows = [MadeRow(b'{"a":%d}\n' % number, place, 1, 1) for number in range(5)]  # of 8 bytes
    rows.append(MadeRow(b'{"a":"%s"}\n' % (b"x" * 20), place, 1, 1))
    packs = packing(10, 1000, 10).arrange(rows, 0)
    assert [json.loads(pack.data)["lengths"] for pack in packs] == [[1, 1], [1, 1], [1], [1]]
    assert [(pack.tokens, pack.squares) for pack in packs] == [(2, 2), (2, 2), (1, 1), (1, 1)]


def test_rows_that_an_encoder_makes_otherwise_are_refused(tmp_path: Path) -> None:
    paths = write_lengths(tmp_path, [[9, 8, 7, 6]])
    settings = make(tmp_path / "out", paths, encode=ENCODE, pack=10, balance=2)
    _, _, third, _ = take(settings)
    paths[0].write_bytes(paths[0].read_bytes().replace(b'"length":9', b'"length":8').replace(b":7}", b":6}"))
    with pytest.raises(SourceRefused):
        list(take(settings, third.position, 3))


def test_in_the_middle_of_a_stripe_packs_are_made_as_before(tmp_path: Path) -> None:
    paths = write_lengths(tmp_path, [[3, 4, 5, 6, 7, 8]])
    more: dict[str, Any] = {"encode": ENCODE, "pack": 10, "balance": 2}
    first, *_ = take(make(tmp_path / "out", paths, **more))
    for changed in ({"pack": 11}, {"pack_buffer": 4}, {"pack_buffer_bytes": 99}, {"pack": 0}, {"balance": None}):
        with pytest.raises(SettingInvalid, match="made in another way"):
            list(take(make(tmp_path / "out", paths, **{**more, **changed}), first.position, 1))


def test_other_weights_are_refused_where_stripes_share_a_buffer(tmp_path: Path) -> None:
    paths = write_lengths(tmp_path, [[10] * 9, [10] * 9])
    more: dict[str, Any] = {"pack": 10, "balance": 2, "pack_buffer": 6}
    fifth = list(take(make(tmp_path / "out", paths, [1, 2], **more)))[4]
    with pytest.raises(SettingInvalid, match="weights"):
        list(take(make(tmp_path / "out", paths, [2, 1], **more), fifth.position, 5))


@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        ({"pack": 10}, [None, 3.0, True, [3], 0, 11]),
        ({"balance": 2}, [None, "12"]),
        ({"pack": 10, "balance": 2}, [11]),
    ],
)
def test_an_encoded_row_that_goes_into_no_pack_is_a_bad_row(
    options: dict[str, int], lengths: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = write_lengths(tmp_path, [[4, 4, 6]])
    lines = path.read_bytes().splitlines(keepends=True)
    flags = [text for name, value in options.items() for text in (f"--{name}", value)]
    for number, length in enumerate(lengths):
        out = tmp_path / str(number)
        path.write_bytes(b"".join([lines[0], encode_row({"id": [0, 1], "length": length}), lines[2]]))
        encode = ("--encode", "tests.producer.encoders:as_told")
        arguments = run_arguments(out, [path], 10, *encode, *flags, "--no-progress")
        assert main(arguments) == 3
        assert f"{path}:2: {flags[0]}: " in capsys.readouterr().err
        assert main([*arguments, "--on-bad-row", "quarantine"]) == 0
        rows = [row for found in StreamReader(out) for row in found.get("pack", [found])]
        assert sorted(row["id"][1] for row in rows) == [0, 2]
        (entry,) = map(json.loads, (out / "quarantine.jsonl").read_bytes().splitlines())
        assert (entry["line"], entry["reason"].startswith(f"{flags[0]}: ")) == (2, True)


def test_length_may_be_one_of_numpys_integers(tmp_path: Path) -> None:
    (path,), out = write_lengths(tmp_path, [[4, 6, 3]]), tmp_path / "out"
    encoded = ("--encode", "tests.producer.encoders:of_numpy", "--no-progress")
    assert main(run_arguments(out, [path], 10, *encoded, "--pack", 10)) == 0
    assert [row["lengths"] for row in StreamReader(out)] == [[4, 6], [3]]
    assert main(run_arguments(tmp_path / "plain", [path], 10, *encoded)) == 0
    assert [row["length"] for row in StreamReader(tmp_path / "plain")] == [4, 6, 3]
    tokens = Seal.decode((tmp_path / "plain" / seal_name(0)).read_bytes(), 0).tokens
    assert tokens is not None
    assert tokens.tolist() == [4, 6, 3]


def test_workers_make_the_same_of_it(tmp_path: Path) -> None:
    dice = random.Random(1)
    paths = write_lengths(tmp_path, [[dice.randrange(1, 11) for _ in range(40)]])
    more: dict[str, Any] = {"encode": ENCODE, "pack": 10, "pack_buffer": 7, "balance": 2}
    there = list(take(make(tmp_path / "out", paths, workers=1, **more)))
    assert there == list(take(make(tmp_path / "out", paths, **more)))


def test_check_tells_what_lengths_and_buffers_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = run_arguments(tmp_path / "out", write_lengths(tmp_path, [[3, 4]]), 2, "--encode", ENCODE)
    assert main(["check", *arguments[1:], "--pack", "10", "--balance", "2"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "packed to 10 tokens by the encoder's length, among 10,000 rows at a time, fewer where they hold 1" in shown
    assert "dealt by cost to 2 ranks, 4 at a time, micro batches of 1, lengths in the encoder's length" in shown
    assert '{"pack":[{"id":[0,0],' in shown
