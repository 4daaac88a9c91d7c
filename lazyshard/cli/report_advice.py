"""What a report says of the rows of a stream: in a sentence or two what was found, and what to change.

Decisions only: facts go in, sentences come out. A change has a weight, by which the summary orders them: above 1 it
stops things or loses rows, else it is the share of training time, of rows or of bytes that is at stake, about.
Of the run there is more in `lazyshard.cli.report_advice_run`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lazyshard.cli.output import count
from lazyshard.inspection.inspection_balance import BalanceReport
from lazyshard.inspection.report_chunks import Made
from lazyshard.inspection.report_packing import Packing
from lazyshard.inspection.report_training import TrainingFacts
from lazyshard.inspection.row_facts import Lengths
from lazyshard.plan.balance import Evenness

__all__ = [
    "LITTLE",
    "Change",
    "Finding",
    "balance_finding",
    "in_order",
    "lengths_finding",
    "packing_finding",
    "percent",
]

_WORTH_PACKING: Final = 0.2
"""Fewer micro batches by this share are worth packing."""

_FULL: Final = 0.95
_WORTH_BALANCING: Final = 0.03
"""Share of the training time that dealing rows by cost must save."""

LITTLE: Final = 0.01
"""Weight of what saves no time but tells more."""


@dataclass(frozen=True, slots=True)
class Change:
    """Something to change.

    Attributes:
        weight: how much is at stake, see above.
        text: what, in a sentence.
        command: the command or setting that does it, "" where there is none.
    """

    weight: float
    text: str
    command: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found in a part.

    Attributes:
        text: in a sentence or two.
        changes: what to change; empty where nothing.
        known: whether there was enough to look at.
    """

    text: str
    changes: tuple[Change, ...] = ()
    known: bool = True


def percent(share: float) -> str:
    """Returns a share in percent, a small one with more digits.

    >>> percent(0.384), percent(0.0123), percent(0.00042), percent(0.0), percent(0.9996)
    ('38 %', '1.2 %', '0.042 %', '0 %', '99.9 %')
    """
    value = 100 * share
    if not value:
        return "0 %"
    if 99 < value < 100:
        return f"{min(value, 99.9):.1f} %"
    return f"{value:.0f} %" if abs(value) >= 9.95 else f"{value:.1f} %" if abs(value) >= 0.095 else f"{value:.2g} %"


def lengths_finding(stream: str, lengths: Lengths, tokens: Lengths, *, native: bool, objects: bool) -> Finding:
    """Says how long rows are.

    Args:
        stream: its directory or URL.
        lengths: in bytes.
        tokens: in tokens, as far as they are known.
        native: whether it is a stream of ours.
        objects: whether it is in an object store.
    """
    if not lengths.count:
        return Finding("There is no row to look at.", known=False)
    if tokens.count:
        known = "" if tokens.count >= lengths.count else f" They are known of {percent(tokens.count / lengths.count)}."
        return Finding(f"{_spread(tokens, 'token')}{known}")
    found = f"{_spread(lengths, 'byte')} How long they are in tokens is not known."
    if objects:
        text = "Have the producer seal the lengths in tokens, so that packing and balance can be told"
        return Finding(found, (Change(LITTLE, text, "lazyshard-producer run … --encode …"),))
    if not native:
        text = "Make a stream of it with the lengths in tokens, so that packing and balance can be told"
        command = f"lazyshard-producer run --source {shlex.quote(stream)} --out NEW --measure DIR"
        return Finding(found, (Change(LITTLE, text, command),))
    text = "Measure the rows in tokens, so that packing and balance can be told"
    return Finding(found, (Change(LITTLE, text, f"lazyshard measure {shlex.quote(stream)} --tokenizer DIR"),))


def packing_finding(packing: Packing | None, made: Made) -> Finding:
    """Says how full sequences are, and what packing would bring."""
    if packing is None:
        if made.form is None:
            return Finding("Not known, since the lengths in tokens are not.", known=False)
        text = "Not known: the seals do not tell how long the sequences are, in tokens or at the most."
        return Finding(text, known=False)
    if packing.form == "pad":
        text = (
            f"Rows are padded to {count(packing.size, 'token')}, and {percent(1 - packing.filled)} of that is padding."
        )
        if packing.filled >= _FULL:
            return Finding(text)
        change = "Pack the rows in place of padding them, so that nothing is computed for padding"
        return Finding(text, (Change(1 - packing.filled, change, f"lazyshard-producer run … --pack {packing.size}"),))
    if packing.form is not None:
        noun = "Packs" if packing.form == "pack" else "Sequences"
        text = f"{noun} of {count(packing.size, 'token')} are {percent(packing.filled)} full."
        if packing.filled >= _FULL or packing.form == "split":
            return Finding(text)
        change = "Give the packs more rows to choose from, or more tokens: too few fit together"
        return Finding(text, (Change(1 - packing.filled, change, "lazyshard-producer run … --pack-buffer 100000"),))
    return _of_rows(packing)


