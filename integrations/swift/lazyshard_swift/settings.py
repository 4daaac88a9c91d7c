"""What follows from arguments: how long a run is, its window, its name, what it skips. No ms-swift, no torch.

`--sharded_lazy_skip "samples 120:180, chunks 7:8, steps 41:61"` says what not to train. The known remedy for a loss
spike: go on from the checkpoint before it, without the samples that came then. All ranges are half-open. Samples and
chunks count from 0; steps as in the trainer's log and in `lazyshard trace`, so 41:61 are those between checkpoint-40
and checkpoint-60. What was asked for is kept in the checkpoints, so a command that is started again with the same
argument, from a later checkpoint, leaves nothing out twice.

`--sharded_lazy_shuffle_distance` chooses the window that draws neighbours so far apart.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from lazyshard.plan.deal import UNIT_NAMES, window_positions
from lazyshard.plan.shuffle import expected_neighbours, largest_distance, window_for_distance
from lazyshard_swift.errors import SettingsRefused, each_of, refused

OnEnd = Literal["stop", "repeat"]
OnBadSample = Literal["substitute", "raise"]

LIVE_WINDOW: Final = 2
"""Chunks of a rank that are shuffled together while the stream is live: training can start once ranks * 2 are there."""

ENDED_WINDOW: Final = 8
"""The same once it has ended: nothing has to be waited for, and 8 chunks are cheap to keep open."""

_VERSIONED: Final = re.compile(r"v\d+-\d{8}-\d{6}")
"""The last folder that ms-swift adds to an output directory with ``--add_version true``."""

KINDS: Final = ("samples", "chunks", "steps")

_ITEM: Final = re.compile(rf"({'|'.join(KINDS)})\s+(\d{{1,18}}):(\d{{1,18}})")

DISTANCE: Final = "sharded_lazy_shuffle_distance"

_OF_ORDERS: Final = ("shuffle_window", "shuffle_distance", "unit", "skip")
"""Arguments for an order of ours, without ``sharded_lazy_``."""


class Progress(NamedTuple):
    """By what a run is measured.

    Attributes:
        steps: how many steps were asked for; None if epochs decide.
        epochs: how many epochs were asked for; None if steps decide.
    """

    steps: int | None
    epochs: float | None


def is_megatron(args: Any) -> bool:
    """Returns whether these are the arguments of a `megatron` command."""
    return hasattr(args, "micro_batch_size")


def is_training(args: Any) -> bool:
    """Returns whether these are the arguments of a command that trains."""
    return any(
        kind.__name__ in ("SftArguments", "TrainArguments", "MegatronSftArguments", "MegatronTrainArguments")
        for kind in type(args).__mro__
    )


def progress(args: Any, live: bool) -> Progress:
    """Returns whether steps or epochs decide how long the run is, as ms-swift would, but by steps on a live stream.

    Args:
        args: the parsed arguments.
        live: whether the stream was still being produced when the run first started.

    Raises:
        SettingsRefused: the stream is live and only epochs are given, or saving goes by epochs.
    """
    if is_megatron(args):
        steps, epochs = args.train_iters, args.num_train_epochs
        option = "--train_iters"
    else:
        steps, epochs = (args.max_steps if args.max_steps > 0 else None), args.num_train_epochs
        option = "--max_steps"
    if live:
        if not steps:
            raise refused(
                option[2:],
                f"the stream is still being produced, so an epoch has no length yet: say with {option} N how many "
                f"steps to train at the most. If the stream ends earlier, training stops with it, unless "
                f"--sharded_lazy_on_end repeat is given",
            )
        for name in ("save_strategy", "eval_strategy"):
            if str(getattr(args, name, "")).rsplit(".", 1)[-1].lower() == "epoch":
                raise refused(
                    name,
                    f"--{name} epoch needs an end of the epoch, and the stream is still being produced: use "
                    f"--{name} steps",
                )
        return Progress(steps, None)
    # ms-swift: Megatron's epochs count before its iterations, in the Hugging Face trainer steps count before epochs.
    if is_megatron(args):
        if epochs is None and not steps:
            raise refused("train_iters", "say how long to train, with --num_train_epochs N or --train_iters N")
        return Progress(None, epochs) if epochs is not None else Progress(steps, None)
    return Progress(steps, None) if steps else Progress(None, epochs)


def default_window(shuffle: bool, live: bool) -> int:
    """Returns how many chunks of a rank are shuffled together if the user does not say."""
    if not shuffle:
        return 0
    return LIVE_WINDOW if live else ENDED_WINDOW


def consumer_name(output_dir: str) -> str:
    """Returns the name of a run's cursor: the folder of its outputs, the same over its restarts.

    ms-swift adds a folder with version and time to the output directory of each start; the one above it counts. The
    digest keeps apart runs in folders of the same name.
    """
    path = os.path.abspath(output_dir)
    if _VERSIONED.fullmatch(os.path.basename(path)):
        path = os.path.dirname(path)
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", os.path.basename(path)).strip("-")[:64] or "run"
    return f"{readable}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"


def version_folders(output_dir: str | os.PathLike[str]) -> list[Path]:
    """Returns the folders that ms-swift made for other starts of the run whose outputs go here."""
    path = Path(os.path.abspath(output_dir))
    if not _VERSIONED.fullmatch(path.name):
        return []
    return [other for other in path.parent.glob("v*") if _VERSIONED.fullmatch(other.name) and other != path]


class Skip(NamedTuple):
    """A half-open range of samples, chunks or steps, by number."""

    kind: str
    start: int
    stop: int

    def __str__(self) -> str:
        """As on the command line."""
        return f"{self.kind} {self.start}:{self.stop}"


def parse_skips(text: str) -> tuple[Skip, ...]:
    """Reads the argument.

    >>> [str(one) for one in parse_skips("samples 120:180, steps 41:61")]
    ['samples 120:180', 'steps 41:61']

    Raises:
        ValueError: it is not of this form.
    """
    found = []
    for item in text.split(","):
        match = _ITEM.fullmatch(item.strip())
        if match is None or int(match[2]) >= int(match[3]):
            raise ValueError(
                f'expected ranges such as "samples 120:180, chunks 7:8, steps 41:61", each FIRST:STOP with FIRST < '
                f"STOP, got {item.strip()!r}"
            )
        found.append(Skip(match[1], int(match[2]), int(match[3])))
    return tuple(dict.fromkeys(found))


def parse_unit(given: str | int | None) -> str | int | None:
    """Returns what is dealt to the ranks in turn, by name or as a number of samples; None where nothing is said.

    Args:
        given: as on the command line; a number where a configuration file has one.

    Raises:
        SettingsRefused: it is neither.
    """
    if given is None or given in UNIT_NAMES:
        return given
    # Not more digits than a count can have; int() takes signs and other digits too.
    if re.fullmatch(r"[1-9][0-9]{0,17}", str(given)):
        return int(given)
    raise refused(
        "sharded_lazy_unit",
        f"--sharded_lazy_unit is one of {', '.join(UNIT_NAMES)} or a number of samples from 1, got {given!r}",
    )


def groups_by_length(args: Any) -> bool:
    """Returns whether ms-swift's sampler is to group samples by length."""
    return bool(getattr(args, "group_by_length", False))


