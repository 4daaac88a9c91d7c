"""What `lazyshard inspect` advises: which setting of the producer or of training to change, and why. No I/O.

Eight kinds, each of them at most once, in this order: measure lengths, pack in place of padding, pack, fuller packs,
balance between ranks, shuffle window, chunk size, refused rows. Savings are arithmetic on the lengths that were looked
at, no measured times.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from lazyshard.inspection.inspection import Overview
from lazyshard.inspection.row_facts import Lengths
from lazyshard.plan.balance import Cost
from lazyshard.plan.shuffle import expected_neighbours
from lazyshard.stream.consumers import Consumer

FEW_ROWS: Final = 200
"""Of fewer rows nothing is advised: they may be an attempt."""

RANKS: Final = 8
"""A node's, where no consumer tells how many there are."""

_MOST_RANKS: Final = 1024
"""So many are drawn from the lengths for the balance; with more, steps are hardly less even."""

_STEPS: Final = 200
_QUANTILES: Final = 256

_WORTH_PACKING: Final = 0.2
_FULL: Final = 0.95
_UNEVEN: Final = 1.1

_WINDOW: Final = 8
"""Chunks of a rank that are shuffled together: the default of ms-swift's integration where a stream has enough."""

_LARGE_CHUNK: Final = 2e9
_SMALL_CHUNK: Final = 100e3
_MANY_CHUNKS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Advice:
    """What to change.

    Attributes:
        text: what and why, a sentence.
        setting: the option or command that does it.
    """

    text: str
    setting: str


@dataclass(frozen=True, slots=True)
class Training:
    """How a stream is trained, as far as its consumers tell.

    Attributes:
        ranks: data-parallel ranks.
        micro_batch_size: samples of a rank in a micro batch.
        window: chunks of a rank that are shuffled together, 0 in order; None where nothing tells.
    """

    ranks: int = RANKS
    micro_batch_size: int = 1
    window: int | None = None


