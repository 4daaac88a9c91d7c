"""The settings of a data set that belong together: `Order`, `BadRows` and `EncodeCache`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from lazyshard.format.fields import parse_size
from lazyshard.format.kept_sample import LEAST_CACHE_BYTES
from lazyshard.format.records import Fact
from lazyshard.plan.deal import Rules, named_unit, window_positions

LayoutName = Literal["block", "strided"]
UnitName = Literal["chunk", "sample", "batch", "auto"]
BadRowAction = Literal["substitute", "raise"]

ENCODE_CACHE_BYTES: Final = 16 << 30
"""What a machine can spare that trains; 100 million tokens and their labels take 1 GB."""


@dataclass(frozen=True)
class Order:
    """Which sample is drawn when.

    Attributes:
        unit: what is dealt to the ranks in turn: "chunk", "sample", "batch" (`batch_size` samples), a number of
            samples, or "auto": chunks if the stream, up to `max_total_samples`, has a full one for every rank, else
            batches; on a live stream the first use waits until that is known. A run goes on with the unit that its
            state names.
        layout: "block" for samplers that give each rank a contiguous piece (`rank_indices`, ms-swift's
            ``data_sharding=True``), "strided" for those that give rank r the indices r, r + dp_size, ... (the same
            without shuffle, Hugging Face's).
        shuffle_window: how many chunks' worth of samples each rank shuffles among, in each epoch differently; 0 keeps
            the order, which a stream whose rows were dealt by cost needs (docs/balance.md). With a window as wide as
            all that a rank has, an ended stream is shuffled whole. `lazyshard.window_for_distance` finds the one that
            moves neighbours as far apart as you want.
        seed: of the shuffle.
        micro_batches_per_step: micro batches of one rank in an optimiser step; the state of the run then knows its
            steps, for `lazyshard trace`, `audit` and `skip`. None for not known; `batches` takes that for 1.

    Raises:
        ValueError: a field is none of these.
    """

    unit: UnitName | int = "chunk"
    layout: LayoutName = "block"
    shuffle_window: int = 0
    seed: int = 0
    micro_batches_per_step: int | None = None

    def __post_init__(self) -> None:
        """Checks the fields."""
        if self.layout not in get_args(LayoutName):
            raise ValueError(f"layout is one of {', '.join(get_args(LayoutName))}, got {self.layout!r}")
        named_unit(self.unit, 1, 1)
        if type(self.shuffle_window) is not int or self.shuffle_window < 0:
            raise ValueError(f"shuffle_window is a number of chunks, 0 or more, got {self.shuffle_window!r}")
        steps = self.micro_batches_per_step
        if steps is not None and (type(steps) is not int or steps < 1):
            raise ValueError(f"micro_batches_per_step is an integer from 1, got {steps!r}")
        self.rules(1, 1)

    def rules(self, samples_per_chunk: int, unit: int) -> Rules:
        """Returns how a stream with so many samples in a chunk is dealt and shuffled, so many samples in a row."""
        return Rules(unit, window_positions(self.shuffle_window, samples_per_chunk, unit), self.seed)


@dataclass(frozen=True)
class BadRows:
    """What is done with rows that cannot be read, or that a step or the encoder fails on.

    Attributes:
        action: "substitute" trains another row of the same chunk, the same one on every rank and in every run, and logs
            it; "raise" raises the first error.
        limit: the error budget: how many different bad rows one process (each DataLoader worker) replaces before it
            raises; None for any number.

    Raises:
        ValueError: a field is none of these.
    """

    action: BadRowAction = "substitute"
    limit: int | None = 100

    def __post_init__(self) -> None:
        """Checks the fields."""
        if self.action not in get_args(BadRowAction):
            raise ValueError(f"action of bad rows is one of {', '.join(get_args(BadRowAction))}, got {self.action!r}")
        if self.limit is not None and (type(self.limit) is not int or self.limit < 0):
            raise ValueError(f"limit of bad rows is an integer from 0, or None for no limit, got {self.limit!r}")


@dataclass(frozen=True)
class EncodeCache:
    """Where samples that were made of rows are kept, so that each row is encoded once.

    Attributes:
        directory: a directory of this node, on its disk or in /dev/shm, for all processes that draw the same rows:
            model-parallel peers, workers, later epochs, the next start (docs/encode-cache.md). Not for an `encode_fn`
            that makes another sample of a row each time.
        size: what the directory may take, as a number of at least 4,096 bytes or as a text like ``"20GB"`` or
            ``"512MiB"``; chunks that were used longest ago go first. None stands for 16 GiB.
        fingerprint: plain facts that change whenever another sample would be made of a row: what was kept under other
            facts is not found. By default the attribute `fingerprint` of `encode_fn`; needed where that has none, and
            with `steps`.
        memory_bytes: bytes of encoded samples that each process keeps in memory for later epochs.

    Raises:
        ValueError: a field is none of these; or size or fingerprint is given without a directory.
    """

    directory: str | os.PathLike[str] | None = None
    size: int | str | None = None
    fingerprint: Mapping[str, Fact] | None = None
    memory_bytes: int = 0

    def __post_init__(self) -> None:
        """Checks the fields."""
        if type(self.memory_bytes) is not int or self.memory_bytes < 0:
            raise ValueError(f"memory_bytes is a number of bytes, 0 or more, got {self.memory_bytes!r}")
        for name, value in (("size", self.size), ("fingerprint", self.fingerprint)):
            if value is not None and self.directory is None:
                raise ValueError(f"{name} is that of an encode cache with a directory: give both, or leave it out")
        _bytes_of(self.size)

    @property
    def most_bytes(self) -> int:
        """What the directory may take."""
        return _bytes_of(self.size)


def check_group(name: str, given: object, kind: type[Order | BadRows | EncodeCache]) -> None:
    """Refuses what is no group of settings.

    Args:
        name: of the argument.
        given: what it was given.
        kind: what it takes.

    Raises:
        TypeError: it is another type.
    """
    if not isinstance(given, kind):
        group = f"lazyshard.{kind.__name__}"
        raise TypeError(f"{name} is a {group}, got {given!r:.100}; write {name}={group}(...)")


def _bytes_of(size: Any) -> int:
    """Returns the bytes of a size. Raises ValueError: it is no number of bytes, or too small."""
    if size is None:
        return ENCODE_CACHE_BYTES
    try:
        found = parse_size(size) if type(size) is str else size
    except ValueError:
        found = None
    if type(found) is not int or found < LEAST_CACHE_BYTES:
        raise ValueError(
            f"size of an encode cache is a number of bytes from {LEAST_CACHE_BYTES} on, or a text such as '20GB' or "
            f"'512MiB', got {size!r}"
        )
    return found