def window_of_distance(distance: int, samples_per_chunk: int) -> int:
    """Returns the window in chunks: a function of these two alone, so that a run that is resumed has it again.

    Raises:
        SettingsRefused: it is more than can be counted with.
    """
    window = window_for_distance(distance, samples_per_chunk)
    if window * samples_per_chunk >= 2**62:
        raise SettingsRefused(
            f"--{DISTANCE} {distance} is more than any stream holds: give a smaller one", argument=DISTANCE
        )
    return window


def check_distance(distance: int, window: int | None, shuffle: bool, streams: int) -> None:
    """Refuses what is no distance, and what contradicts it among the arguments.

    Raises:
        SettingsRefused: with the way out.
    """
    why = None
    if distance < 1:
        why = "a distance is a number of samples from 1; --sharded_lazy_shuffle_window 0 keeps the order of the stream"
    elif window is not None:
        why = f"it chooses the window, and --sharded_lazy_shuffle_window {window} is one: leave out one of them"
    elif not shuffle:
        why = "it shuffles, --train_dataloader_shuffle false does not: leave out one of them"
    elif streams > 1:
        why = (
            "it is one of neighbours in one stream, and --dataset has several, each with chunks of its own size: give "
            "--sharded_lazy_shuffle_window, which is in chunks of each"
        )
    if why is not None:
        raise SettingsRefused(f"--{DISTANCE} {distance}: {why}", argument=DISTANCE)


