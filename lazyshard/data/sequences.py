"""`LazyShardedSequences`: packs, pieces of a fixed number of tokens, or padded rows, made during training."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final, Literal, NoReturn

from lazyshard.data.blended import BlendedDataset
from lazyshard.data.dataset import LazyShardedDataset
from lazyshard.data.index_space import as_count
from lazyshard.data.iterable import RankIterable, worker_here
from lazyshard.data.rank import WORKERS_READ, Rank, SharedNumbers, Stats, carrying, enter_process, log, resolve_rank
from lazyshard.data.run_state import EpochPosition, Ranges, StateDicts, Worker, begun_part, ranges, ranges_of
from lazyshard.data.samples import BadRowCount
from lazyshard.data.sequence_forms import DatasetRows, SequenceMaker, TooLong, check_beginning, enter_rows, row_too_long
from lazyshard.data.settings import BadRows, EncodeFn, Step, check_choice, check_given, check_group
from lazyshard.errors import LazyShardError
from lazyshard.format.state import SequenceState
from lazyshard.part import Part
from lazyshard.plan.deal import check_field
from lazyshard.plan.sequences import Form, Pack, Pad, Split, SplitSequence, completed
from lazyshard.stream.run_parts import gaps_of, parts_behind_steps, parts_without, resumed_parts
from lazyshard.stream.sequences import SequencePlanner, SequenceWalk, skips_of
from lazyshard.stream.stream import lengths_missing

AtEnd = Literal["drop", "complete"]  # leftover sequences: not drawn, or in one more micro batch of every rank

_WINDOW_ROWS: Final = 10_000  # Default rows of a window, with which packs are 99.9 % full (docs/packing.md)


class LazyShardedSequences(RankIterable):
    """The sequences of one rank, in order, from the position of the run to the end of the current epoch.

    They are made window by window from rows, raw or encoded, whose lengths are in the seals::

        sequences = LazyShardedSequences("stream", encode, form=Pack(8192), batch_size=1)
        loader = DataLoader(sequences, batch_size=1, collate_fn=collate, num_workers=2)

    The sequences and their order depend only on the stream, the form, the window, the seed and the epoch. They are
    dealt to the ranks, and to workers, by micro batches, so every rank has the same number, and a loader with the same
    batch size returns the same order for any number of workers. A pass over a live stream waits for unpublished rows.

    Every row is in exactly one sequence of an epoch, except for rows of 0 tokens and the exceptions of `at_end`,
    `too_long` and `bad_rows`. Every process reads the lengths of all rows, but only the rows of its own sequences.
    Sequences have no length and no map-style form.

    Args:
        directory: as for `LazyShardedDataset`, except for directories that another program fills. Or an unused data set
            or `BlendedDataset` without ranks, with `batch_size` 1 and no schedule: rows are then read in its order,
            with the steps, the encoder and the cache of their data set, whose `consumer` commits. The sequences end
            where it ends, and can only be resumed with the same weights.
        encode_fn: as for `LazyShardedDataset`; None uses the rows as they are. Its result must have as many tokens as
            were measured (`Split`), or at most as many.
        form: `Pack(size)`, `Split(size)` or `Pad(size)`.
        batch_size: sequences of one rank in a micro batch. Give the `DataLoader` the same number (None counts as 1),
            which cannot be checked here: with another one `state_dict(consumed)` resumes with the wrong sequences.
        dp_rank: this data-parallel rank; None resolves it as `LazyShardedDataset` does.
        dp_size: number of data-parallel ranks. Pass both `dp_rank` and `dp_size`, or neither.
        window: number of chunks that are planned together, over all ranks; None for as many as have 10,000 rows. A pack
            contains rows of one window only. Without a seed the window does not affect `Split`.
        seed: shuffles the rows within each window, differently in each epoch; None keeps their order.
        at_end: how to handle leftover sequences, fewer than dp_size * batch_size. "drop" does not draw them, and logs
            that. "complete": every rank draws one more micro batch, which together hold all of them. For this packs are
            split until there are enough; if rows do not suffice, and with the other forms, some are repeated.
        too_long: how to handle a row with more tokens than a sequence, with `Pack` and `Pad`: "raise", or "drop" to
            leave it out, which `stats().dropped` counts.
        max_wait: maximum time to wait for data that is not published yet, in seconds.
        consumer: name under which rank 0 commits, and reports to the producer which window it needs next, as for
            `LazyShardedDataset`. Set it if the producer is limited by --max-ahead, or deletes chunks.
        steps: as for `LazyShardedDataset`, except that rows dropped by a `Filter` are left out of their sequence, which
            `Split` does not support. Lengths must be those after the steps.
        bad_rows: how to handle a row that cannot be read or encoded, or has more tokens than there is room for:
            "substitute" leaves it out of its sequence, or takes another sequence of the window if no row is left;
            "raise" raises, as `Split` always does, because all following tokens would shift.
        micro_batches_per_step: as for `Order`.

    Raises:
        WaitTimeout: no stream appeared within `max_wait`.
        LengthUnknown: the lengths of the first chunk's rows are not known, or another program fills the directory.
        BadSample: a row of the first chunk is longer than a sequence.
        StreamMismatch: the rows are already packs, for which `LazyShardedDataset` is used.
        FileInvalid, StreamInvalid: the directory cannot be read.
        ConfigInvalid: rank and size are invalid.
        ValueError, TypeError: another argument is invalid.

    If a stream has no chunk yet, the first pass checks the first chunk, and raises these errors.
    """

    _OF_A_PROCESS: Final = ("_rows", "_planner", "_maker", "_handed_out", "_counted", "_reported", "_dropped", "_warns")

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
            raise TypeError(f"form must be Pack(SIZE), Split(SIZE) or Pad(SIZE), got {form!r:.100}")
        check_choice("at_end", at_end, AtEnd)
        check_choice("too_long", too_long, TooLong)
        check_field("batch_size", batch_size, 1)
        check_given("seed", seed, 0)
        check_given("window", window, 1)
        check_given("micro_batches_per_step", micro_batches_per_step, 1)
        self._at_end, self._too_long, self._size, self._seed = at_end, too_long, batch_size, seed
        # Positions of each rank per optimiser step; 0 if unknown.
        self._each = batch_size * (micro_batches_per_step or 0)
        self._bad = BadRowCount(bad_rows, instead="it is left out")
        self._rank = None if dp_rank is None and dp_size is None else resolve_rank(dp_rank, dp_size)
        if isinstance(directory, (LazyShardedDataset, BlendedDataset)):
            if steps or encode_fn is not None or consumer is not None:
                raise ValueError("encode_fn, steps and consumer are settings of the data sets: pass them there")
            self._dataset: LazyShardedDataset | BlendedDataset = directory
        else:
            given: dict[str, Any] = {"max_wait": max_wait, "consumer": consumer, "steps": steps}
            try:
                self._dataset = LazyShardedDataset(directory, encode_fn, dp_rank=0, dp_size=1, **given)
            except ValueError as cause:
                # Only the size of chunks is missing: another program fills the directory.
                if isinstance(cause, LazyShardError) or "samples_per_chunk" not in str(cause):
                    raise
                raise lengths_missing(directory) from cause
        self._samples = self._dataset._states.order.num_samples
        datasets = enter_rows(self._dataset)
        self._chunk, self.directory = datasets[0].samples_per_chunk, datasets[0].directory
        """The stream's directory; for a stream in an object store it prints as the URL."""
        self.form = form
        """The form of the sequences."""
        self.window = window or -(-_WINDOW_ROWS // self._chunk)
        """Number of chunks that are planned together."""
        self._shared = SharedNumbers()
        # Where passes over the epoch begin or continue, and the parts of the run up to there; empty for a new run.
        self._start = EpochPosition(0)
        self._parts: tuple[Part, ...] = ()
        # What `skip` has excluded in this process, and whether it passed over steps: a state loaded later must not undo
        # that.
        self._skipped: tuple[list[tuple[int, int]], bool] = [], False
        self._checked = False not in [check_beginning(dataset.reader, form, too_long) for dataset in datasets]
        self._attach()

    def _attach(self) -> None:
        self._rows = DatasetRows(self._dataset, self.form, self.window, self._seed, self._samples)
        self._where = self._rows.where
        self._planner = SequencePlanner(self._rows, self.form, self._seed, self._where, self._on_too_long)
        self._planner.skips = lambda epoch: skips_of(self._parts_of(epoch, 1))
        self._maker = SequenceMaker(self._rows, self.form, self._bad.fresh(), self._planner.length_of)
        # The position of the last returned sequence of the pass in this process, at the beginning of its micro batch,
        # and its walk; and what `state_dict(consumed)` has planned last, with the position where it began.
        self._handed_out: tuple[EpochPosition, SequenceWalk] | None = None
        self._counted: tuple[EpochPosition, SequenceWalk] | None = None
        self._reported = Stats()
        self._dropped = 0  # Rows in no sequence, of previous passes
        self._warns = False  # Whether this process logs the first row that is too long

    def __getstate__(self) -> dict[str, Any]:
        """Resolves the rank first: a spawned worker cannot query Megatron or torch.distributed."""
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
        """Sequences of the current epoch that were trained in the loaded state, over all ranks; otherwise 0."""
        return self._begun().consumed

    def stats(self) -> Stats:
        """Returns the statistics of this process and its workers; `filled` counts replaced sequences.

        `dropped` counts rows in no sequence, on rank 0 only, and rows that the encoder skipped.
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
        self._warns = rank.dp_rank == 0 and number == 0
        # The epoch is fixed here: another one may be set before the first sequence is requested.
        return self._pass(walk, begun, rank, workers * micro, counts=self._warns)

    def __getitem__(self, index: Any) -> NoReturn:
        """Raises TypeError: the number of sequences before an index depends on the lengths of all rows before it."""
        raise TypeError(f"{self.directory}: an iterable has no index: iterate, or use a DataLoader without a sampler")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from a state of the same stream, form, window and seed, with any number of ranks and workers.

        Raises:
            StateInvalid, VersionUnsupported: the state cannot be used here.
            StateMismatch: another stream, settings or lengths, or after the last sequence (or the pass raises it).
            RuntimeError: `skip` was called before, and the state does not exclude the same samples.
            BadSample, LengthUnknown, WaitTimeout, ChunkRetired: as a pass, for the window of the position.
        """
        here, where = (self.rank.dp_size, self._size), f"{self._where}: the state to continue from"
        with carrying():
            read = self._rows.read_state(state)
            found = EpochPosition.of_state(read, state, here, worker_here(), where)
            # States of earlier releases do not contain the ranks.
            parts = read.parts or (Part(1, 1, read.consumed, epoch=read.epoch or None),)
            self._planner.check(read)
        kept, (out, of_steps) = gaps_of(parts), self._skipped
        if of_steps or kept.joined(out).ranges != kept.ranges:
            text = "the state does not include what `skip` excluded: load it into new sequences, then skip"
            raise RuntimeError(f"{self._where}: {text} (a StatefulDataLoader loads its state when it is iterated)")
        self.set_epoch(found.epoch)
        self._begin(found, parts)

    def _begun(self) -> EpochPosition:
        """Returns where passes over the current epoch begin."""
        return self._start if self._start.epoch == self.epoch else EpochPosition(self.epoch)

    def _parts_of(self, epoch: int, ranks: int) -> tuple[Part, ...]:
        """Returns the parts with which `ranks` ranks begin or continue in an epoch."""
        if self._parts and epoch == self._start.epoch:
            return resumed_parts(self._parts, ranks, self._size, draws_per_step=self._each)
        return (begun_part(self._parts, epoch, ranks, self._size, self._each),)

    def _begin(self, position: EpochPosition, parts: tuple[Part, ...]) -> None:
        self._start, self._parts = position, parts
        self._handed_out = self._counted = None  # The run continues elsewhere, perhaps with other lengths
        self._dataset._numbers[WORKERS_READ] = 0

    def skip(self, samples: Ranges = (), chunks: Ranges = (), steps: Ranges = ()) -> None:
        """Excludes samples from the sequences from now on, in every epoch. Later states keep the exclusion.

        As `LazyShardedDataset.skip`, on every rank. Trained sequences stay as they are; the following ones are made
        without these rows. For a blend, call `skip` of its data sets before passing them to the sequences, in the same
        way at each start of the run. `steps` is one range of the next optimiser steps, to pass over; `consumed` then
        includes their sequences.

        Raises:
            ValueError: a range is empty or negative, or of a blend, or its steps are unknown or not the next ones.
            RuntimeError: the sequences were already used.
            WaitTimeout: the steps are not published.
        """
        if self._handed_out is not None or self._dataset._numbers[WORKERS_READ]:
            raise RuntimeError(f"{self._where}: these sequences are already in use: call skip before their first use")
        out = ranges_of(samples, chunks, self._chunk)
        if out and len(self._rows.datasets) > 1:
            raise ValueError(f"{self._where}: samples belong to one stream: skip them on the data sets of the blend")
        position = begun = self._begun()
        if begun.within or begun.worker is not None:
            raise ValueError(f"{self._where}: the state lies within a micro batch: skip from a state at the end of one")
        parts = self._parts_of(begun.epoch, self.rank.dp_size)
        for start, stop in ranges("steps", steps):
            parts = parts_behind_steps(parts, start, stop)
            position = self._after(sum(part.dp * part.draws for part in parts))
        self._skipped = [*self._skipped[0], *out], self._skipped[1] or position != begun
        self._begin(position, parts_without(parts, out))

    def commit(self, consumed: int, *, last_epoch: bool, keep: StateDicts = (), take_over: bool = False) -> bool:
        """Durably reports the progress of the checkpoints, as `LazyShardedDataset.commit`, in whole windows.

        If the rows pass over a stream several times (`num_samples`, or a blend), `last_epoch` refers to the streams.
        """
        rank, begun = self.rank, self._begun()
        if rank.dp_rank != 0:
            return False
        position = self._after(consumed)
        states: list[EpochPosition | SequenceState] = [position, *map(self._rows.read_state, keep)]
        if self._dataset._numbers[WORKERS_READ]:
            # The state of a DataLoader worker lies in the micro batch that it returned last.
            micro = rank.dp_size * self._size
            behind = (position.consumed - begun.consumed) // micro - self._dataset._numbers[WORKERS_READ]
            states.append(self._after(begun.consumed + max(behind, 0) * micro))
        one_epoch = last_epoch and len({one.epoch for one in states}) == 1
        # A window is planned from its first row on.
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
            # After a whole micro batch a worker stays in it, as the next one is not its own.
            if worker is None and position.within == size:
                behind = position.consumed + self.rank.dp_size * size
                behind = behind if walk.total is None else min(behind, walk.total)
                position = EpochPosition(position.epoch, behind, walk.place_of(behind))
        return self._state_at(position if worker is None else position._replace(worker=worker))

    def _after(self, consumed: int) -> EpochPosition:
        """Returns the position after `consumed` sequences of an epoch; plans the windows since the last call."""
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
            top = f", at most {most} of the {total} in this epoch"
        if not least <= count <= most or (count - least) % micro:
            step = f"in steps of dp_size * batch_size = {micro // self._size} * {self._size} sequences"
            raise ValueError(f"{self._where}: consumed must be at least {least}{top}, {step}, got {count}")
        walk.let_go(whole)
        return EpochPosition(begun.epoch, whole, place, begun.within if whole == least else 0)

    def _state_at(self, position: EpochPosition) -> dict[str, Any]:
        ranks, facts = self.rank.dp_size, self._rows.facts()
        lengths = self._planner.digest(position.place, position.epoch, position.consumed)
        where = position.epoch, position.consumed, position.place
        *before, last = self._parts_of(position.epoch, ranks)
        # Sequences that complete the last micro batch count as drawn.
        drawn = position.consumed - sum(part.dp * part.draws for part in before)
        batches = -(-drawn // (last.dp * last.batch_size))
        parts = (*before, replace(last, draws=max(batches * last.batch_size, last.draws)))
        rows = self._rows.recorded(position.epoch) if "blend" in facts else {}
        state = SequenceState(self._rows.name, facts, *where, lengths, parts, **rows)
        return state.to_dict() | position.extra_fields(ranks, self._size)

    def _on_too_long(self, row: int, epoch: int, tokens: int) -> None:
        if self._warns or self._too_long == "raise":
            stream, sample = self._rows.place(row, epoch)
            longer = row_too_long(self._rows.readers[stream], sample, tokens, self.form, self._too_long)
            if self._too_long == "raise":
                raise longer
            self._warns = False
            log.warning("%s; it is left out, and so are all longer rows", longer)

    def _pass(self, walk: SequenceWalk, begun: EpochPosition, rank: Rank, step: int, *, counts: bool) -> Iterator[Any]:
        size, first, within, micro = self._size, begun.consumed, begun.within, rank.dp_size * self._size
        try:
            with carrying():
                if not self._checked:
                    for stream, reader in enumerate(self._rows.readers):
                        # Also writes the reading hint.
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
        """Returns the micro batches of all ranks made of an epoch's last sequences; empty if they are not drawn."""
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
