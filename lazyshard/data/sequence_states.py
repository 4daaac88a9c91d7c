"""Where a run over sequences stands, and its state: of a whole run, within a micro batch, of a DataLoader worker."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from lazyshard.data.foreign_values import mistaken_for_sequences
from lazyshard.data.sequence_planner import SequencePlanner
from lazyshard.errors import StateInvalid, StateMismatch
from lazyshard.format.sequence_state import Place, SequenceState
from lazyshard.stream import StreamReader

__all__ = ["Facts", "Standing", "read_state", "write_state"]

Facts = dict[str, int | str | bool | None]

_WITHIN: Final = "handed_out"
_RANKS: Final = "ranks"
_BATCH: Final = "batch_size"
_WORKER: Final = "worker"
_WORKERS: Final = "workers"
_BEGUN: Final = "begun"


class Standing(NamedTuple):
    """Where a run stands.

    Attributes:
        epoch: in which.
        consumed: sequences of it behind which it stands, over all ranks.
        place: where they are made again, at or before that.
        within: sequences of a rank that are behind it besides, in the micro batch that follows.
        worker: of which DataLoader worker, of how many, it is the standing; None for all.
        begun: whether the micro batch that follows is one of that worker, which it has begun to hand out.
    """

    epoch: int
    consumed: int
    place: Place
    within: int
    worker: tuple[int, int] | None = None
    begun: bool = False


def write_state(
    standing: Standing, planner: SequencePlanner, reader: StreamReader, facts: Facts, ranks: int, batch_size: int
) -> dict[str, Any]:
    """Returns the state that says where a run stands.

    Args:
        standing: where.
        planner: knows the lengths.
        reader: the stream.
        facts: the settings.
        ranks: of the run.
        batch_size: of its micro batches.
    """
    assert reader.stream_id is not None  # others have no lengths
    epoch, consumed, place, within, worker, begun = standing
    lengths = planner.digest(place, consumed)
    state = SequenceState(reader.stream_id, facts, epoch, consumed, place, lengths).to_dict()
    if within or worker is not None:
        state |= {_WITHIN: within, _RANKS: ranks, _BATCH: batch_size}
    return state if worker is None else state | {_WORKER: worker[0], _WORKERS: worker[1], _BEGUN: begun}


def read_state(
    value: Any,
    planner: SequencePlanner,
    reader: StreamReader,
    facts: Facts,
    micro_batch: tuple[int, int],
    here: tuple[int, int] | None,
) -> Standing:
    """Returns where a state stands, if it can be gone on from here.

    Args:
        value: as loaded.
        planner: knows the lengths, which are looked at.
        reader: the stream.
        facts: the settings.
        micro_batch: ranks and batch size.
        here: this DataLoader worker, of how many; None for none.

    Raises:
        StateInvalid, VersionUnsupported, StateMismatch, ChunkRetired: see `LazyShardedSequences.load_state_dict`.
    """
    where = f"{reader.directory}: the state to go on from"
    if (mistaken := mistaken_for_sequences(value)) is not None:
        raise StateInvalid(f"{where}: {mistaken}", file=where, expected="the state of LazyShardedSequences")
    state = SequenceState.from_dict(value, where)
    if state.stream != reader.stream_id:
        raise _mismatch(reader, "stream", str(reader.stream_id), state.stream)
    # The form before what another form has or has not.
    for name in sorted(facts.keys() | state.rule.keys(), key=lambda name: (name != "form", name)):
        mine, theirs = facts.get(name), state.rule.get(name)
        if (mine, type(mine)) != (theirs, type(theirs)):
            raise _mismatch(reader, name, str(mine), str(theirs))
    worker = (value[_WORKER], value.get(_WORKERS)) if _WORKER in value else None
    if worker != here:
        names = [f"DataLoader worker {one[0]} of {one[1]}" if one else "a whole run" for one in (here, worker)]
        raise StateInvalid(
            f"{where}: expected that of {names[0]}, found that of {names[1]}; with another number of workers go on "
            f"from what `state_dict(consumed)` gave",
            field=_WORKERS,
            expected=names[0],
            actual=names[1],
        )
    within = value.get(_WITHIN, 0)
    given = (value.get(_RANKS), value.get(_BATCH))
    ranks, size = micro_batch
    if (within != 0 or worker is not None) and given != micro_batch:
        raise StateInvalid(
            f"{where}: it stands within a micro batch of {given[1]!r:.20} of {given[0]!r:.20} ranks, here it is {size} "
            f"of {ranks}: go on from one that was saved at the end of a micro batch",
            field=_WITHIN,
            expected=f"{ranks} ranks, batch_size {size}",
            actual=f"{given[0]!r:.20} ranks, batch_size {given[1]!r:.20}",
        )
    begun = worker is not None and value.get(_BEGUN) is True
    # Where a worker has handed all of its micro batch out, the next one is not that which follows this one.
    most = size if begun else size - 1
    if type(within) is not int or not 0 <= within <= most:
        raise StateInvalid(
            f"{where}: expected an integer from 0 to {most} as {_WITHIN!r}, found {within!r:.100}; go on from an older "
            f"checkpoint",
            field=_WITHIN,
            expected=f"an integer from 0 to {most}",
            actual=f"{within!r:.100}",
        )
    planner.check(state)
    return Standing(state.epoch, state.consumed, state.place, within, worker, begun)


def _mismatch(reader: StreamReader, field: str, expected: str, actual: str) -> StateMismatch:
    return StateMismatch(
        f"{reader.directory}: the state to go on from was saved with {field} = {actual:.100}, here it is "
        f"{expected:.100}: other sequences would be made. Take what it was, or begin an epoch anew",
        directory=str(reader.directory),
        field=field,
        expected=expected,
        actual=actual,
    )
