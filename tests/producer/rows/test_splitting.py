"""`--split`: rows come out as sequences, each token once, the same ones wherever a run stopped."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from lazyshard import LazyShardedSequences, Split, StreamReader
from lazyshard.errors import RowInvalid, StreamMismatch
from lazyshard.format.row import encode_row
from lazyshard_producer.cli import main
from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.position import decode_position
from lazyshard_producer.rows import sequences
from tests.harness.processes.producing import lengths, run_arguments
from tests.producer.rows import draining
from tests.producer.rows.draining import Taken, take, write
from tests.stream.streams import raised

RECIPES = "tests.producer.recipes"
ENCODE = "tests.producer.recipes:tokenized"
BOS, EOS, FIRST, LAST = 1, 2, 3, 4


def make(directory: Path, paths: Sequence[Path], weights: Sequence[float] | None = None, **more: Any) -> Settings:
    return draining.make(directory / "out", paths, weights, **{"split": 6, **more})


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
    rows = make(
        directory,
        write(directory, *files),
        [random.Random(file).uniform(0.1, 2) for file in range(len(files))] if weighted else None,
        split=0,
        transform=transform and f"{RECIPES}:{transform}",
        shuffle=shuffle,
    )
    settings = replace(rows, split=size, encode=ENCODE if encoded else None, **frame)  # type: ignore[arg-type]
    whole = list(drain(settings))
    assert tokens_of(whole) == cut(tokens_of(list(take(rows))), settings)
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
    line = b'{"input_ids":{"$array":["int32",[%d],0]},"position_ids":{"$array":["int32",[%d],8]},"length":%d}\n'
    assert (first.line, second.line) == (line % (2, 2, 2), line % (1, 1, 1))
    assert first.arrays == bytes.fromhex("0a000000 0b000000 00000000 00000000")


def test_least_and_greatest_token_ids_and_labels_are_int32(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(encode_row({"input_ids": [0, 2**31 - 1], "labels": [-(2**31), 2**31 - 1]}))
    (found,) = drain(make(tmp_path, [path], split=2, encode=ENCODE))
    assert tokens_of([found]) == [[0, 2**31 - 1]]
    assert (found.line.count(b"int32"), found.line.count(b"int64")) == (3, 0)


def test_positions_tell_the_row_and_the_token(tmp_path: Path) -> None:
    settings = make(tmp_path, write(tmp_path, [4, 7, 1]), split=5, split_eos=EOS)
    taken = list(drain(settings))
    positions = [decode_position(one.position, "out") for one in taken]
    lines = [position.sources[0]["line"] for position in positions if position.sources[0] is not None]
    # Five tokens are the first row; then five of eight of the second one; then all of the rest (behind a blank line).
    assert list(zip(lines, [(one.skip, one.cut, one.unit) for one in positions], strict=True)) == [
        (1, (0, 0, ())),
        (1, (1, 5, (1,))),
        (4, (0, 0, ())),
    ]
    raised(StreamMismatch, decode_position, {**taken[1].position, "skip": 0, "unit": [], "skipped": ""}, "out")


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
    assert lengths(tmp_path / "split") == [len(row["input_ids"]) for row in found]


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


def test_rows_with_and_without_labels_make_no_sequence(tmp_path: Path) -> None:
    """Nor may one of them be left out: that would move all tokens behind it."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(encode_row({"input_ids": [7], "labels": [7]}) + encode_row({"input_ids": [8]}))
    settings = make(tmp_path, [path], split=2, on_bad_row="skip")
    caught = raised(RowInvalid, lambda: list(drain(settings)))
    # The row that differs, not the first one of the sequence.
    assert (caught.file, caught.line) == (str(path), 2)
    assert tokens_of(list(drain(replace(settings, columns=(("input_ids", "input_ids"),))))) == [[7, 8]]


@pytest.mark.parametrize(("option", "encode"), [("split", ()), ("pad", ("--encode", ENCODE))])
def test_of_sequences_no_others_are_made(tmp_path: Path, option: str, encode: tuple[str, ...]) -> None:
    """What pads a row would count as its tokens, and where documents begin would be forgotten."""
    out = tmp_path / "out"
    assert main(run_arguments(out, write(tmp_path, [3, 4]), 10, f"--{option}", 5, *encode, "--no-progress")) == 0
    raised(StreamMismatch, LazyShardedSequences, out, None, form=Split(4), dp_rank=0, dp_size=1)
    assert not encode or StreamReader(out).encoding == {"kind": "function", "function": ENCODE, "form": option}