def _of_rows(packing: Packing) -> Finding:
    long = f" {count(packing.too_long, 'row')} of {packing.rows:,} would not fit." if packing.too_long else ""
    packed = f"Packed to {count(packing.size, 'token')}"
    if not packing.packs:
        return Finding(f"No row fits into packs of {count(packing.size, 'token')}.")
    if packing.saved < _WORTH_PACKING:
        return Finding(f"{packed}, rows would need only {percent(packing.saved)} fewer micro batches.{long}")
    text = (
        f"{packed}, rows would need {percent(packing.saved)} fewer micro batches than with one row each, and the packs "
        f"would be {percent(packing.filled)} full.{long}"
    )
    change = (
        f"Pack the rows: {percent(packing.saved)} fewer micro batches of {count(packing.size, 'token')} at the most"
    )
    return Finding(text, (Change(packing.saved, change, f"lazyshard-producer run … --pack {packing.size}"),))


def balance_finding(
    found: BalanceReport | None, reason: str, training: TrainingFacts, steps: BalanceReport | None = None
) -> Finding:
    """Says how even the ranks of a step are.

    Args:
        found: micro batch by micro batch; None where that is not known.
        reason: why it is not, "" for no other reason than that lengths are not known.
        training: how the stream is trained.
        steps: the same of whole global batches, None where these are of one micro batch a rank.
    """
    if found is None:
        text = f"Not known: {reason}" if reason else "Not known, since the lengths in tokens are not."
        return Finding(text, known=False)
    one = next(one for one in found.ranks if one.ranks == training.ranks)
    if one.as_it_is is None:
        return Finding(f"There are too few rows for a step of {count(training.ranks, 'rank')}.", known=False)
    if training.ranks == 1:
        return Finding("With one rank nobody waits for another.")
    # What counts is where ranks meet: after a global batch where micro batches of a rank follow each other freely.
    even = _at(steps, training.ranks) or one.as_it_is
    what = "global batch" if steps is not None else "micro batch"
    text = (
        f"With {training.ranks:,} ranks that meet after each {what}, training takes {even.overall:.2f} times as long "
        f"as with even ones: the others wait for the slowest."
    )
    if found.made is not None and training.window:
        text += (
            f" The stream is dealt by cost, but read with a shuffle window of {training.window:,}, which undoes that."
        )
        change = "Read the stream without a shuffle window: it is dealt by cost"
        return Finding(text, (Change(0.2, change, "shuffle_window=0"),))
    size = training.micro_batch_size
    command = f"lazyshard-producer run … --balance {training.ranks} --micro-batch-size {size}"
    if one.dealt is None:
        if found.made is None and found.samples_per_chunk % size and even.overall - 1 >= _WORTH_BALANCING:
            change = f"Make chunks of whole micro batches of {size:,}, and have them dealt by cost"
            return Finding(text, (Change(1 - 1 / even.overall, change, command),))
        return Finding(f"{text} The stream is dealt for these ranks." if found.made is not None else text)
    saved = 1 - min(one.dealt.overall, even.overall) / even.overall
    if saved < _WORTH_BALANCING:
        return Finding(f"{text} Dealing rows by cost would save {percent(saved)} only.")
    change = (
        f"Have rows dealt by cost: {percent(saved)} less training time, {min(one.dealt.overall, even.overall):.2f} "
        f"times that of even ranks in place of {even.overall:.2f}"
    )
    return Finding(text, (Change(saved, change, command),))


def _at(found: BalanceReport | None, ranks: int) -> Evenness | None:
    if found is None:
        return None
    return next((one.as_it_is for one in found.ranks if one.ranks == ranks), None)


def in_order(findings: Sequence[Finding]) -> list[Change]:
    """Returns all changes, the weightiest first."""
    return sorted((change for one in findings for change in one.changes), key=lambda one: -one.weight)


def _spread(lengths: Lengths, noun: str) -> str:
    if lengths.smallest == lengths.largest:
        return f"All rows have {count(lengths.largest, noun)}."
    median, high = lengths.quantile(0.5), lengths.quantile(0.99)
    return (
        f"Half of the rows have at most {count(median, noun)}, 99 of 100 at most {high:,}, and the longest "
        f"{lengths.largest:,}."
    )
