"""`kill -9` at any call that changes a file, again and again, with every kind of source and recipe: each row once.

What comes out is that of a run which was never killed, byte for byte: rows, seals but for their time, refused rows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from tests.harness.processes.commands import Commands
from tests.harness.scenes.rows import MANY, is_refused, made, tokens_of
from tests.harness.scenes.sources import KINDS, FedSource, FollowedSource
from tests.harness.scenes.streams import Stream

pytestmark = pytest.mark.full

KEEPS: Final = ("--on-bad-row", "quarantine")
MAKES: Final = (*KEEPS, "--transform", "tests.harness.scenes.rows:thirds")
FILTERS: Final = (*MAKES, "--where", "tests.harness.scenes.rows:four_of_five")
SHUFFLES: Final = (*FILTERS, "--shuffle", "16", "--seed", "3")

PACKS: Final = (*KEEPS, "--transform", "tests.harness.scenes.rows:measured", "--pack", "48", "--pack-buffer", "30")

ENCODES: Final = (*MAKES, "--encode", "tests.harness.scenes.rows:encoded")
DEALS: Final = ("--balance", "2", "--cost-per-token-squared", "0.01")

CUTS: Final = (*KEEPS, "--transform", "tests.harness.scenes.rows:tokenized", "--split", "5")

SPLITS: Final = {
    "plain": CUTS,
    "pipe": CUTS,
    "zstd": (*CUTS, "--shuffle", "16"),
    "gzip": (*CUTS, "--encode", "tests.harness.scenes.rows:encoded_tokens", "--split-eos", "0"),
}

COMBINED: Final = {
    "encoded packs": (*ENCODES, "--pack", "48", "--pack-buffer", "30"),
    "encoded rows, dealt": (*ENCODES, *DEALS),
    "packs, dealt": (*PACKS, *DEALS),
    "encoded packs, dealt": (*ENCODES, "--pack", "48", "--pack-buffer", "30", *DEALS),
    "encoded packs of small buffers, dealt": (*ENCODES, "--pack", "48", "--pack-buffer-bytes", "1500", *DEALS),
}

RECIPES: Final = {"as they are": KEEPS, "made": FILTERS, "shuffled": SHUFFLES}

MOST_CALLS: Final = 90
"""A start takes some 25 of them and a chunk 12, so a life publishes two chunks or so."""

LEAST_KILLS: Final = 4

ORDERED: Final = [kind for kind in KINDS if "followed" not in kind]


def check_killed(
    nursery: Commands, folder: Path, sources: Sequence[FedSource], options: Sequence[str], most_calls: int = MOST_CALLS
) -> Stream:
    """Makes a stream in one run and one in many, and compares them; returns the second."""
    whole = Stream(nursery, folder / "whole", sources, options)
    status, err = whole.run()
    assert status == 0, err
    stream = Stream(nursery, folder / "out", sources, options)
    seed = [sources[0].rows[0], *options]
    assert stream.run_killed(str(seed), most_calls) >= LEAST_KILLS
    assert stream.lines() == whole.lines()
    # An input that goes on is another one each time, and its lines are counted anew.
    apart = {"source", "line", "byte"} if any("append" in source.arguments for source in sources) else set()
    for found, expected in ((stream.seals(), whole.seals()), (stream.refused(), whole.refused())):
        assert [_without(one, apart) for one in found] == [_without(one, apart) for one in expected]
    stream.check_ended()
    return stream


def _without(values: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ORDERED)
def test_one_source(kind: str, recipe: str, nursery: Commands, tmp_path: Path) -> None:
    source, options = KINDS[kind](tmp_path, 0), RECIPES[recipe]
    stream = check_killed(nursery, tmp_path, [source], options)
    expected = made(source.rows, transform=recipe != "as they are", where=recipe != "as they are")
    if recipe == "shuffled":
        assert sorted(map(str, stream.rows())) == sorted(map(str, expected))
        assert stream.rows() != expected
    else:
        assert stream.rows() == expected


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "kinds",
    [
        ["plain", "zstd", "parquet"],
        ["pipe", "gzip", "arrow"],
        ["generator", "stdin", "plain"],
        ["live stream", "plain", "stream"],
    ],
)
def test_mixed_by_weights(kinds: list[str], recipe: str, nursery: Commands, tmp_path: Path) -> None:
    sources = [KINDS[kind](tmp_path, MANY * number) for number, kind in enumerate(kinds)]
    for source, weight in zip(sources, (5, 2, 3), strict=True):
        source.arguments += ["--weight", str(weight)]
    options = {"as they are": KEEPS, "made": MAKES, "shuffled": (*MAKES, "--shuffle", "16")}[recipe]
    stream = check_killed(nursery, tmp_path, sources, options, 2 * MOST_CALLS)
    expected = [row for source in sources for row in made(source.rows, transform="--transform" in options, where=False)]
    assert sorted(map(str, stream.rows())) == sorted(map(str, expected))


@pytest.mark.parametrize("kind", ["plain", "pipe", "zstd"])
def test_packs(kind: str, nursery: Commands, tmp_path: Path) -> None:
    source = KINDS[kind](tmp_path, 0)
    stream = check_killed(nursery, tmp_path, [source], PACKS)
    expected = [str(one) for one in made(source.rows, transform=True, where=False) if one[0] % 50 < 48]
    assert sorted(map(str, stream.rows())) == sorted(expected)
    assert any("more than the 48 of a pack" in entry["reason"] for entry in stream.refused())


@pytest.mark.parametrize(
    ("recipe", "kind"), list(zip(COMBINED, ("plain", "zstd", "pipe", "plain", "parquet"), strict=True))
)
def test_encoded_packed_and_dealt(recipe: str, kind: str, nursery: Commands, tmp_path: Path) -> None:
    source, options = KINDS[kind](tmp_path, 0), COMBINED[recipe]
    # Packs are few: a start and a chunk or two.
    stream = check_killed(nursery, tmp_path, [source], options, 60)
    expected = made(source.rows, transform=True, where=False)
    if "encoded" in recipe:
        expected = [one for one in expected if one[0] % 17 != 3]
    if "packs" in recipe:
        expected = [one for one in expected if one[0] % 50 < 48]
    assert sorted(map(str, stream.rows())) == sorted(map(str, expected))


@pytest.mark.parametrize("kind", SPLITS)
def test_sequences(kind: str, nursery: Commands, tmp_path: Path) -> None:
    """Of which each holds several rows, and many rows lie in two."""
    source, options = KINDS[kind](tmp_path, 0), SPLITS[kind]
    # Sequences are few: a start and a chunk or two.
    stream = check_killed(nursery, tmp_path, [source], options, 60)
    rows = made(source.rows, transform=True, where=False)
    if "--encode" in options:
        tokens = sum(tokens_of(one[0]) + 1 for one in rows if one[0] % 17 != 3)
    else:
        expected = [one for one in rows for _ in range(tokens_of(one[0]))]
        found, tokens = stream.rows(), len(expected)
        assert (
            found == expected if "--shuffle" not in options else sorted(map(str, found)) == sorted(map(str, expected))
        )
    lengths = [json.loads(line)["length"] for line in stream.lines()]
    assert lengths == [5] * (tokens // 5) + [tokens % 5] * (tokens % 5 > 0)


@pytest.mark.parametrize("kind", ["plain", "pipe"])
def test_worker_processes(kind: str, nursery: Commands, tmp_path: Path) -> None:
    source = KINDS[kind](tmp_path, 0)
    check_killed(nursery, tmp_path, [source], (*SHUFFLES, "--workers", "2"), 2 * MOST_CALLS)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["followed", "followed while it grows"])
def test_a_followed_directory_mixed_with_a_file(kind: str, recipe: str, nursery: Commands, tmp_path: Path) -> None:
    followed, plain = KINDS[kind](tmp_path, 0), KINDS["plain"](tmp_path, MANY)
    assert isinstance(followed, FollowedSource)
    for source in (followed, plain):
        source.arguments += ["--weight", "1"]
    options = {"as they are": KEEPS, "made": MAKES, "shuffled": (*MAKES, "--shuffle", "16")}[recipe]
    stream = Stream(nursery, tmp_path / "out", [followed, plain], options)
    assert stream.run_killed(kind + recipe, 2 * MOST_CALLS) >= LEAST_KILLS
    stream.check_ended()
    found = stream.rows()
    expected = made(followed.rows + plain.rows, transform=recipe != "as they are", where=False)
    assert sorted(map(str, found)) == sorted(map(str, expected))
    if recipe != "shuffled":
        for rows in (*followed.files, plain.rows):
            of_file = made(rows, transform=recipe != "as they are", where=False)
            assert [row for row in found if row in of_file] == of_file
    bad = [(entry["source"], entry["line"]) for entry in stream.refused()]
    refused = [row for row in followed.rows + plain.rows if is_refused(row, transform=recipe != "as they are")]
    assert len(set(bad)) == len(bad) == len(refused)


def test_packs_of_a_followed_directory_mixed_with_a_file(nursery: Commands, tmp_path: Path) -> None:
    sources = [KINDS["followed while it grows"](tmp_path, 0), KINDS["plain"](tmp_path, MANY)]
    for source in sources:
        source.arguments += ["--weight", "1"]
    stream = Stream(nursery, tmp_path / "out", sources, PACKS)
    assert stream.run_killed("packs", 2 * MOST_CALLS) >= LEAST_KILLS
    stream.check_ended()
    expected = made(sources[0].rows + sources[1].rows, transform=True, where=False)
    assert sorted(map(str, stream.rows())) == sorted(str(one) for one in expected if one[0] % MANY % 50 < 48)
