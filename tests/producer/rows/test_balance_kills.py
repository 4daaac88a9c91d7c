"""`kill -9` while rows are dealt by cost: every row once, in the same chunks as without the kill."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import numpy as np

from lazyshard.format.names import seal_name
from lazyshard.format.seal import DealtByCost, Seal
from lazyshard.plan.balance import Cost
from lazyshard_producer.cli import main
from tests.harness.processes.producing import chunk_files, ids, published, run_arguments, start, wait_until
from tests.plan.evenness import evenness, step_costs

ROWS = 1000
PER_CHUNK = 40
RANKS = 4
OPTIONS = (
    *("--balance", RANKS, "--micro-batch-size", 2, "--length-field", "tokens", "--seed", 3),
    *("--cost-per-token", 2, "--cost-per-token-squared", 0.001),
)


def source(folder: Path) -> Path:
    dice = random.Random(0)
    path = folder / "a.jsonl"
    lengths = [min(8192, round(dice.lognormvariate(6, 1)) + 1) for _ in range(ROWS)]
    path.write_text("".join(json.dumps({"id": row, "tokens": length}) + "\n" for row, length in enumerate(lengths)))
    return path


def test_killed_in_the_middle_of_stripes(tmp_path: Path) -> None:
    path = source(tmp_path)
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert main(run_arguments(whole, [path], PER_CHUNK, *OPTIONS)) == 0
    assert sorted(ids(whole)) == list(range(ROWS))
    arguments = run_arguments(out, [path], PER_CHUNK, *OPTIONS, "--rate", 2000)
    # In stripes of four chunks: within the first one, at the end of one, and within a later one.
    for chunks in (1, 8, 18):
        process = start(*arguments)
        wait_until(lambda chunks=chunks: published(out) >= chunks, process)  # type: ignore[misc]
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    assert main(run_arguments(out, [path], PER_CHUNK, *OPTIONS)) == 0
    assert chunk_files(out) == chunk_files(whole)


def test_seals_hold_the_lengths_and_how_rows_were_dealt_and_steps_are_even(tmp_path: Path) -> None:
    path, out = source(tmp_path), tmp_path / "out"
    assert main(run_arguments(out, [path], PER_CHUNK, *OPTIONS)) == 0
    seals = [Seal.decode((out / seal_name(chunk)).read_bytes(), chunk) for chunk in range(-(-ROWS // PER_CHUNK))]
    for seal in seals:
        assert DealtByCost.read(seal.source) == DealtByCost(RANKS, 2, "tokens", 2.0, 0.001)
    tokens = np.concatenate([seal.tokens for seal in seals if seal.tokens is not None])
    rows = [json.loads(line) for file in sorted(out.glob("*.jsonl")) for line in file.read_bytes().splitlines()]
    assert tokens.tolist() == [row["tokens"] for row in rows]
    lengths = [row["tokens"] for row in sorted(rows, key=lambda row: row["id"])]
    after, before = (
        evenness(step_costs(Cost(2.0, 0.001).of(given), RANKS, PER_CHUNK, 2, ended=True)) for given in (tokens, lengths)
    )
    assert after is not None
    assert before is not None
    assert after.steps == ROWS // (2 * RANKS)
    # Stripes of 160 rows hold few that are as long as the longest.
    assert (after.overall - 1) * 5 < before.overall - 1
