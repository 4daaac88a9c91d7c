"""`LazyShardedSequences`: packs, pieces of exactly so many tokens, or padded rows, made of raw rows while training."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.utils.data import IterableDataset, get_worker_info

from lazyshard.data.rank import Rank, resolve_rank, watch_forks
from lazyshard.data.samples import LateRow
from lazyshard.data.sequence_forms import AtEnd, Form, SequenceMaker, SequenceSettings, TooLong, at_least
from lazyshard.data.sequence_passes import EpochPosition, SequencePasses
from lazyshard.data.sequence_plan import SequencePlanner, check_beginning
from lazyshard.data.settings import BadRows, check_group
from lazyshard.data.shared import EPOCH, SharedNumbers, Stats
from lazyshard.data.steps import EncodeFn, Encoder
from lazyshard.data.substitutes import BadRowCount
from lazyshard.errors import LazyShardError
from lazyshard.format.state import WindowPlace
from lazyshard.stream import StreamReader
from lazyshard.stream.token_lengths import lengths_not_ours

__all__ = ["LazyShardedSequences"]


class LazyShardedSequences(IterableDataset[Any]):
    """The sequences of one rank, in order, from where the run stands to the end of the epoch that is set.

    They are made of rows, raw or encoded, whose lengths are known from the seals, window by
    window::

        sequences = LazyShardedSequences("stream", encode, form=Pack(8192), batch_size=1)
        loader = DataLoader(sequences, batch_size=1, collate_fn=collate, num_workers=2)

    Which sequences there are, and in which order, follows from the stream, the form, the window, the seed and the
    epoch. They are dealt to the ranks by micro batches (`lazyshard.plan.sequences`), so every rank has as many as the
    others. Workers take micro batches in turn, so a loader whose batches are as large gives the same order whatever
    their number. A pass over a live stream waits for what is still to come.

    Every row is in one sequence of an epoch, but for those of 0 tokens and for what `at_end`, `too_long` and
    `bad_rows` say. Every process reads the lengths of all rows, and of the rows only those of its own sequences.

    Args:
        directory: the stream's directory, or its URL in an object store; if there is no stream in it yet, the
            constructor waits for one. Not one that another program fills.
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
        seed: shuffles the rows within each window, in each epoch differently; None keeps their order. Packs hold about
            the same rows in each epoch, since their lengths decide that.
        at_end: what becomes of the sequences left over, fewer than dp_size * batch_size. "drop": they are not drawn,
            which is logged. "complete": every rank draws one more micro batch with all of them. For that packs are
            taken apart until there are enough; where rows do not suffice, and with the other forms, some come twice.
        too_long: what becomes of a row with more tokens than a sequence, with `Pack` and `Pad`: "raise", or "drop" for
            leaving it out, which `stats().dropped` counts.
        max_wait: how many seconds to wait at the most for anything that is still to be published.
        bad_rows: what to do with a row that cannot be read or encoded, or has more tokens than there is room for:
            "substitute" leaves it out of its sequence, and takes another sequence of the window where nothing is left
            of that; "raise" raises, and so does `Split` always, as all tokens behind would move.

    Raises:
        WaitTimeout: no stream has appeared.
        LengthsMissing: how long the rows of the first chunk are is not known; or another program fills the directory.
        BadSample: a row of the first chunk is longer than a sequence.
        StreamMismatch: the rows are packs already, which a `LazyShardedDataset` trains.
        StreamUnsealed, StreamInvalid, FileInvalid: the directory cannot be read.
        RankInvalid: rank and size are impossible.
        ValueError, TypeError: another argument is.

    Of a stream with no chunk yet the first chunk is looked at by the first pass, which then raises these.

    Not offered: a length, a map-style form, blends, and a cursor for the producer: where that deletes chunks or waits
    for readers (`--retain consumed`, `--max-ahead`), it knows nothing of this one.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
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
        bad_rows: BadRows = BadRows(),
    ) -> None:
        check_group("bad_rows", bad_rows, BadRows)
        if encode_fn is LateRow:
            raise ValueError("LateRow hands out rows unparsed, sequences are made of parsed ones: give encode_fn=None")
        settings = SequenceSettings(form, batch_size, window, seed, at_end, too_long)
        self._bad = BadRowCount(bad_rows, instead="it is left out")
        self._encoder = None if encode_fn is None else Encoder(encode_fn)
        self._rank = None if dp_rank is None and dp_size is None else resolve_rank(dp_rank, dp_size)
        if not max_wait >= 0:
            raise ValueError(f"max_wait is 0 or more seconds, got {max_wait}")
        try:
            self._reader = StreamReader(directory, max_wait=max_wait)
        except ValueError as cause:
            if isinstance(cause, LazyShardError):
                raise
            # It asks for the size of chunks, which is all that it misses.
            raise lengths_not_ours(directory) from cause
        self._settings = settings.in_stream(self._reader.samples_per_chunk)
        self._shared = SharedNumbers()
        self._start = EpochPosition(0, 0, WindowPlace(), 0)
        # Which the main process cannot see of its workers: only that they do.
        self._workers_read = torch.zeros(1, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
        self._attach(check_beginning(self._reader, settings))

    def _attach(self, checked: bool) -> None:
        settings = self._settings
        planner = SequencePlanner(self._reader, settings)
        maker = SequenceMaker(self._reader, self._encoder, settings.form, self._bad.fresh(), planner.length_of)
        self._passes = SequencePasses(self._reader, planner, maker, settings, self._shared, checked=checked)
        watch_forks(self)

    def __getstate__(self) -> dict[str, Any]:
        """Settles the rank first: a spawned worker can ask neither Megatron nor torch.distributed."""
        self._rank = self.rank
        kept = self.__dict__ | {"checked": self._passes.checked}
        del kept["_passes"]
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes up what is not pickled."""
        checked = state.pop("checked")
        self.__dict__.update(state)
        self._attach(checked)

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
        return self._rank

    @property
    def epoch(self) -> int:
        """The epoch that is set: 0 at first, that of the state once one is loaded."""
        return self._shared.view[EPOCH]

    @property
    def consumed(self) -> int:
        """Sequences of this epoch that were trained in the loaded state, over all ranks; else 0."""
        return self._begun().consumed

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the passes to come, in running workers too.

        Raises:
            ValueError: the epoch is negative.
        """
        self._shared.view[EPOCH] = at_least("epoch", epoch, 0)

    def stats(self) -> Stats:
        """Returns what this process and its DataLoader workers have met so far.

        `dropped` counts rows that are in no sequence, on rank 0 alone, and those that the encoder has skipped; `filled`
        sequences in whose places others stand.
        """
        return self._shared.stats()

    def __iter__(self) -> Iterator[Any]:
        """Begins a pass, one at a time.

        Raises:
            BadSample: a row is longer than a sequence; or as `bad_rows` says.
            LengthsMissing: how long the rows of a chunk are is not known.
            StreamMismatch: the rows are packs, see above.
            StateMismatch: the loaded state stands behind the end of the stream.
            WaitTimeout: what comes next was not published within `max_wait`.
            ChunkRetired: a chunk was deleted by the producer.
        """
        worker = get_worker_info()
        self._workers_read[0] = worker is not None
        return self._passes.begin(self._begun(), self.rank, worker)

    def __getitem__(self, index: Any) -> NoReturn:
        """Refuses: how many sequences come before one only the lengths of all rows before it tell.

        Raises:
            TypeError: always.
        """
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
            consumed: sequences of this epoch that were trained, over all ranks: whole micro batches, also the one that
                completes the epoch. It takes some milliseconds for each window since the last call. None for what this
                pass has handed out, in this process.

        Raises:
            ValueError: these are no whole micro batches of all ranks, fewer sequences than the loaded state had
                trained, or more than there are.
            TypeError: it is no integer.
            RuntimeError: None, but workers hand the sequences out, which this process cannot count.
            WaitTimeout: so many sequences are not published.
        """
        worker = get_worker_info()
        if consumed is not None:
            return self._passes.state_at(
                self._passes.after(consumed, self._begun(), self.rank.dp_size), self.rank.dp_size
            )
        if worker is None and self._workers_read[0]:
            raise RuntimeError(
                f"{self.directory}: DataLoader workers hand the sequences out, and this process cannot see how many "
                f"were trained; save `state_dict(consumed)`, or a StatefulDataLoader's own state"
            )
        within = self._passes.position(self.epoch, self.rank.dp_size, in_worker=worker is not None)
        position = within or self._begun()
        if worker is not None:
            position = position._replace(worker=(worker.id, worker.num_workers))
        return self._passes.state_at(position, self.rank.dp_size)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where a state stands, with any number of ranks and workers: the next pass begins there.

        Args:
            state: what `state_dict` returned; of the same stream, form, window and seed.

        Raises:
            StateInvalid, VersionUnsupported: it cannot be used; it stands within a micro batch of other ranks; or it is
                that of a worker and this is not the same one.
            StateMismatch: it is of another stream or of other settings, the lengths of the rows are others since, or it
                stands behind more sequences than there are. Where that is not known yet, the pass raises it.
            ChunkRetired: it goes on with chunks that are deleted.
            BadSample, LengthsMissing, WaitTimeout: as a pass, of the window in which it stands.
        """
        worker = get_worker_info()
        here = None if worker is None else (worker.id, worker.num_workers)
        try:
            found = self._passes.position_of(state, self.rank.dp_size, here)
        except LazyShardError as error:
            if worker is not None:
                error.carry_fields()
            raise
        self._start = found
        self._shared.view[EPOCH] = found.epoch
        self._passes.forget()
        self._workers_read[0] = False

    def _begun(self) -> EpochPosition:
        """Returns where the passes over the epoch that is set begin."""
        return self._start if self._start.epoch == self.epoch else EpochPosition(self.epoch, 0, WindowPlace(), 0)