def training_of(consumers: Sequence[Consumer], samples_per_chunk: int) -> Training:
    """Returns how the consumer trains that has saved a checkpoint last; the defaults where none has."""
    newest = max(
        (one.cursor for one in consumers if one.cursor is not None and one.cursor.state is not None),
        key=lambda cursor: cursor.updated_at,
        default=None,
    )
    if newest is None or newest.state is None:
        return Training()
    part = newest.state.parts[-1]
    return Training(part.dp, part.batch_size, -(-newest.state.window // samples_per_chunk))


def advise(found: Overview, training: Training) -> list[Advice]:
    """Returns what to change about a stream, the most useful first; nothing for less than `FEW_ROWS` rows.

    Args:
        found: what is in it.
        training: how it is trained.
    """
    if found.samples < FEW_ROWS or not found.lengths.count:
        return []
    return [*_of_lengths(found), *_of_order(found, training), *_of_chunks(found, training), *_of_refusals(found)]


def _of_lengths(found: Overview) -> Iterator[Advice]:
    tokens, made = found.tokens, found.made
    if not tokens.count:
        stream = shlex.quote(str(found.directory))
        yield Advice(
            "lengths in tokens are not known, so packing and balance cannot be judged: have a producer seal them",
            f"lazyshard-producer run --source {stream} --out NEW --measure TOKENIZER …",
        )
        return
    if made.form == "pad" and made.size and tokens.mean < _FULL * made.size:
        padding = 1 - tokens.mean / made.size
        yield Advice(
            f"{_percent(padding)} of the padded sequences is padding: pack the rows in place of padding them",
            f"lazyshard-producer run … --pack {made.size}",
        )
    elif made.form == "pack" and made.size and tokens.mean < _FULL * made.size:
        yield Advice(
            f"packs are {_percent(tokens.mean / made.size)} full: let each choose from more rows",
            "lazyshard-producer run … --pack-buffer 100000",
        )
    elif made.form is None and not found.packs:
        size = pack_size(tokens.largest)
        saved = 1 - tokens.mean / size
        if saved >= _WORTH_PACKING:
            yield Advice(
                f"rows have {tokens.mean:,.0f} of at most {size:,} tokens on average: packed they make up to "
                f"{_percent(saved)} fewer sequences",
                f"lazyshard-producer run … --pack {size}",
            )


def _of_order(found: Overview, training: Training) -> Iterator[Advice]:
    rows = found.made.form is None and not found.packs
    if rows and found.tokens.count and found.dealt is None:
        uneven = unevenness(found.tokens, training)
        if uneven >= _UNEVEN:
            yield Advice(
                f"in a step of {training.ranks:,} ranks the slowest one has {uneven:.2f} times the work of the mean, "
                f"where rows of these lengths meet by chance: deal them by cost",
                f"lazyshard-producer run … --balance {training.ranks} --micro-batch-size {training.micro_batch_size}",
            )
    chunks = found.published.chunks // training.ranks
    if training.window or found.made.shuffled or found.dealt is not None or chunks < 2:
        return
    size, window = found.samples_per_chunk, min(_WINDOW, chunks)
    now, then = (expected_neighbours(training.ranks, size, width * size, None) for width in (0, window))
    yield Advice(
        f"neither the producer nor a reader in order shuffles the rows, unless they came in an order by chance: a "
        f"window puts {then:,.0f} draws of a rank between two neighbours in place of {now:.1f}",
        f"shuffle_window={window}",
    )


def _of_chunks(found: Overview, training: Training) -> Iterator[Advice]:
    chunks, size = found.published.chunks, found.lengths.mean * found.samples_per_chunk
    if found.published.ended and chunks < training.ranks:
        yield Advice(
            f"there are fewer chunks ({chunks:,}) than ranks ({training.ranks:,}), so each row is dealt, and read, by "
            f"itself: make smaller chunks",
            f"lazyshard-producer run … --samples-per-chunk {max(1, found.samples // (2 * training.ranks))}",
        )
    elif size > _LARGE_CHUNK and found.samples_per_chunk > 1:
        yield Advice(
            f"a chunk has {size / 1e9:,.1f} GB, and no row of it is trained before all of it is there: make smaller "
            f"chunks",
            f"lazyshard-producer run … --samples-per-chunk {max(1, int(found.samples_per_chunk * 256e6 / size))}",
        )
    elif size < _SMALL_CHUNK and chunks >= _MANY_CHUNKS:
        yield Advice(
            f"{chunks:,} chunks of {size / 1e3:,.1f} kB cost more in opening files than in reading them: make larger "
            f"chunks",
            f"lazyshard-producer run … --samples-per-chunk {int(found.samples_per_chunk * 1e6 / size)}",
        )


def _of_refusals(found: Overview) -> Iterator[Advice]:
    told = found.source_rows
    if told is not None and told.refused:
        text = f"{told.refused:,} of {told.read:,} source rows were refused: see why, and correct their sources"
        yield Advice(text, f"lazyshard-producer quarantine {shlex.quote(str(found.directory))}")


def pack_size(longest: int) -> int:
    """Returns the power of two, from 512 on, that holds the longest row.

    >>> pack_size(300), pack_size(4096), pack_size(4097)
    (512, 4096, 8192)
    """
    return max(512, 1 << (max(1, longest) - 1).bit_length())


def unevenness(tokens: Lengths, training: Training) -> float:
    """Returns the work of the slowest rank over that of the mean rank, where rows of these lengths meet by chance.

    Counted in some steps that are drawn from the lengths, always the same ones.
    """
    lengths = [tokens.quantile((index + 0.5) / _QUANTILES) for index in range(_QUANTILES)]
    costs = Cost().of(lengths)
    drawn = np.random.default_rng(0).integers(
        0, _QUANTILES, (_STEPS, min(training.ranks, _MOST_RANKS), min(training.micro_batch_size, 64))
    )
    steps = costs[drawn].sum(axis=2)
    mean = float(steps.mean())
    return float(steps.max(axis=1).mean()) / mean if mean else 1.0


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
