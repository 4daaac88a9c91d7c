"""`--split`: rows come out as sequences, each token once, the same ones wherever a run stopped."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from lazyshard import LazyShardedSequences, Split, StreamReader
from lazyshard.errors import StreamMismatch
from lazyshard.format.names import seal_name
from lazyshard.format.row import encode_row
from lazyshard.format.seal import Seal
from lazyshard_producer.cli import main
from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.errors import SettingInvalid, SourceRefused
from lazyshard_producer.position import decode_position
from lazyshard_producer.rows import sequences
from lazyshard_producer.rows.pipeline import Pipeline
from tests.harness.processes.producing import run_arguments
from tests.producer.rows import draining
from tests.producer.rows.draining import Taken

RECIPES = "tests.producer.recipes"
ENCODE = "tests.producer.encoders:tokenized"
BOS, EOS, FIRST, LAST = 1, 2, 3, 4

Row = dict[str, Any]


def write(directory: Path, *files: Sequence[int], labels: bool = False) -> list[Path]:
    """Files of rows {"id": [file, number], "input_ids": [...]} of these lengths; no token comes twice."""
    paths, token = [], 10
    for file, lengths in enumerate(files):
        rows = []
        for number, length in enumerate(lengths):
            tokens = list(range(token, token + length))
            token += length
            more = {"labels": [-100, *tokens[1:]]} if labels else {}
            rows.append(encode_row({"id": [file, number], "input_ids": tokens, **more}))
        path = directory / f"{file}.jsonl"
        path.write_bytes(b"".join(rows))
        paths.append(path)
    return paths


def make(directory: Path, paths: Sequence[Path], weights: Sequence[float] | None = None, **more: Any) -> Settings:
    return draining.make(directory / "out", paths, weights, **{"split": 6, **more})


def drain(
    settings: Settings, start: Any = None, samples: int = 0, warnings: list[str] | None = None
) -> Iterator[Taken]:
    """Yields the sequences as the loop would, from a stream of so many on."""
    for taken in draining.take(settings, start, samples, warnings):
        assert taken.tokens == taken.row["length"] == len(taken.row["input_ids"])
        yield taken


def tokens_of(found: Sequence[Taken]) -> list[list[int]]:
    return [taken.row["input_ids"] for taken in found]


def written(documents: Sequence[list[int]], settings: Settings) -> list[Row]:
    """The sequences as one would write them first: one row of tokens, each with its document's number, cut again and
    again."""
    left: list[tuple[int, int]] = []
    for number, tokens in enumerate(documents):
        own = [settings.split_bos] * (settings.split_bos is not None) + tokens
        left += [
            (token, number)
            for token in [*own, *[settings.split_eos] * (settings.split_eos is not None)]
            if token is not None
        ]
    found: list[Row] = []
    overlap = settings.split_overlap
    while len(left) > (overlap if found else 0):
        line = left
        if settings.split_every_bos is not None and left[0][0] != settings.split_bos:
            line = [(settings.split_every_bos, left[0][1]), *left]
        short = len(line) < settings.split + overlap
        line = line[: settings.split + overlap]
        left = left[len(line) - (line[0] is not left[0]) :]
        if settings.split_every_eos is not None and line[-1][0] != settings.split_eos:
            if not short:
                left = [line.pop(), *left]
            line.append((settings.split_every_eos, line[-1][1]))
        if overlap and not short:
            left = [line[-1], *left]
        if short:
            left = []
        positions = [0]
        for before, after in itertools.pairwise(line):
            positions.append(positions[-1] + 1 if after[1] == before[1] else 0)
        found.append({"input_ids": [token for token, _ in line], "position_ids": positions, "length": len(line)})
    return found


def documents_of(directory: Path, settings: Settings) -> list[list[int]]:
    """The tokens of the rows of all sources, in the order in which a run without --split publishes them."""
    plain = {"split": 0, "split_bos": None, "split_eos": None, "split_every_bos": None, "split_every_eos": None}
    values = {name: getattr(settings, name) for name in Settings.__dataclass_fields__}
    pipeline = Pipeline(
        Settings(**{**values, **plain, "split_overlap": 0, "encode": None}), None, warn=lambda text: None
    )
    found = []
    try:
        while (batch := pipeline.reader.read()) is not None:
            found += [json.loads(line)["input_ids"] for line in batch.lines if isinstance(line, bytes)]
    finally:
        pipeline.close()
    return found


FRAMES: list[dict[str, int]] = [
    {},
    {"split_eos": EOS},
    {"split_bos": BOS, "split_eos": EOS, "split_overlap": 1},
    {"split_bos": BOS, "split_every_bos": BOS},
    {"split_eos": EOS, "split_every_bos": FIRST, "split_every_eos": LAST},
    {"split_overlap": 1},
]


@hypothesis_settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    files=st.lists(st.lists(st.integers(1, 14), max_size=9), min_size=1, max_size=3),
    size=st.integers(3, 9),
    frame=st.sampled_from(FRAMES),
    transform=st.sampled_from([None, "twice", "some"]),
    encoded=st.booleans(),
    weighted=st.booleans(),
    shuffle=st.sampled_from([0, 0, 4]),
)
def test_going_on_after_any_sequence(
    tmp_path_factory: pytest.TempPathFactory,
    files: list[list[int]],
    size: int,
    frame: dict[str, int],
    transform: str | None,
    encoded: bool,
    weighted: bool,
    shuffle: int,
) -> None:
    directory = tmp_path_factory.mktemp("run")
    weights = [random.Random(file).uniform(0.1, 2) for file in range(len(files))] if weighted else None
    settings = make(
        directory,
        write(directory, *files),
        weights,
        split=size,
        transform=transform and f"{RECIPES}:{transform}",
        encode=ENCODE if encoded else None,
        shuffle=shuffle,
        **frame,
    )
    whole = list(drain(settings))
    assert [taken.row for taken in whole] == written(documents_of(directory, settings), settings)
    for number, taken in enumerate(whole, 1):
        # The same rows with the same positions, so seals come out the same too.
        assert list(drain(settings, taken.position, number)) == whole[number:]


def test_the_rows_to_the_byte(tmp_path: Path) -> None:
    paths = write(tmp_path, [3, 2, 4], labels=True)
    found = list(drain(make(tmp_path, paths, split=5, split_eos=EOS)))
    assert b"".join(taken.line for taken in found) == (
        b'{"input_ids":[10,11,12,2,13],"labels":[-100,11,12,2,-100],"position_ids":[0,1,2,3,0],"length":5}\n'
        b'{"input_ids":[14,2,15,16,17],"labels":[14,2,-100,16,17],"position_ids":[0,1,0,1,2],"length":5}\n'
        b'{"input_ids":[18,2],"labels":[18,2],"position_ids":[0,1],"length":2}\n'
    )


def test_encoded_rows_to_the_byte(tmp_path: Path) -> None:
    first, second = drain(make(tmp_path, write(tmp_path, [1, 2]), split=2, encode=ENCODE))
    assert first.line == (
        b'{"input_ids":{"$array":["int32",[2],0]},"position_ids":{"$array":["int32",[2],8]},"length":2}\n'
    )
    assert first.arrays == bytes.fromhex("0a000000 0b000000 00000000 00000000")
    assert second.line == (
        b'{"input_ids":{"$array":["int32",[1],0]},"position_ids":{"$array":["int32",[1],8]},"length":1}\n'
    )


def test_least_and_greatest_token_ids_and_labels_are_int32(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(encode_row({"input_ids": [0, 2**31 - 1], "labels": [-(2**31), 2**31 - 1]}))
    (found,) = drain(make(tmp_path, [path], split=2, encode=ENCODE))
    assert tokens_of([found]) == [[0, 2**31 - 1]]
    assert b"int32" in found.line
    assert b"int64" not in found.line


def test_positions_tell_the_row_and_the_token(tmp_path: Path) -> None:
    settings = make(tmp_path, write(tmp_path, [4, 7, 1]), split=5, split_eos=EOS)
    positions = [decode_position(taken.position, "out") for taken in drain(settings)]
    lines = [position.sources[0]["line"] for position in positions if position.sources[0] is not None]
    # Five tokens are the first row; then five of eight of the second one; then all of the rest.
    assert list(zip(lines, [(one.skip, one.cut, one.unit) for one in positions], strict=True)) == [
        (1, (0, 0, ())),
        (1, (1, 5, (1,))),
        (3, (0, 0, ())),
    ]


@pytest.mark.parametrize("form", [{"size": 7, "eos": EOS}, {"size": 6, "bos": BOS, "eos": EOS, "overlap": 1}])
def test_the_sequences_are_those_that_are_made_at_run_time(tmp_path: Path, form: dict[str, int]) -> None:
    paths = write(tmp_path, [5, 9, 1, 20, 3, 3, 8], labels=True)
    options = [part for name, value in form.items() if name != "size" for part in (f"--split-{name}", value)]
    split = run_arguments(tmp_path / "split", paths, 3, "--split", form["size"], *options, "--no-progress")
    # Encoded rows have their lengths in the seals.
    raw = run_arguments(tmp_path / "raw", paths, 2, "--encode", ENCODE, "--no-progress")
    assert (main(split), main(raw)) == (0, 0)
    expected = LazyShardedSequences(tmp_path / "raw", form=Split(**form), dp_rank=0, dp_size=1, at_end="complete")
    found = list(StreamReader(tmp_path / "split"))
    assert [{**row, "length": None} for row in found] == [
        {**{name: values.tolist() for name, values in one.items()}, "length": None} for one in expected
    ]
    seals = [Seal.decode((tmp_path / "split" / seal_name(chunk)).read_bytes(), chunk) for chunk in range(2)]
    tokens = [length for seal in seals if seal.tokens is not None for length in seal.tokens.tolist()]
    assert tokens == [row["length"] for row in found[: len(tokens)]]


def test_a_book_is_cut_into_sequences_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "_MOST", 2)
    settings = make(tmp_path, write(tmp_path, [1, 20]), split=2)
    found = list(drain(settings))
    assert tokens_of(found) == [[token, token + 1] for token in range(10, 30, 2)] + [[30]]
    for number, taken in enumerate(found, 1):
        assert list(drain(settings, taken.position, number)) == found[number:]


def test_a_row_that_is_begun_goes_on_though_its_file_has_grown(tmp_path: Path) -> None:
    settings = make(tmp_path, write(tmp_path, [4, 4]), split=5)
    first, second = drain(settings)
    write(tmp_path, [4, 4, 4])
    assert tokens_of(list(drain(settings, first.position, 1))) == [[15, 16, 17, 18, 19], [20, 21]]
    # What was the end has been published.
    assert tokens_of(list(drain(settings, second.position, 2))) == [[18, 19, 20, 21]]


@pytest.mark.parametrize("at", [2, 3])
def test_rows_that_were_changed_since_are_refused(tmp_path: Path, at: int) -> None:
    """Whether in the tokens that are published, or in those of the same row that are not."""
    (path,) = write(tmp_path, [4, 4])
    settings = make(tmp_path, [path], split=6)
    first, _ = drain(settings)
    row = {"input_ids": [14, 15, 16, 17]}
    row["input_ids"][at - 1] = 5
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0] + encode_row({"id": [0, 1], **row}))
    with pytest.raises(SourceRefused, match="come out otherwise now than they were published"):
        list(drain(settings, first.position, 1))


@pytest.mark.parametrize(
    "changed", [{"split": 7}, {"split_eos": 0}, {"split_overlap": 1}, {"shuffle": 2}, {"split": 0}]
)
def test_a_row_that_is_begun_is_not_cut_otherwise(tmp_path: Path, changed: dict[str, Any]) -> None:
    paths = write(tmp_path, [4, 4])
    first, _ = drain(make(tmp_path, paths))
    with pytest.raises(SettingInvalid, match="made in another way"):
        list(drain(make(tmp_path, paths, **changed), first.position, 1))


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({}, {"split": 0}, "--split: the stream holds sequences, and would hold rows"),
        ({"split": 0, "where": f"{RECIPES}:even"}, {}, "--split: the stream holds rows, and would hold sequences"),
        ({}, {"split": 0, "pad": 9}, "--split: the stream holds sequences, and would hold padded rows"),
        ({"split": 0, "pad": 9}, {"split": 0}, "--pad: the stream holds padded rows, and would hold rows"),
    ],
)
def test_a_stream_holds_sequences_or_rows_and_never_both(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], said: str
) -> None:
    paths, position = write(tmp_path, [6, 6]), None
    pipeline = Pipeline(make(tmp_path, paths, **before), None, warn=lambda text: None)
    while (batch := pipeline.reader.read()) is not None:
        position = batch.position(len(batch.lines) - 1).encode(pipeline.names)
    pipeline.close()
    with pytest.raises(SettingInvalid, match=said):
        list(drain(make(tmp_path, paths, **after), position, 2))


def test_another_size_between_two_rows_is_told(tmp_path: Path) -> None:
    paths, warnings = write(tmp_path, [6, 6, 4]), list[str]()
    first, *_ = drain(make(tmp_path, paths))
    found = list(drain(make(tmp_path, paths, split=10), first.position, 1, warnings))
    assert tokens_of(found) == [list(range(16, 26))]
    assert any("split (was {'size': 6, 'overlap': 0}, now {'size': 10, 'overlap': 0})" in text for text in warnings)


def test_a_position_with_a_cut_in_no_row_is_none_of_ours(tmp_path: Path) -> None:
    first, _ = drain(make(tmp_path, write(tmp_path, [4, 4])))
    with pytest.raises(StreamMismatch, match="cut: of rows that are skipped, and there are none"):
        decode_position({**first.position, "skip": 0, "unit": [], "skipped": ""}, "out")


@pytest.mark.parametrize(
    "row",
    [
        {"text": "a"},
        {"input_ids": None},
        {"input_ids": []},
        {"input_ids": "abc"},
        {"input_ids": [1, 2.5]},
        {"input_ids": [[1], [2]]},
        {"input_ids": [2**64 - 1]},
        {"input_ids": [1, -1]},
        {"input_ids": [1, 2, 2**31]},
        {"input_ids": [1], "labels": [2**31]},
        {"input_ids": ["7"]},
        {"input_ids": [1, 2], "labels": [1]},
        {"input_ids": [1], "loss_scale": [0.5]},
        {"input_ids": [1, 2], "attention_mask": [1, 0]},
    ],
)
@pytest.mark.parametrize("option", ["--split", "--pad"])
def test_a_row_without_tokens_is_a_bad_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, row: Row
) -> None:
    path, out = tmp_path / "rows.jsonl", tmp_path / "out"
    path.write_bytes(encode_row({"input_ids": [7]}) + encode_row(row) + encode_row({"input_ids": [8, 9]}))
    arguments = run_arguments(out, [path], 10, option, 3, "--no-progress")
    assert main(arguments) == 3
    assert f"{path}:2: {option}: " in capsys.readouterr().err
    assert main([*arguments, "--on-bad-row", "quarantine"]) == 0
    found = [row["input_ids"] for row in StreamReader(out)]
    assert found == ([[7, 8, 9]] if option == "--split" else [[7, 0, 0], [8, 9, 0]])
    (entry,) = map(json.loads, (out / "quarantine.jsonl").read_bytes().splitlines())
    assert entry["line"] == 2


def test_an_array_that_would_be_lost_makes_a_bad_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(encode_row({"id": 1, "text": "ab", "features": {}}))
    arguments = run_arguments(tmp_path / "out", [path], 10, "--encode", "tests.producer.encoders:tokens")
    assert main([*arguments, "--split", "3", "--no-progress"]) == 3
    assert f"{path}:1: --split: there is an array under 'mask', which would be lost" in capsys.readouterr().err


def test_rows_with_and_without_labels_make_no_sequence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor may one of them be left out: that would move all tokens behind it."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(encode_row({"input_ids": [7], "labels": [7]}) + encode_row({"input_ids": [8]}))
    arguments = run_arguments(tmp_path / "out", [path], 10, "--split", 2, "--no-progress", "--on-bad-row", "skip")
    assert main(arguments) == 3
    said = capsys.readouterr().err
    # The row that differs, not the first one of the sequence.
    assert f"{path}:2: --split: of the rows of its sequence some have labels and others have none, and this is" in said
    assert main([*arguments, "--columns", "input_ids"]) == 0
    assert [row["input_ids"] for row in StreamReader(tmp_path / "out")] == [[7, 8]]


@pytest.mark.parametrize(("option", "was"), [("--split", "cut to sequences"), ("--pad", "padded")])
@pytest.mark.parametrize("encode", [(), ("--encode", ENCODE)])
def test_of_sequences_no_others_are_made(tmp_path: Path, option: str, was: str, encode: tuple[str, ...]) -> None:
    """What pads a row would count as its tokens, and where documents begin would be forgotten."""
    out = tmp_path / "out"
    assert main(run_arguments(out, write(tmp_path, [3, 4]), 10, option, 5, *encode, "--no-progress")) == 0
    with pytest.raises(StreamMismatch, match=f"rows were {was} by their producer .*run {option}"):
        LazyShardedSequences(out, None, form=Split(4), dp_rank=0, dp_size=1)


def test_check_shows_the_sequences_that_a_run_would_publish(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = run_arguments(tmp_path / "out", write(tmp_path, [6, 5]), 10, "--split", 4, "--split-bos", 0)
    assert main(["check", *arguments[1:]]) == 0
    shown = capsys.readouterr().out
    assert "cut into sequences of 4 tokens, bos 0" in shown
    assert '{"input_ids":[0,10,11,12],"position_ids":[0,1,2,3],"length":4}' in shown


def test_workers_make_the_same_of_it(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"transform": f"{RECIPES}:twice", "encode": ENCODE, "split_eos": EOS}
    paths = write(tmp_path, [5, 9, 1, 20, 3])
    there = list(drain(make(tmp_path, paths, workers=1, **settings)))
    assert there == list(drain(make(tmp_path, paths, **settings)))