def check_distance_reach(
    distance: int, directory: str, samples: int | None, run_samples: int | None, ranks: int
) -> None:
    """Refuses a distance that a run which begins anew cannot have.

    Args:
        distance: as it was asked for.
        directory: of the stream.
        samples: of the stream if it has ended, else None.
        run_samples: what the run trains at the most, over all ranks, where the stream has not ended.
        ranks: data-parallel ranks.

    Raises:
        SettingsRefused: with the reason, and the largest that can be had.
    """
    most = samples if samples is not None else run_samples
    if most is None or distance <= (largest := largest_distance(most // ranks)):
        return
    if samples is not None:
        why = f"{directory} has ended with {samples} samples, {samples // ranks} for {each_of(ranks)}"
        what = "shuffled together"
    else:
        why = (
            f"{directory} is still being produced, and this run trains {most} samples at the most, {most // ranks} on "
            f"{each_of(ranks)}"
        )
        what = "in one window"
    way_out = f"give {largest} at the most" if largest else "leave it out"
    raise SettingsRefused(
        f"--{DISTANCE} {distance}: {why}; all of them {what} are {largest} apart on average: {way_out}",
        argument=DISTANCE,
    )


def distance_told(distance: int, samples_per_chunk: int, samples: int | None, ranks: int, unit: int) -> str:
    """Returns for the log what a distance comes to.

    Args:
        distance: as it was asked for.
        samples_per_chunk: of the stream.
        samples: of the stream if it has ended, else None.
        ranks: data-parallel ranks.
        unit: samples that a rank is dealt in a row.

    >>> distance_told(10_000, 1000, None, 8, 1000)
    '--sharded_lazy_shuffle_distance 10000: each rank shuffles windows of 30 chunks; training begins with 240 chunks'
    >>> distance_told(1000, 1000, 100_000, 8, 1000)
    '--sharded_lazy_shuffle_distance 1000: each rank shuffles windows of 3 chunks; neighbours are 967 apart on average'
    """
    window = window_of_distance(distance, samples_per_chunk)
    positions = window_positions(window, samples_per_chunk, unit)
    if samples is None:
        then = f"training begins with {-(-ranks * positions // samples_per_chunk)} chunks"
    else:
        # The last window is as short as what is left, so in this stream it may be less than was asked for.
        found = expected_neighbours(ranks, unit, positions, samples // ranks)
        then = f"neighbours are {found:.0f} apart on average"
    return f"--{DISTANCE} {distance}: each rank shuffles windows of {window} chunks; {then}"


def grouping_refused(why: str) -> SettingsRefused:
    """Returns the error, with the reason and the way out in `why`."""
    return SettingsRefused(f"--group_by_length true: {why}", argument="group_by_length")


def check_grouping(args: Any) -> None:
    """Refuses what cannot work together with ``--group_by_length true``, if that is given."""
    if not groups_by_length(args):
        return
    if len(args.dataset) > 1:
        raise grouping_refused(
            "it is for one stream, and --dataset has several: leave it out, or train one after the other"
        )
    if getattr(args, "packing", False):
        raise grouping_refused("packs are all of about one length already: leave it out")
    if is_megatron(args) and getattr(args, "padding_free", False):
        raise grouping_refused(
            "with --padding_free true, which is Megatron-SWIFT's default, nothing is padded, so nothing is won by it: "
            "leave it out, or give --padding_free false"
        )
    if not getattr(args, "train_dataloader_shuffle", True):
        raise grouping_refused("it shuffles, --train_dataloader_shuffle false does not: leave out one of them")
    for name in _OF_ORDERS:
        value = getattr(args, f"sharded_lazy_{name}")
        if value is not None:
            raise grouping_refused(
                f"the order is that of ms-swift's sampler over the whole stream, and --sharded_lazy_{name} {value} is "
                f"for an order of lazyshard's: leave out one of them"
            )


def packing_length(args: Any) -> int | None:
    """Returns the most tokens of a pack, None where samples are not packed."""
    if not getattr(args, "packing", False):
        return None
    length: int | None = getattr(args, "packing_length", None) or args.max_length
    if length is None:
        raise packing_refused("--packing true needs to know the most tokens of a pack: give --packing_length N")
    return length


def packing_refused(message: str) -> SettingsRefused:
    """Returns the error of ``--packing``."""
    return SettingsRefused(message, argument="packing")
