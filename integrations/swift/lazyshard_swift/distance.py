"""`--sharded_lazy_shuffle_distance`: the window that draws neighbours so far apart, and how far they can be."""

from __future__ import annotations

from typing import Final

from lazyshard.plan import window_for_distance, window_positions
from lazyshard.plan.shuffle_distance import expected_neighbours, largest_distance
from lazyshard_swift.errors import SettingsRefused, each_of

_NAME: Final = "sharded_lazy_shuffle_distance"


def check_alone(distance: int, window: int | None, shuffle: bool, streams: int) -> None:
    """Refuses what is no distance, and what contradicts it among the arguments.

    Args:
        distance: as it was asked for.
        window: the window that was asked for, None for none.
        shuffle: whether ms-swift is to shuffle.
        streams: how many streams are named.

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
        raise SettingsRefused(f"--{_NAME} {distance}: {why}", argument=_NAME)


def window_of(distance: int, samples_per_chunk: int) -> int:
    """Returns the window in chunks: a function of these two alone, so that a run that is resumed has it again.

    Raises:
        SettingsRefused: it is more than can be counted with.
    """
    window = window_for_distance(distance, samples_per_chunk)
    if window * samples_per_chunk >= 2**62:
        raise SettingsRefused(f"--{_NAME} {distance} is more than any stream holds: give a smaller one", argument=_NAME)
    return window


def check_reach(distance: int, directory: str, samples: int | None, run_samples: int | None, ranks: int) -> None:
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
        f"--{_NAME} {distance}: {why}; all of them {what} are {largest} apart on average: {way_out}",
        argument=_NAME,
    )


def told(distance: int, samples_per_chunk: int, samples: int | None, ranks: int, unit: int) -> str:
    """Returns for the log what a distance comes to.

    Args:
        distance: as it was asked for.
        samples_per_chunk: of the stream.
        samples: of the stream if it has ended, else None.
        ranks: data-parallel ranks.
        unit: samples that a rank is dealt in a row.

    >>> told(10_000, 1000, None, 8, 1000)
    '--sharded_lazy_shuffle_distance 10000: each rank shuffles windows of 30 chunks; training begins with 240 chunks'
    >>> told(1000, 1000, 100_000, 8, 1000)
    '--sharded_lazy_shuffle_distance 1000: each rank shuffles windows of 3 chunks; neighbours are 967 apart on average'
    """
    window = window_of(distance, samples_per_chunk)
    positions = window_positions(window, samples_per_chunk, unit)
    if samples is None:
        then = f"training begins with {-(-ranks * positions // samples_per_chunk)} chunks"
    else:
        # The last window is as short as what is left, so in this stream it may be less than was asked for.
        found = expected_neighbours(ranks, unit, positions, samples // ranks)
        then = f"neighbours are {found:.0f} apart on average"
    return f"--{_NAME} {distance}: each rank shuffles windows of {window} chunks; {then}"
