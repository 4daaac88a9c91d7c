"""`LazyShardedSequences`: packs, pieces of exactly so many tokens, or padded rows, made of raw rows while training."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final, Literal, NoReturn

from lazyshard.data.blended import BlendedDataset
from lazyshard.data.dataset import LazyShardedDataset
from lazyshard.data.index_space import as_count
from lazyshard.data.iterable import RankIterable, worker_here
from lazyshard.data.rank import WORKERS_READ, Rank, SharedNumbers, Stats, carrying, enter_process, log, resolve_rank
from lazyshard.data.run_state import EpochPosition, Ranges, StateDicts, Worker, begun_part, gaps_of, ranges, ranges_of
from lazyshard.data.samples import BadRowCount
from lazyshard.data.sequence_forms import DatasetRows, SequenceMaker, TooLong, check_beginning, enter_rows, row_too_long
from lazyshard.data.settings import BadRows, EncodeFn, Step, check_choice, check_group
from lazyshard.errors import LazyShardError
from lazyshard.format.state import SequenceState
from lazyshard.part import Part
from lazyshard.plan.sequences import Form, Pack, Pad, Split, SplitSequence, completed
from lazyshard.stream.run_parts import parts_behind_steps, parts_without, resumed_parts
from lazyshard.stream.sequences import SequencePlanner, SequenceWalk, skips_of
from lazyshard.stream.stream import lengths_missing

AtEnd = Literal["drop", "complete"]  # of the sequences left over: not drawn, or in one more micro batch of every rank

_WINDOW_ROWS: Final = 10_000  # Rows of a window, if not said otherwise: so packs are 99.9 % full (docs/packing.md)


class LazyShardedSequences(RankIterable):
    """The sequences of one rank, in order, from where the run stands to the end of the epoch that is set.

    They are made of rows, raw or encoded, whose lengths are known from the seals, window by window::

        sequences = LazyShardedSequences("stream", encode, form=Pack(8192), batch_size=1)
        loader = DataLoader(sequences, batch_size=1, collate_fn=collate, num_workers=2)

    Which sequences there are, and in which order, follows from the stream, the form, the window, the seed and the
    epoch. They are dealt to the ranks, and to workers, by micro batches, so every rank has as many as the others, and a
    loader whose batches are as large gives the same order whatever the number of workers. A pass over a live stream
    waits for what is still to come.

    Every row is in one sequence of an epoch, but for those of 0 tokens and for what `at_end`, `too_long` and `bad_rows`
    say. Every process reads the lengths of all rows, and of the rows only those of its own sequences. There is no
    length and no map-style form.

    Args:
        directory: as of `LazyShardedDataset`, but for directories that another program fills. Or a data set or a
            `BlendedDataset` that is not used yet, without ranks, with `batch_size` 1 and no schedule: rows then come in
            its order, and go through the steps, the encoder and the cache of their data set, whose `consumer` commits.
            It ends as that does, and continues with the same weights alone.
        encode_fn: as of `LazyShardedDataset`; None takes rows as they are. What it makes has to have as many tokens as
            were measured (`Split`), or at most as many.
        form: `Pack(size)`, `Split(size)` or `Pad(size)`.
        batch_size: sequences of one rank in a micro batch. Give the `DataLoader` the same number (None is as 1), which
            cannot be seen from here: with another one `state_dict(consumed)` continues with the wrong sequences.
        dp_rank: this data-parallel rank; None asks as `LazyShardedDataset` does.
        dp_size: number of data-parallel ranks; given exactly if `dp_rank` is.
        window: chunks that are looked at together, over all ranks; None for as many as have 10,000 rows. A pack has
            rows of one window alone. Without a seed it makes no difference to what `Split` cuts.
        seed: shuffles the rows within each window, in each epoch differently; None keeps their order.
        at_end: what becomes of the sequences left over, fewer than dp_size * batch_size. "drop": they are not drawn,
            which is logged. "complete": every rank draws one more micro batch with all of them. For that packs are
            taken apart until there are enough; where rows do not suffice, and with the other forms, some come twice.
        too_long: what becomes of a row with more tokens than a sequence, with `Pack` and `Pad`: "raise", or "drop" for
            leaving it out, which `stats().dropped` counts.
        max_wait: how many seconds to wait at the most for anything that is still to be published.
        consumer: name under which rank 0 commits, and tells the producer which window it needs, as of
            `LazyShardedDataset`. Give it where the producer is held back by --max-ahead, or deletes chunks.
        steps: as of `LazyShardedDataset`, but for rows that a `Filter` drops: they are left out of their sequence,
            which `Split` cannot do. Lengths are those of what comes out.
        bad_rows: what to do with a row that cannot be read or encoded, or has more tokens than there is room for:
            "substitute" leaves it out of its sequence, and takes another sequence of the window where nothing is left
            of that; "raise" raises, and so does `Split` always, as all tokens behind would move.
        micro_batches_per_step: as of `Order`.

    Raises:
        WaitTimeout: no stream has appeared.
        LengthUnknown: how long the rows of the first chunk are is not known; or another program fills the directory.
        BadSample: a row of the first chunk is longer than a sequence.
        StreamMismatch: the rows are packs already, which a `LazyShardedDataset` trains.
        FileInvalid, StreamInvalid: the directory cannot be read.
        ConfigInvalid: rank and size are impossible.
        ValueError, TypeError: another argument is.

    Of a stream with no chunk yet the first chunk is looked at by the first pass, which then raises these.
    """

    _OF_A_PROCESS: Final = ("_rows", "_planner", "_maker", "_handed_out", "_counted", "_reported", "_dropped", "_tells")

    def __init__(
        self,
        directory: str | os.PathLike[str] | LazyShardedDataset | BlendedDataset,
        encode_fn: EncodeFn | None = None,
        *,
        form: Form,
        batch_size: int = 1,
        dp_rank: int | None = None,
        dp_size: int | None = None,
        window: int | None = None,
        seed: int | None = None,
        at_end: AtEnd = "drop",
        too_long: TooLong = "raise",
        max_wait: float = 600.0,
        consumer: str | None = None,
        steps: Iterable[Step] | Step = (),
        bad_rows: BadRows = BadRows(),
        micro_batches_per_step: int | None = None,
    ) -> None:
        check_group("bad_rows", bad_rows, BadRows)
        if not isinstance(form, (Pack, Pad, Split)):
            raise TypeError(f"form is Pack(SIZE), Split(SIZE) or Pad(SIZE), got {form!r:.100}")
        check_choice("at_end", at_end, AtEnd)
        check_choice("too_long", too_long, TooLong)
        self._at_end, self._too_long, self._size = at_end, too_long, _number("batch_size", batch_size, 1)
        self._seed = None if seed is None else _number("seed", seed, 0)
        window, micro = None if window is None else _number("window", window, 1), micro_batches_per_step
        # Positions of each rank in an optimiser step; 0 where it is not known.
        self._each = 0 if micro is None else self._size * _number("micro_batches_per_step", micro, 1)
        self._bad = BadRowCount(bad_rows, instead="it is left out")
        self._rank = None if dp_rank is None and dp_size is None else resolve_rank(dp_rank, dp_size)
        if isinstance(directory, (LazyShardedDataset, BlendedDataset)):
            if steps or encode_fn is not None or consumer is not None:
                raise ValueError("encode_fn, steps and consumer are those of the data sets: give them there")
            self._dataset: LazyShardedDataset | BlendedDataset = directory
        else:
            given: dict[str, Any] = {"max_wait": max_wait, "consumer": consumer, "steps": steps}
            try:
                self._dataset = LazyShardedDataset(directory, encode_fn, dp_rank=0, dp_size=1, **given)
            except ValueError as cause:
                # All that is missing is the size of chunks: another program fills the directory.
                if isinstance(cause, LazyShardError) or "samples_per_chunk" not in str(cause):
                    raise
                raise lengths_missing(directory) from cause
        self._samples = self._dataset._states.order.num_samples
        datasets = enter_rows(self._dataset)
        self._chunk, self.directory = datasets[0].samples_per_chunk, datasets[0].directory
        """The stream's directory; shows the URL where it is none."""
        self.form = form
        """What is made of the rows."""
        self.window = window or -(-_WINDOW_ROWS // self._chunk)
        """Chunks that are looked at together."""
        self._shared = SharedNumbers()
        # Where passes over its epoch begin or continue, and by which parts the run came there; none for a new one.
        self._stands = EpochPosition(0)
        self._parts: tuple[Part, ...] = ()
        # What `skip` was told in this process, which a state that is loaded later must not undo: samples, and whether
        # steps too.
        self._skipped: tuple[list[tuple[int, int]], bool] = [], False
        self._checked = False not in [check_beginning(dataset.reader, form, too_long) for dataset in datasets]
        self._attach()

    def _attach(self) -> None:
        self._rows = DatasetRows(self._dataset, self.form, self.window, self._seed, self._samples)
        self._where = self._rows.where
        self._planner = SequencePlanner(self._rows, self.form, self._seed, self._where, self._meet_too_long)
        self._planner.skips = lambda epoch: skips_of(self._parts_of(epoch, 1))
        self._maker = SequenceMaker(self._rows, self.form, self._bad.fresh(), self._planner.length_of)
        # What the pass in this process has handed out: where the micro batch begins that it is at, and its walk; and
        # what `state_dict(consumed)` has planned last, from which position on.
        self._handed_out: tuple[EpochPosition, SequenceWalk] | None = None
        self._counted: tuple[EpochPosition, SequenceWalk] | None = None
        self._reported = Stats()
        self._dropped = 0  # Rows in no sequence, of the passes before
        self._tells = False  # Whether this process says which row is the first that is too long

    def __getstate__(self) -> dict[str, Any]:
        """Settles the rank first: a spawned worker can ask neither Megatron nor torch.distributed."""
        self._rank = self.rank
        return {name: value for name, value in self.__dict__.items() if name not in self._OF_A_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._attach()

    @property
    def rank(self) -> Rank:
        """Data-parallel rank and size."""
        if self._rank is None:
            self._rank = resolve_rank()
        for dataset in self._rows.datasets:
            dataset._sequence_ranks = self._rank
        return self._rank

    @property
    def consumed(self) -> int:
        """Sequences of the epoch that is set which were trained in the loaded state, over all ranks; else 0."""
        return self._begun().consumed

    def stats(self) -> Stats:
        """Returns what this process and its workers have met: `filled` are sequences in whose places others stand.

        `dropped` counts rows that are in no sequence, on rank 0 alone, and those that the encoder has skipped.
        """
        return self._shared.stats()

    def _begin_pass(self, number: int, workers: int) -> Iterator[Any]:
        rank, begun = self.rank, self._begun()
        micro = rank.dp_size * self._size
        if not begun.begun:
            begun = begun._replace(consumed=begun.consumed + number * micro, within=0 if number else begun.within)
        walk = SequenceWalk(self._planner, begun.place, begun.epoch)
        self._handed_out = None
        self._dropped = self._reported.dropped - self._maker.stats.dropped
        for dataset in self._rows.datasets:
            dataset._entered(begun.epoch)
            enter_process(dataset.reader, rank)
        self._tells = rank.dp_rank == 0 and number == 0
        # The epoch is given: by the first sequence that is asked for, another one may be set.
        return self._pass(walk, begun, rank, workers * micro, counts=self._tells)

    def __getitem__(self, index: Any) -> NoReturn:
        """Raises TypeError: how many sequences come before one only the lengths of all rows before it tell."""
        raise TypeError(f"{self.directory}: an iterable has no index: iterate, or use a DataLoader without a sampler")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where a state of the same stream, form, window and seed stands, with any ranks and workers.

        Raises:
            StateInvalid, VersionUnsupported: it cannot be used, here.
            StateMismatch: another stream, settings or lengths, or behind the last sequence (or the pass raises it).
            RuntimeError: `skip` was called before, and the state does not leave that out.
            BadSample, LengthUnknown, WaitTimeout, ChunkRetired: as a pass, of the window in which it stands.
        """
        here, where = (self.rank.dp_size, self._size), f"{self._where}: the state to continue from"
        with carrying():
            read = self._rows.read_state(state)
            found = EpochPosition.of_state(read, state, here, worker_here(), where)
            # Those of earlier releases do not say of which ranks.
            parts = read.parts or (Part(1, 1, read.consumed, epoch=read.epoch or None),)
            self._planner.check(read)
        kept, (out, of_steps) = gaps_of(parts), self._skipped
        if of_steps or kept.joined(out).ranges != kept.ranges:
            text = "the state does not leave out what `skip` said before: load it into new sequences, then skip"
            raise RuntimeError(f"{self._where}: {text} (a StatefulDataLoader loads its own as it is iterated)")
        self.set_epoch(found.epoch)
        self._begin(found, parts)

    def _begun(self) -> EpochPosition:
        """Returns where passes over the epoch that is set begin."""
        return self._stands if self._stands.epoch == self.epoch else EpochPosition(self.epoch)

    def _parts_of(self, epoch: int, ranks: int) -> tuple[Part, ...]:
        """Returns the parts with which so many ranks begin, or continue, in an epoch."""
        if self._parts and epoch == self._stands.epoch:
            return resumed_parts(self._parts, ranks, self._size, draws_per_step=self._each)
        return (begun_part(self._parts, epoch, ranks, self._size, self._each),)

    def _begin(self, position: EpochPosition, parts: tuple[Part, ...]) -> None:
        self._stands, self._parts = position, parts
        self._handed_out = self._counted = None  # The run continues elsewhere, perhaps by other lengths
        self._dataset._numbers[WORKERS_READ] = 0

    def skip(self, samples: Ranges = (), chunks: Ranges = (), steps: Ranges = ()) -> None:
        """Leaves samples out of the sequences from here on, in every epoch. Later states keep that.

        As `LazyShardedDataset.skip`, on every rank. Sequences that were trained stay as they are; those to come are
        made without these rows. Of a blend its data sets' own `skip` leaves samples out, before these are given to the
        sequences, in the same way at each start of the run. `steps` is one range of the next optimiser steps, to pass
        over; `consumed` then counts their sequences, too.

        Raises:
            ValueError: a range is empty or negative, of a blend, or of steps that are not known or not the next ones.
            RuntimeError: the sequences are used already.
            WaitTimeout: the steps are not published.
        """
        if self._handed_out is not None or self._dataset._numbers[WORKERS_READ]:
            raise RuntimeError(f"{self._where}: these sequences are in use already, what to skip is said before")
        out = ranges_of(samples, chunks, self._chunk)
        if out and len(self._rows.datasets) > 1:
            raise ValueError(f"{self._where}: samples are those of one stream: skip them on the data sets of the blend")
        position = begun = self._begun()
        if begun.within or begun.worker is not None:
            raise ValueError(f"{self._where}: the state stands within a micro batch: skip from one at the end of one")
        parts = self._parts_of(begun.epoch, self.rank.dp_size)
        for start, stop in ranges("steps", steps):
            parts = parts_behind_steps(parts, start, stop)
            position = self._after(sum(part.dp * part.draws for part in parts))
        self._skipped = [*self._skipped[0], *out], self._skipped[1] or position != begun
        self._begin(position, parts_without(parts, out))

    def commit(self, consumed: int, *, last_epoch: bool, keep: StateDicts = (), take_over: bool = False) -> bool:
        """Tells the producer durably how far the checkpoints are, as `LazyShardedDataset.commit`, by whole windows.

        Of rows that pass over a stream several times (`num_samples`, or a blend) `last_epoch` is said of the streams.
        """
        rank, begun = self.rank, self._begun()
        if rank.dp_rank != 0:
            return False
        position = self._after(consumed)
        states: list[EpochPosition | SequenceState] = [position, *map(self._rows.read_state, keep)]
        if self._dataset._numbers[WORKERS_READ]:
            # A state of a DataLoader worker stands in the micro batch that it has handed out last.
            micro = rank.dp_size * self._size
            behind = (position.consumed - begun.consumed) // micro - self._dataset._numbers[WORKERS_READ]
            states.append(self._after(begun.consumed + max(behind, 0) * micro))
        one_epoch = last_epoch and len({one.epoch for one in states}) == 1
        # A window is made of its rows from the first one on.
        least = min(self._planner.first_window(one.place) for one in states) * self._rows.rows if one_epoch else 0
        for commits in filter(None, (dataset._commits for dataset in self._rows.datasets)):
            commits.sequences = {"dp_size": rank.dp_size, "batch_size": self._size}
        row, older = position.place.position, self._dataset.state_dict(least)
        return self._dataset.commit(row, keep=[older], last_epoch=one_epoch, take_over=take_over)

    def _state_of(self, consumed: int) -> dict[str, Any]:
        return self._state_at(self._after(consumed))

    def _state_here(self, worker: Worker | None) -> dict[str, Any]:
        position, size = self._begun(), self._size
        if self._handed_out is not None and self._handed_out[0].epoch == self.epoch:
            position, walk = self._handed_out
            position = position._replace(begun=worker is not None)
            # A worker stays in a micro batch that was handed out whole, as the next one is not its own.
            if worker is None and position.within == size:
                behind = position.consumed + self.rank.dp_size * size
                behind = behind if walk.total is None else min(behind, walk.total)
                position = EpochPosition(position.epoch, behind, walk.place_of(behind))
        return self._state_at(position if worker is None else position._replace(worker=worker))

    def _after(self, consumed: int) -> EpochPosition:
        """Returns where a run is after so many sequences of an epoch, by planning the windows since the last call."""
        begun, count = self._begun(), as_count(consumed, "sequences")
        least, known = begun.consumed, self._counted
        if known is None or known[0] != begun or not known[1].places[0].before <= max(count, least):
            known = self._counted = begun, SequenceWalk(self._planner, begun.place, begun.epoch)
        walk = known[1]
        place, micro = walk.place_of(max(count, least)), self.rank.dp_size * self._size
        most, top, whole = count, "", count
        if (total := walk.total) is not None:
            left, whole = (total - least) % micro, min(count, total)
            most = total - left + (micro if left and self._at_end == "complete" else 0)
            top = f", {most} at the most of the {total} in this epoch"
        if not least <= count <= most or (count - least) % micro:
            said = f"consumed counts whole micro batches of dp_size * batch_size = {micro // self._size} * {self._size}"
            raise ValueError(f"{self._where}: {said} sequences from {least} on{top}; got {count}")
        walk.let_go(whole)
        return EpochPosition(begun.epoch, whole, place, begun.within if whole == least else 0)

    def _state_at(self, position: EpochPosition) -> dict[str, Any]:
        ranks, facts = self.rank.dp_size, self._rows.facts()
        lengths = self._planner.digest(position.place, position.epoch, position.consumed)
        where = position.epoch, position.consumed, position.place
        *before, last = self._parts_of(position.epoch, ranks)
        # What completes the last micro batch is drawn, too.
        drawn = position.consumed - sum(part.dp * part.draws for part in before)
        batches = -(-drawn // (last.dp * last.batch_size))
        parts = (*before, replace(last, draws=max(batches * last.batch_size, last.draws)))
        rows = self._rows.told(position.epoch) if "blend" in facts else {}
        state = SequenceState(self._rows.name, facts, *where, lengths, parts, **rows)
        return state.to_dict() | position.beside(ranks, self._size)

    def _meet_too_long(self, row: int, epoch: int, tokens: int) -> None:
        if self._tells or self._too_long == "raise":
            stream, sample = self._rows.place(row, epoch)
            longer = row_too_long(self._rows.readers[stream], sample, tokens, self.form, self._too_long)
            if self._too_long == "raise":
                raise longer
            self._tells = False
            log.warning("%s; it is left out, and so are all that are longer", longer)

    def _pass(self, walk: SequenceWalk, begun: EpochPosition, rank: Rank, step: int, *, counts: bool) -> Iterator[Any]:
        size, first, within, micro = self._size, begun.consumed, begun.within, rank.dp_size * self._size
        try:
            with carrying():
                if not self._checked:
                    for stream, reader in enumerate(self._rows.readers):
                        # Which tells the producer, too.
                        self._rows.total(stream, 0, begun.epoch)
                        check_beginning(reader, self.form, self._too_long)
                    self._checked = True
                while True:
                    walk.let_go(first)
                    planned = walk.sequences(first, first + micro)
                    if len(planned) < micro:
                        planned = self._last(planned, walk.total)
                    if not planned:
                        return
                    place = walk.place_of(first)
                    for at in range(rank.dp_rank * size + within, (rank.dp_rank + 1) * size):
                        made = self._maker.make(planned[at], walk.window_of(first + at).sequences, begun.epoch)
                        within += 1
                        self._handed_out = EpochPosition(begun.epoch, first, place, within), walk
                        self._report(walk.dropped if counts else 0)
                        yield made
                    first, within = first + step, 0
        finally:
            self._report(walk.dropped if counts else 0)

    def _last(self, left: list[SplitSequence], total: int | None) -> list[SplitSequence]:
        """Returns the micro batches of all ranks that an epoch's last sequences make, none if they are not drawn."""
        rank, size, at_end = self.rank, self._size, self._at_end
        if left and rank.dp_rank == 0:
            done = "they are not drawn" if at_end == "drop" else "one more micro batch of each rank draws them"
            few = f"fewer than dp_size * batch_size = {rank.dp_size} * {size}; at_end={at_end!r}: {done}"
            said = "%s: %s sequences; left over at the end of the epoch: %d, %s"
            log.warning(said, self._where, total, len(left), few)
        return completed(left, rank.dp_size * size, self.form) if left and at_end == "complete" else []

    def _report(self, dropped: int) -> None:
        now, before = self._maker.stats, self._reported
        now = now._replace(dropped=now.dropped + self._dropped + dropped)
        if now != before:
            self._reported = now
            self._shared.report(now, before)


def _number(name: str, value: int, least: int) -> int:
    if (number := operator.index(value)) < least:
        raise ValueError(f"{name} is {least} or more, got {number}")
    return number
