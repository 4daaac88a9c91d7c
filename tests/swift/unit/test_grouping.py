"""`--group_by_length true`: what ms-swift's real samplers then read, what is refused, and what is kept and told."""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from lazyshard.cli import exits
from lazyshard.cli.main import main
from lazyshard.errors import StreamMismatch
from lazyshard.stream.listing import retire
from lazyshard_swift import checkpoints
from lazyshard_swift.checkpoints import Checkpoints, load_position
from lazyshard_swift.errors import ResumeRefused, SettingsRefused
from lazyshard_swift.opening import check_retired
from lazyshard_swift.run_plan import RunPlan
from lazyshard_swift.stream import read_lengths
from tests.stream.streams import cursor_of, foreign, produce, put_lengths, raised, sealed
from tests.swift.unit.runs import checkpoint, facts_of, open_stream, plan, sampler_of, tells
from tests.swift.unit.test_rescale import STEPS, Shape, both, shaped
from tests.swift.unit.trainers import resumed, train

pytest.importorskip("transformers")

TOTAL, PER_CHUNK = 61, 4
LENGTHS = [1 + 7 * sample % 23 for sample in range(TOTAL)]
OWN = {"group_by_length": False, "data_sharding": True}
"""Megatron's shuffle of each rank's own chunks, in which ms-swift's sampler draws by itself too."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return sealed(tmp_path / "s", LENGTHS, PER_CHUNK)


def args_of(kind: str, output: Path, where: Path | None = None, **changes: Any) -> Any:
    """Arguments of a run on 2 ranks in micro batches of 2, one in a step, unless the changes say otherwise."""
    shape = Shape(changes.pop("dp", 2), changes.pop("batch", 2), changes.pop("accumulation", 1))
    common = {"group_by_length": True, "output_dir": str(output), "sharded_lazy_consumer": "run", "save_steps": 3}
    return shaped(kind, shape, where, **{**common, "padding_free": False, **changes})


def by_step(kind: str, directory: Path, args: Any, kill: int | None = None) -> dict[int, list[list[int]]]:
    _, found = train(kind, directory, args, 2, kill=kill)
    return {step: [each.steps[step] for each in found] for step in found[0].steps}


@pytest.mark.parametrize(
    ("kind", "by_epochs", "own"),
    [("swift", True, {}), ("swift", False, {}), ("megatron", True, {}), ("megatron", True, OWN)],
)
def test_killed_run_goes_on(kind: str, by_epochs: bool, own: dict[str, Any], directory: Path, tmp_path: Path) -> None:
    length: dict[str, Any] = own | ({"num_train_epochs": 2} if by_epochs else {STEPS[kind]: 99})
    whole = by_step(kind, directory, args_of(kind, tmp_path / "whole", **length))
    # By steps the run ends with the stream: 60 samples in steps of 4.
    assert len(whole) == (30 if by_epochs else 15)
    epochs = [[i for step in steps for ids in whole.get(step, ()) for i in ids] for steps in (range(15), range(15, 30))]
    for ids in epochs[: 1 + by_epochs]:
        assert len(ids) == len(set(ids)) == 60 and set(ids) <= set(range(TOTAL))
    assert epochs[0] != epochs[1]
    # Two of these lengths drawn at random are 7.6 apart on average.
    apart = [abs(LENGTHS[ids[0]] - LENGTHS[ids[1]]) for ranks in whole.values() for ids in ranks]
    assert (own is OWN) == (np.mean(apart) > 5)
    if own is OWN:
        assert all(
            i // PER_CHUNK % 2 == rank for ranks in whole.values() for rank in (0, 1) for i in ranks[rank] if i < 56
        )
    # In mid-epoch, between checkpoints; and after the end of the first epoch.
    for kill, saved in ((8, 6), (20, 18)) if by_epochs else ((8, 6),):
        output = tmp_path / f"killed-{kill}"
        begun = by_step(kind, directory, args_of(kind, output, **length), kill)
        rest = by_step(kind, directory, args_of(kind, output, output / f"checkpoint-{saved}", **length))
        assert begun == {step: whole[step] for step in range(kill)}
        assert rest == {step: whole[step] for step in range(saved, len(whole))}


def checkpoint_of(kind: str, directory: Path, output: Path, **changes: Any) -> Path:
    """Saves after 6 steps of 4 samples."""
    run = plan(args_of(kind, output, num_train_epochs=2, **changes), directory, 0, 2)
    return Path(checkpoint(output / "checkpoint-6", run.position(24, 6)))


def gone_on(kind: str, directory: Path, where: Path, dp: int = 2, **changes: Any) -> RunPlan:
    return plan(args_of(kind, where.parent, where, dp=dp, num_train_epochs=2, **changes), directory, 0, dp)


@both
def test_other_ranks_batches_or_lengths_are_refused(kind: str, directory: Path, tmp_path: Path) -> None:
    where = checkpoint_of(kind, directory, tmp_path / "o")
    assert resumed(gone_on(kind, directory, where)).plan.saved == load_position(where)
    changed: list[tuple[dict[str, Any], str | None, str | None]] = [
        ({"dp": 3}, "2", "3"),
        ({"batch": 1}, "2", "1"),
        ({"data_seed": 43}, "42", "43"),
        ({"group_by_length": False}, "grouped", None),
    ]
    if kind == "swift":
        # Its trainer skips as many batches as that many steps of now would have.
        changed.append(({"accumulation": 2}, "24", "48"))
    else:
        assert gone_on(kind, directory, where, accumulation=2).saved is not None
    for changes, expected, actual in changed:
        tells(raised(ResumeRefused, gone_on, kind, directory, where, **changes), expected=expected, actual=actual)

    def otherwise(lengths: list[int], *rest: Any, **options: Any) -> list[int]:
        return list(range(len(lengths)))

    with mock.patch("transformers.trainer_pt_utils.get_length_grouped_indices", otherwise):
        tells(raised(ResumeRefused, gone_on, kind, directory, where), checkpoint=str(where))
    put_lengths(directory, [9, 9, 9, 9])
    tells(raised(ResumeRefused, gone_on, kind, directory, where), checkpoint=str(where))
    ungrouped = checkpoint_of(kind, directory, tmp_path / "ungrouped", group_by_length=False)
    tells(raised(ResumeRefused, gone_on, kind, directory, ungrouped), expected="strided")


def test_chunk_that_is_gone_is_refused_whichever_comes_next(directory: Path, tmp_path: Path) -> None:
    where = checkpoint_of("swift", directory, tmp_path / "o")
    found = resumed(gone_on("swift", directory, where))
    retire(directory, 1, TOTAL // PER_CHUNK + 1)
    tells(raised(ResumeRefused, check_retired, found.plan), checkpoint=str(where), actual="those from 1 on")
    tells(raised(SettingsRefused, gone_on, "swift", directory, where), argument="group_by_length")


def test_what_cannot_be_grouped_is_refused(tmp_path: Path) -> None:
    stream = sealed(tmp_path / "s", LENGTHS, PER_CHUNK)

    def ask(directory: Path, samples_per_chunk: int | None = None, sampler: Any = None, **facts: Any) -> Any:
        found = facts_of(stream)._replace(directory=str(directory), **facts)
        return read_lengths(found, {"samples_per_chunk": samples_per_chunk}, sampler or sampler_of(megatron=False))[0]

    assert ask(stream).tolist() == ask(stream, sampler=sampler_of(megatron=True)).tolist() == LENGTHS
    plain = produce(tmp_path / "plain", TOTAL, PER_CHUNK)
    other = foreign(tmp_path / "foreign", b'{"id":0}\n', end=True)
    for given, facts in (
        ((stream,), {"ended": False}),
        ((stream,), {"dealt": True}),
        ((plain,), {}),
        ((other, 1), {"samples": 1}),
    ):
        tells(raised(SettingsRefused, ask, *given, **facts), argument="group_by_length")
    with mock.patch.object(checkpoints, "agree", lambda value: "of rank 0"):
        tells(raised(StreamMismatch, ask, stream), expected="of rank 0")
    other_sampler = type("Plain", (), {"__init__": lambda self, total_samples: None})
    tells(raised(SettingsRefused, ask, stream, sampler=other_sampler), argument="group_by_length")


def test_stream_hands_out_its_lengths_in_the_main_process_alone(directory: Path, tmp_path: Path) -> None:
    found: Any = open_stream(plan(args_of("swift", tmp_path / "o", num_train_epochs=1), directory, 1, 2))
    assert (found["lengths"], len(found)) == (LENGTHS[:60], 60)
    assert found.__getitems__([7, 58, 0]) == [7, 58, 0], "indices are samples, on every rank"
    assert "grouped by length by ms-swift's sampler" in repr(found)
    raised(KeyError, lambda: found["length"])
    assert not any(isinstance(value, np.ndarray) for value in found.__getstate__().values())


def test_nothing_is_given_up_traced_or_audited(directory: Path, tmp_path: Path, capfd: Any) -> None:
    output = tmp_path / "o"
    run = plan(args_of("megatron", output, train_iters=15), directory, 0, 2)
    saves = Checkpoints(run, str(output))
    saves.register()
    assert open_stream(run).__getitems__([59, 0]) == [59, 0]
    saves.begin(60, 15)
    saves.commit()
    cursor = cursor_of(directory)
    # At the end of the stream too: a start from an older checkpoint may draw any of its samples.
    assert (cursor.consumed, cursor.chunks_before, cursor.state) == (60, 0, None)
    # Nor does a hint say that what lies before the last sample read is not needed to read on.
    assert not list((directory / "cursors").glob("*.reading.json"))
    where = str(output / "checkpoint-15")
    for command in (["trace", "--state", where, "--sample", "0"], ["audit", where]):
        assert main([command[0], str(directory), *command[1:]]) != exits.DONE
        told = capfd.readouterr()
        assert ("grouped by length" in told.err, told.out) == (True, "")
    assert main(["trace", str(directory)]) == exits.REFUSED
    assert main(["trace", str(directory), "--sample", "0"]) == exits.DONE
    assert "the cursor of 'run' holds no state" in capfd.readouterr().out
