"""`LazyShardedSequences`: packs, pieces of exactly so many tokens, or padded rows, made of raw rows while training."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
from torch.utils.data import IterableDataset, get_worker_info

from lazyshard.data import sequence_forms
from lazyshard.data.blended import BlendedDataset
from lazyshard.data.dataset import LazyShardedDataset
from lazyshard.data.index_space import as_count
from lazyshard.data.rank import (
    EPOCH,
    Rank,
    SharedNumbers,
    Stats,
    carrying_fields,
    enter_process,
    resolve_rank,
    watch_forks,
)
from lazyshard.data.run_state import Ranges, ranges, ranges_of
from lazyshard.data.samples import BadRowCount
from lazyshard.data.sequence_forms import AtEnd, SequenceMaker, SequenceSettings, TooLong
from lazyshard.data.sequence_state import EpochPosition, RunSoFar, last_batch, not_whole, read_state
from lazyshard.data.settings import BadRows, check_group
from lazyshard.data.steps import EncodeFn, Step
from lazyshard.format.state import SequenceState
from lazyshard.part import Part
from lazyshard.plan.sequences import Form
from lazyshard.stream.run_state import parts_behind_steps, parts_without
from lazyshard.stream.sequences import SequencePlanner, SequenceWalk


class LazyShardedSequences(IterableDataset[Any]):
    """The sequences of one rank, in order, from where the run stands to the end of the epoch that is set.

    They are made of rows, raw or encoded, whose lengths are known from the seals, window by window::

        sequences = LazyShardedSequences("stream", encode, form=Pack(8192), batch_size=1)
        loader = DataLoader(sequences, batch_size=1, collate_fn=collate, num_workers=2)

    Which sequences there are, and in which order, follows from the stream, the form, the window, the seed and the
    epoch. They are dealt to the ranks by micro batches, so every rank has as many as the others. Workers take micro
    batches in turn, so a loader whose batches are as large gives the same order whatever their number. A pass over a
    live stream waits for what is still to come.

    Every row is in one sequence of an epoch, but for those of 0 tokens and for what `at_end`, `too_long` and `bad_rows`
    say. Every process reads the lengths of all rows, and of the rows only those of its own sequences.

    Args:
        directory: as of `LazyShardedDataset`, but for directories that another program fills. Or a data set or a
            `BlendedDataset` that is not used yet, without ranks, with `batch_size` 1 and no schedule: rows then come in
            its order, and go through the steps, the encoder and the cache of their data set, whose `consumer` commits.
            It ends as that does, and goes on with the same weights alone.
        encode_fn: as of `LazyShardedDataset`; None takes rows as they are. What it makes has to have as many tokens as
            were measured (`Split`), or at most as many.
        form: `Pack(size)`, `Split(size)` or `Pad(size)`.
        batch_size: sequences of one rank in a micro batch. Give the `DataLoader` the same number, which cannot be seen
            from here: with another one and several workers `state_dict(consumed)` goes on with the wrong sequences.
            `DataLoader(batch_size=None)` hands sequences out one by one, as for 1.
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
        micro_batches_per_step: micro batches of one rank in an optimiser step; states then know the steps, for
            `lazyshard trace`, `audit` and `skip`. None for not known.

    Raises:
        WaitTimeout: no stream has appeared.
        LengthUnknown: how long the rows of the first chunk are is not known; or another program fills the directory.
        BadSample: a row of the first chunk is longer than a sequence.
        StreamMismatch: the rows are packs already, which a `LazyShardedDataset` trains.
        FileInvalid, StreamInvalid: the directory cannot be read.
        ConfigInvalid: rank and size are impossible.
        ValueError, TypeError: another argument is.

    Of a stream with no chunk yet the first chunk is looked at by the first pass, which then raises these. It has no
    length and no map-style form.
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
        settings = SequenceSettings(form, batch_size, window, seed, at_end, too_long, micro_batches_per_step)
        self._bad = BadRowCount(bad_rows, instead="it is left out")
        self._rank = None if dp_rank is None and dp_size is None else resolve_rank(dp_rank, dp_size)
        if isinstance(directory, (LazyShardedDataset, BlendedDataset)):
            if steps or encode_fn is not None or consumer is not None:
                raise ValueError("encode_fn, steps and consumer are those of the data sets: give them there")
            self._source: LazyShardedDataset | BlendedDataset = directory
        else:
            given: dict[str, Any] = {"max_wait": max_wait, "consumer": consumer, "steps": steps}
            self._source = sequence_forms.open_dataset(directory, encode_fn, **given)
        self._samples = self._source._states.order.num_samples
        sequence_forms.enter_rows(self._source)
        datasets = sequence_forms.datasets_of(self._source)
        self._reader = datasets[0].reader
        self._settings = settings.in_stream(self._reader.samples_per_chunk)
        self._shared = SharedNumbers()
        # Where passes over its epoch begin, with which course of the run up to there.
        self._run = RunSoFar(self._settings)
        self._workers_read = torch.zeros(1, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
        self._checked = False not in [sequence_forms.check_beginning(dataset.reader, settings) for dataset in datasets]
        self._attach()

    def _attach(self) -> None:
        settings, rows = self._settings, self.window * self._reader.samples_per_chunk
        self._rows = sequence_forms.DatasetRows(self._source, rows, self._samples)
        self._where = self._rows.where
        self._planner = SequencePlanner(self._rows, settings.form, settings.seed, self._where, self._meet_too_long)
        self._planner.skips = self._run.skips
        self._maker = SequenceMaker(self._rows, settings.form, self._bad.fresh(), self._planner.length_of)
        # What the pass in this process has handed out: where the micro batch begins that it is at, and its walk.
        self._handed_out: tuple[EpochPosition, SequenceWalk] | None = None
        # What `state_dict(consumed)` has planned last, from which position on.
        self._counted: tuple[EpochPosition, SequenceWalk] | None = None
        self._reported = Stats()
        self._dropped = 0  # Rows in no sequence, of the passes before
        self._tells = False  # Whether this process says which row is the first that is too long
        watch_forks(self)

    def __getstate__(self) -> dict[str, Any]:
        """Settles the rank first: a spawned worker can ask neither Megatron nor torch.distributed."""
        self._rank = self.rank
        return {name: value for name, value in self.__dict__.items() if name not in self._OF_A_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._attach()

    @property
    def directory(self) -> Path:
        """The stream's directory; shows the URL where it is none."""
        return self._reader.directory

    @property
    def form(self) -> Form:
        """What is made of the rows."""
        return self._settings.form

    @property
    def window(self) -> int:
        """Chunks that are looked at together."""
        assert self._settings.window is not None
        return self._settings.window

    @property
    def rank(self) -> Rank:
        """Data-parallel rank and size."""
        if self._rank is None:
            self._rank = resolve_rank()
        for dataset in self._rows.datasets:
            dataset._sequence_ranks = self._rank
        return self._rank

    @property
    def epoch(self) -> int:
        """The epoch that is set: 0 at first, that of the state once one is loaded."""
        return self._shared.view[EPOCH]

    @property
    def consumed(self) -> int:
        """Sequences of the epoch that is set which were trained in the loaded state, over all ranks; else 0."""
        return self._run.begun(self.epoch).consumed

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the passes to come, in running workers too. Raises ValueError if it is negative."""
        epoch = self._shared.view[EPOCH] = sequence_forms.at_least("epoch", epoch, 0)
        self._source.set_epoch(epoch)

    def stats(self) -> Stats:
        """Returns what this process and its DataLoader workers have met so far.

        `dropped` counts rows that are in no sequence, on rank 0 alone, and those that the encoder has skipped; `filled`
        sequences in whose places others stand.
        """
        return self._shared.stats()

    def __iter__(self) -> Iterator[Any]:
        """Begins a pass, one at a time.

        Raises:
            BadSample, LengthUnknown, StreamMismatch, WaitTimeout: as above, of any row and chunk; or as `bad_rows`
            says. StateMismatch: the loaded state stands behind the stream's end. ChunkRetired: a chunk was deleted.
        """
        worker, rank, begun = get_worker_info(), self.rank, self._run.begun(self.epoch)
        self._workers_read[0] = 0 if worker is None else min(worker.num_workers, 255)
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        micro = rank.dp_size * self._settings.batch_size
        if not begun.begun:
            begun = begun._replace(consumed=begun.consumed + number * micro, within=0 if number else begun.within)
        walk = SequenceWalk(self._planner, begun.place, begun.epoch)
        self._handed_out = None
        self._dropped = self._reported.dropped - self._maker.stats.dropped
        for dataset in self._rows.datasets:
            dataset._entered(begun.epoch)
            enter_process(dataset.reader, rank, worker)
        self._tells = rank.dp_rank == 0 and number == 0
        # The epoch is given: by the first sequence that is asked for, another one may be set.
        return self._pass(walk, begun, rank, workers * micro, counts=self._tells)

    def __getitem__(self, index: Any) -> NoReturn:
        """Raises TypeError: how many sequences come before one only the lengths of all rows before it tell."""
        raise TypeError(
            f"{self.directory}: LazyShardedSequences is an iterable, its sequences have no index: take `for sequence "
            f"in sequences`, itertools.islice(sequences, N) for the first ones, or a DataLoader without a sampler; "
            f"samples by index are those of LazyShardedDataset"
        )

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Returns the state of the run, all ranks having drawn as much: plain values for any checkpoint.

        Any ranks and workers go on from it. But one within a micro batch, where none was given, is only for as many
        ranks; and what `StatefulDataLoader` asks a worker for is the state of that worker.

        Args:
            consumed: sequences of this epoch that all ranks have trained: whole micro batches, also the last. It takes
                milliseconds for a window since the last call. None: what this pass has handed out in this process.

        Raises:
            ValueError, TypeError: not trained at the end of a micro batch, or fewer before.
            RuntimeError: None, but workers hand the sequences out, which this process cannot count.
            WaitTimeout: so many sequences are not published.
        """
        worker = get_worker_info()
        if consumed is not None:
            return self._state_at(self._after(consumed))
        if worker is None and self._workers_read[0]:
            raise RuntimeError(
                f"{self.directory}: DataLoader workers hand the sequences out, and this process cannot see how many "
                f"were trained; save `state_dict(consumed)`, or a StatefulDataLoader's own state"
            )
        position = self._position(in_worker=worker is not None)
        if worker is not None:
            position = position._replace(worker=(worker.id, worker.num_workers))
        return self._state_at(position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where a state stands, with any number of ranks and workers: the next pass begins there.

        Args:
            state: what `state_dict` returned; of the same stream, form, window and seed.

        Raises:
            StateInvalid, VersionUnsupported: it cannot be used, here.
            StateMismatch: another stream, settings or lengths, or behind the last sequence (or the pass raises it).
            RuntimeError: `skip` was called before, and the state does not leave that out.
            BadSample, LengthUnknown, WaitTimeout, ChunkRetired: as a pass, of the window in which it stands.
        """
        here = None if (worker := get_worker_info()) is None else (worker.id, worker.num_workers)
        micro_batch, where = (self.rank.dp_size, self._settings.batch_size), f"{self._where}: the state to go on from"
        with carrying_fields():
            read = self._read(state)
            found = EpochPosition.of_state(read, state, micro_batch, here, where)
            # Those of earlier releases do not say of which ranks.
            parts = read.parts or (Part(1, 1, read.consumed, epoch=read.epoch or None),)
            self._planner.check(read)
        self._run.check_skipped(parts, self._where)
        self.set_epoch(found.epoch)
        self._begin(found, parts)

    def _begin(self, position: EpochPosition, parts: tuple[Part, ...]) -> None:
        self._run.position, self._run.parts = position, parts
        # The run goes on elsewhere, perhaps by other lengths.
        self._handed_out = self._counted = None
        self._workers_read[0] = False

    def skip(self, samples: Ranges = (), chunks: Ranges = (), steps: Ranges = ()) -> None:
        """Leaves samples out of the sequences from here on, in every epoch. Later states keep that.

        To be called on every rank, after `load_state_dict` and before the sequences are used; again to leave out more.
        Sequences that were trained stay as they are; those to come are made without these rows.

        Args:
            samples: half-open ranges of sample numbers. Of a blend its data sets' own `skip` does it, before these are
                given to the sequences, in the same way at each start of the run.
            chunks: half-open ranges of chunks, of a single stream too.
            steps: one half-open range of the next optimiser steps, of which the first one of a run is 1, to pass over;
                needs `micro_batches_per_step`. `consumed` then counts their sequences, too.

        Raises:
            ValueError: a range is empty or negative, of a blend, or of steps that are not known or not the next ones.
            RuntimeError: the sequences are used already.
            WaitTimeout: the steps are not published.
        """
        if self._handed_out is not None or self._workers_read[0]:
            raise RuntimeError(f"{self._where}: these sequences are in use already, what to skip is said before")
        out = ranges_of(samples, chunks, self._reader.samples_per_chunk)
        if out and len(self._rows.datasets) > 1:
            raise ValueError(f"{self._where}: samples are those of one stream: skip them on the data sets of the blend")
        begun = self._run.begun(self.epoch)
        if begun.within or begun.worker is not None:
            raise ValueError(f"{self._where}: the state stands within a micro batch: skip from one at the end of one")
        parts = self._run.parts_of(begun.epoch, self.rank.dp_size)
        for start, stop in ranges("steps", steps):
            parts = parts_behind_steps(parts, start, stop)
            begun = self._after(sum(part.dp * part.draws for part in parts))
        self._run.note_skipped(out, of_steps=begun != self._run.begun(self.epoch))
        self._begin(begun, parts_without(parts, out))

    def commit(
        self, consumed: int, *, last_epoch: bool, keep: Iterable[dict[str, Any]] = (), take_over: bool = False
    ) -> bool:
        """Tells the producer durably how far the checkpoints are, as `LazyShardedDataset.commit`, by whole windows.

        Of rows that pass over a stream several times (`num_samples`, or a blend) `last_epoch` is said of the streams.
        """
        rank, begun = self.rank, self._run.begun(self.epoch)
        if get_worker_info() is not None:
            raise RuntimeError(f"{self.directory}: a DataLoader worker reads ahead and commits nothing")
        if rank.dp_rank != 0:
            return False
        position = self._after(consumed)
        states: list[EpochPosition | SequenceState] = [position, *map(self._read, keep)]
        if self._workers_read[0]:
            # A state of a DataLoader worker stands in the micro batch that it has handed out last.
            micro = rank.dp_size * self._settings.batch_size
            behind = (position.consumed - begun.consumed) // micro - int(self._workers_read[0])
            states.append(self._after(begun.consumed + max(behind, 0) * micro))
        one_epoch = last_epoch and len({one.epoch for one in states}) == 1
        # A window is made of its rows from the first one on.
        least = min(self._planner.first_window(one.place) for one in states) * self._rows.rows if one_epoch else 0
        plan, row = {"dp_size": rank.dp_size, "batch_size": self._settings.batch_size}, position.place.position
        return self._rows.commit(row, position.epoch, least, plan, last_epoch=one_epoch, take_over=take_over)

    def _position(self, *, in_worker: bool) -> EpochPosition:
        """Returns where the run is by what the pass in this process has handed out of the epoch that is set.

        A worker stays in a micro batch that was handed out whole, as the next one is not its own.
        """
        if self._handed_out is None or self._handed_out[0].epoch != self.epoch:
            return self._run.begun(self.epoch)
        position, walk = self._handed_out
        size = self._settings.batch_size
        if in_worker or position.within != size:
            return position._replace(begun=in_worker)
        behind = position.consumed + self.rank.dp_size * size
        behind = behind if walk.total is None else min(behind, walk.total)
        return EpochPosition(position.epoch, behind, walk.place_of(behind), 0)

    def _after(self, consumed: int) -> EpochPosition:
        """Returns where a run is after so many sequences of an epoch, by planning the windows since the last call."""
        ranks, begun, count = self.rank.dp_size, self._run.begun(self.epoch), as_count(consumed, "sequences")
        known = self._counted
        if known is None or known[0] != begun or not known[1].places[0].before <= max(count, begun.consumed):
            known = self._counted = begun, SequenceWalk(self._planner, begun.place, begun.epoch)
        walk = known[1]
        place = walk.place_of(max(count, begun.consumed))
        whole = count if walk.total is None else min(count, walk.total)
        micro = ranks, self._settings.batch_size
        wrong = not_whole(count, begun.consumed, walk.total, micro, self._settings.at_end)
        if wrong is not None:
            raise ValueError(f"{self._where}: {wrong}")
        walk.let_go(whole)
        return EpochPosition(begun.epoch, whole, place, begun.within if whole == begun.consumed else 0)

    def _state_at(self, position: EpochPosition) -> dict[str, Any]:
        lengths = self._planner.digest(position.place, position.epoch, position.consumed)
        parts = self._run.parts_at(position, self.rank.dp_size)
        rows = self._rows.told(position.epoch) if "blend" in self._facts else {}
        where = position.epoch, position.consumed, position.place
        state = SequenceState(self._rows.name, self._facts, *where, lengths, parts, **rows)
        return state.to_dict() | position.beside(self.rank.dp_size, self._settings.batch_size)

    @property
    def _facts(self) -> dict[str, Any]:
        return self._settings.facts | sequence_forms.row_facts(self._source, self._samples, self._rows.rows)

    def _meet_too_long(self, row: int, epoch: int, tokens: int) -> None:
        stream, sample = self._rows.place(row, epoch)
        reader = self._rows.readers[stream]
        self._tells = sequence_forms.meet_too_long(reader, sample, tokens, self._settings, tells=self._tells)

    def _read(self, value: Any) -> SequenceState:
        return read_state(value, {"stream": self._rows.name, **self._facts}, self._where)

    def _pass(self, walk: SequenceWalk, begun: EpochPosition, rank: Rank, step: int, *, counts: bool) -> Iterator[Any]:
        number, size = rank.dp_rank, self._settings.batch_size
        first, within, micro = begun.consumed, begun.within, rank.dp_size * size
        try:
            with carrying_fields():
                if not self._checked:
                    for stream, reader in enumerate(self._rows.readers):
                        # Which tells the producer, too.
                        self._rows.total(stream, 0, begun.epoch)
                        sequence_forms.check_beginning(reader, self._settings)
                    self._checked = True
                while True:
                    walk.let_go(first)
                    planned = walk.sequences(first, first + micro)
                    if len(planned) < micro:
                        planned = last_batch(planned, walk.total, rank, self._settings, self._where)
                    if not planned:
                        return
                    place = walk.place_of(first)
                    for at in range(number * size + within, (number + 1) * size):
                        made = self._maker.make(planned[at], walk.window_of(first + at).sequences, begun.epoch)
                        within += 1
                        self._handed_out = EpochPosition(begun.epoch, first, place, within), walk
                        self._report(walk.dropped if counts else 0)
                        yield made
                    first, within = first + step, 0
        finally:
            self._report(walk.dropped if counts else 0)

    def _report(self, dropped: int) -> None:
        now, before = self._maker.stats, self._reported
        now = now._replace(dropped=now.dropped + self._dropped + dropped)
        if now != before:
            self._reported = now
            self._shared.report(now, before)
