"""Everything that a report tells of a stream: looked at once, part by part, whatever state the stream is in.

A part that cannot be looked at leaves a sentence in its place. Nothing is written, no lock is taken and nothing is
waited for. The cost is that of some hundred seals, of the rows of packs, and of the order of two million samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, Protocol, TypeVar

from lazyshard.errors import LazyShardError, RowInvalid
from lazyshard.format.dealt import DealtByCost
from lazyshard.inspection.inspection_balance import LENGTH_FIELD, BalanceReport, Training, dealt_by_cost, report_balance
from lazyshard.inspection.inspection_shuffle import ALL, Reading, ShuffleReport, report_shuffle
from lazyshard.inspection.outlook import Looks, Outlook
from lazyshard.inspection.report_chunks import ChunkFacts, deleted_since, look_at_chunks, told
from lazyshard.inspection.report_course import At, Dry, Pause, dry_points, pauses, published_bytes, published_rows
from lazyshard.inspection.report_packing import Packing, look_at_packing
from lazyshard.inspection.report_refusals import Refusals, read_refusals
from lazyshard.inspection.report_trained import trained_points
from lazyshard.inspection.report_training import TrainingFacts, training_of
from lazyshard.inspection.survey import take_survey
from lazyshard.plan.balance import PER_TOKEN, PER_TOKEN_SQUARED, Cost
from lazyshard.stream.opening import open_now
from lazyshard.stream.published import Published
from lazyshard.stream.stream import Stream

WINDOWS: Final = (0, 2, 8)
"""Shuffle windows that are compared, in chunks: none, and those that ms-swift gets by default."""

BALANCED_ROWS: Final = 1_000_000
"""That are dealt to see what it would gain, at the most, but for one piece of two chunks a rank: a second or so."""

_T = TypeVar("_T")


class Progress(Protocol):
    """Takes a phase, how many chunks of it are done, and of how many."""

    def __call__(self, phase: str, done: int, total: int, /) -> object:
        """Shows it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a report is asked for.

    Attributes:
        ranks, micro_batch_size, global_batch_size: of training; None for what the stream's consumers tell. The last is
            in samples over all ranks.
        length_field: of a row's length in tokens, where no seal tells it; None for what the producer said.
        pack: tokens of a pack; None for the power of two that holds the longest row.
        checkpoints: folders of runs, whose states tell how training went on.
        chunks: how many chunks are looked at.
    """

    ranks: int | None = None
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    length_field: str | None = None
    pack: int | None = None
    checkpoints: tuple[Path, ...] = ()
    chunks: int = 200


@dataclass(slots=True)
class ReportFacts:
    """What was found.

    Attributes:
        outlook: how the stream is, as `lazyshard status` has it.
        samples_per_chunk: rows in every chunk but possibly the last; None where that is not known.
        training: how it is trained, or would be.
        chunks: what the chunks tell that were looked at.
        dealt: how its producer has dealt it by cost, None where it has not.
        packing: how full sequences are; None where that is not known.
        balance: how even the micro batches of ranks are; None where that is not known.
        balance_of_steps: the same of whole global batches; None too where they are of one micro batch a rank.
        no_balance: why there is none.
        shuffle: how far apart neighbours are, with the windows of `WINDOWS` and the run's own.
        no_shuffle: why there is none.
        rows, sizes: how many rows and bytes were published when; bytes from the first chunk that was looked at.
        trained: samples of each consumer in its checkpoints, by time.
        pauses: where publishing stood still, the longest first.
        dry: checkpoints at which training had used up what was published; only of streams whose chunks were all read.
        refusals: the rows that were refused, None without a file of them.
        no_checkpoints: which checkpoints of the folders do not count, a sentence each.
        unread: what else could not be read, a sentence each.
    """

    outlook: Outlook
    training: TrainingFacts
    samples_per_chunk: int | None = None
    chunks: ChunkFacts = field(default_factory=ChunkFacts)
    dealt: DealtByCost | None = None
    packing: Packing | None = None
    balance: BalanceReport | None = None
    balance_of_steps: BalanceReport | None = None
    no_balance: str = ""
    shuffle: ShuffleReport | None = None
    no_shuffle: str = ""
    rows: list[At] = field(default_factory=list)
    sizes: list[At] = field(default_factory=list)
    trained: dict[str, list[At]] = field(default_factory=dict)
    pauses: list[Pause] = field(default_factory=list)
    dry: list[Dry] = field(default_factory=list)
    refusals: Refusals | None = None
    no_checkpoints: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)


def gather(directory: Path, samples_per_chunk: int | None, asked: Asked, now: float, progress: Progress) -> ReportFacts:
    """Looks at a stream.

    Args:
        directory: the stream's directory.
        samples_per_chunk: of a foreign directory, rows in every chunk but the last; None for those of its first one.
        asked: what is asked for.
        now: seconds since 1970.
        progress: is told how far it is.

    Raises:
        StreamMissing, StreamUnsealed, StreamInvalid, VersionUnsupported, OSError: as `take_survey`.
    """
    outlook = Looks().add(take_survey(directory, now))
    consumers, unread = outlook.survey.consumers, list[str]()
    stream = _try(lambda: open_now(directory, samples_per_chunk), unread)
    dealt = None if stream is None else _try(lambda: dealt_by_cost(stream), unread)
    training = training_of(
        consumers,
        dealt,
        asked.ranks,
        asked.micro_batch_size,
        asked.global_batch_size,
        None if stream is None else stream.samples_per_chunk,
    )
    facts = ReportFacts(outlook, training, dealt=dealt, unread=unread)
    facts.refusals = _try(lambda: read_refusals(directory), unread)
    manifest = outlook.survey.census.manifest
    stream_id = None if manifest is None else manifest.stream_id
    facts.trained = trained_points(directory, stream_id, consumers, asked.checkpoints, facts.no_checkpoints)
    if stream is None:
        return facts
    facts.samples_per_chunk = stream.samples_per_chunk
    published = _try(stream.published, unread)
    if published is None:
        return facts
    _look_at_chunks(facts, stream, published, asked, progress)
    _look_at_balance(facts, stream, asked, progress)
    _look_at_shuffle(facts, published, progress)
    return facts


def _look_at_chunks(facts: ReportFacts, stream: Stream, published: Published, asked: Asked, progress: Progress) -> None:
    retired = _try(stream.retired, facts.unread) or 0
    first = min(retired, published.chunks)
    chunks = look_at_chunks(
        stream, first, published.chunks, asked.chunks, lambda done, total: progress("chunks", done, total)
    )
    facts.chunks = chunks
    facts.rows = published_rows(chunks.points, stream.samples_per_chunk)
    facts.sizes = published_bytes(chunks.points)
    facts.pauses = pauses(chunks.points)
    if chunks.looked_at == chunks.there:
        step = facts.training.step_samples
        for name, trained in sorted(facts.trained.items()):
            facts.dry += dry_points(name, trained, facts.rows, step)


def _look_at_balance(facts: ReportFacts, stream: Stream, asked: Asked, progress: Progress) -> None:
    """Looks at packing too: whether rows are packs shows in what balance reads of them."""
    training, made = facts.training, facts.dealt
    costs = Cost(PER_TOKEN, PER_TOKEN_SQUARED)
    if made is not None:
        costs = Cost(made.cost_per_token, made.cost_per_token_squared)
    name = asked.length_field or (LENGTH_FIELD if made is None else made.length_field)
    chunks = facts.chunks
    progress("balance", chunks.looked_at, chunks.looked_at)
    reasons: list[str] = []
    if chunks.tokens.count or asked.length_field is not None or chunks.made.form == "pack":
        micro = Training(training.ranks, training.micro_batch_size, name, costs)
        failed: list[LazyShardError | OSError] = []
        facts.balance = _try(lambda: report_balance(stream, micro, most=BALANCED_ROWS, unread=failed), reasons)
        # A piece that was deleted meanwhile is no damage.
        failed = [error for error in failed if not deleted_since(stream, facts.outlook.survey.census.retired, error)]
        reasons += [told(error) for error in failed[:1]]
        if facts.balance is not None and not facts.balance.looked_at:
            facts.balance = None
        elif failed:
            # What is told is told of the rest. A row whose length nobody has told is no damage.
            damage = [told(error) for error in failed if not isinstance(error, RowInvalid)]
            facts.unread += [one for one in damage[:1] if one not in facts.unread]
        whole = training.rank_step_samples
        if facts.balance is not None and whole is not None and whole != training.micro_batch_size:
            step = Training(training.ranks, whole, name, costs)
            facts.balance_of_steps = _try(lambda: report_balance(stream, step, most=BALANCED_ROWS, unread=[]), reasons)
    facts.no_balance = reasons[0] if reasons else ""
    packed = facts.balance is not None and facts.balance.packed
    facts.packing = look_at_packing(chunks.made, chunks.tokens, chunks.kept, asked.pack, packed=packed)


def _look_at_shuffle(facts: ReportFacts, published: Published, progress: Progress) -> None:
    training, size = facts.training, facts.samples_per_chunk
    if size is None or not published.samples:
        return
    progress("order of reading", facts.chunks.looked_at, facts.chunks.looked_at)
    windows: list[int | Literal["all"]] = sorted({*WINDOWS, *([training.window] if training.window else [])})
    if published.ended:
        windows.append(ALL)
    reading = Reading(training.ranks, training.unit or "chunk", training.rank_step_samples or training.micro_batch_size)
    try:
        facts.shuffle = report_shuffle(published, size, reading, windows)
    except ValueError as error:
        facts.no_shuffle = str(error)


def _try(look: Callable[[], _T], unread: list[str]) -> _T | None:
    """Returns what is looked at, None where it cannot be, which becomes a sentence."""
    try:
        return look()
    except (LazyShardError, OSError) as error:
        if told(error) not in unread:
            unread.append(told(error))
    return None
