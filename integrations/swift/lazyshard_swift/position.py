"""Where a run stands in its stream: a small file in every checkpoint, and what it takes to go on from it.

``checkpoint-N/lazyshard.json`` holds a JSON object with the fields of `Position`. It is written before the rest of the
checkpoint, so a checkpoint that is complete has it. Format 1, which knew no changes of the number of ranks, is still
read: what it did not say follows from the rest.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import orjson

from lazyshard.errors import StateInvalid, VersionUnsupported
from lazyshard.format.blend_state import BLEND, BlendState
from lazyshard.format.state import RunState
from lazyshard.memory import loads
from lazyshard.part import Part
from lazyshard.plan.deal import window_positions
from lazyshard_swift.errors import PositionInvalid, ResumeRefused
from lazyshard_swift.parallel import FOREIGN, stream_id_of

BLENDED: Final = f"{FOREIGN}blend"
"""Stands for the identity of a blend, whose streams and weights may change."""
FORMAT: Final = 2
GROUPED: Final = "grouped"
"""The layout of a run in the order of ms-swift's sampler by length, beside "strided" and "block"."""
LAYOUTS: Final = ("strided", "block", GROUPED)


@dataclass(frozen=True, slots=True)
class Position:
    """Where a run stands.

    Attributes:
        stream: identity of the stream: the id in its manifest, or a digest of its first row where it has none.
        directory: where the stream was read.
        samples_per_chunk: rows of its chunks.
        consumed: samples trained so far, over all ranks and epochs.
        step: steps trained so far.
        dp_size: number of data-parallel ranks.
        batch_size: samples of a rank in a micro batch.
        layout: "strided" or "block", see `lazyshard.LazyShardedDataset`; or "grouped", see `lazyshard_swift.opening`.
        window: chunks of a rank that are shuffled together.
        seed: of the shuffle.
        epoch_samples: what ms-swift was told is the length of an epoch.
        by_steps: whether steps decided how long the run is, not epochs.
        consumer: name of the run's cursor.
        saved_at: seconds since 1970.
        skipped: what the run was told not to train, as on the command line, of all its starts.
        state: the course of the run, from which all else follows; None under the stock sampler's own shuffle, which
            draws in an order of its own. Of a blend: the course of its positions, as if it were a single stream.
        blend: where each stream of a blend stands; None for a run over one stream.
        grouping: digest of what the order of a grouped run follows from; None for others.
    """

    stream: str
    directory: str
    samples_per_chunk: int
    consumed: int
    step: int
    dp_size: int
    batch_size: int
    layout: str
    window: int
    seed: int
    epoch_samples: int
    by_steps: bool
    consumer: str
    saved_at: float
    skipped: tuple[str, ...] = ()
    state: RunState | None = None
    blend: BlendState | None = None
    grouping: str | None = None

    @property
    def unit(self) -> int:
        """Samples that a rank is dealt in a row."""
        return self.samples_per_chunk if self.state is None else self.state.unit

    def to_bytes(self) -> bytes:
        """Returns the content of the file."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        values["state"] = None if self.state is None else self.state.to_dict()
        if self.blend is not None:
            # In the place of the state: it is what tells what was trained when.
            values["positions"], values["state"] = values["state"], self.blend.to_dict()
        del values["blend"]
        if self.grouping is None:
            del values["grouping"]
        return orjson.dumps({"format": FORMAT} | values, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


_KINDS: Final[dict[str, type]] = {"str": str, "int": int, "float": float, "bool": bool}
"""Of the fields that both formats have."""


def parse(data: bytes, file: str) -> Position:
    """Reads the content of the file.

    Raises:
        PositionInvalid: it is not what was written.
    """

    def invalid(why: str) -> PositionInvalid:
        return PositionInvalid(
            f"{file}: {why}. This checkpoint cannot be gone on from exactly; take an older one, or start on the data "
            f"anew from its weights alone",
            file=file,
        )

    try:
        value = loads(data)
    except orjson.JSONDecodeError as cause:
        raise invalid(
            f"expected a JSON object, found {len(data)} bytes that are none ({cause}), torn perhaps"
        ) from cause
    if not isinstance(value, dict):
        raise invalid(f"expected a JSON object, found {type(value).__name__}")
    version = value.get("format")
    if type(version) is not int or not 1 <= version <= FORMAT:
        raise invalid(f"format is {version!r}, this release reads 1 to {FORMAT}; was it written by a later one?")
    known: dict[str, Any] = {}
    for entry in fields(Position):
        kind = _KINDS.get(str(entry.type))
        if kind is None:
            continue
        found = value.get(entry.name)
        if kind is float and type(found) is int:
            found = float(found)
        if type(found) is not kind or (isinstance(found, int) and found < 0):
            raise invalid(f"{entry.name} is {found!r}, expected {kind.__name__}{' from 0' if kind is int else ''}")
        known[entry.name] = found
    if known["layout"] not in LAYOUTS:
        raise invalid(f"layout is {known['layout']!r}, expected one of {', '.join(LAYOUTS)}")
    position = Position(**known)
    try:
        if version == 1:
            return _with_state(position, _only_part(position))
        skipped = value.get("skipped")
        if not isinstance(skipped, list) or not all(isinstance(item, str) for item in skipped):
            raise invalid(f"skipped is {skipped!r}, expected a list of strings")
        if position.layout == GROUPED:
            digest = value.get("grouping")
            if not isinstance(digest, str):
                raise invalid(f"grouping is {digest!r}, expected a digest")
            position = replace(position, grouping=digest)
        if position.layout != "strided":
            return _with_state(position, None, tuple(skipped))
        found = value.get("state")
        if not isinstance(found, dict) or found.get("kind") != BLEND:
            return _with_state(position, RunState.from_dict(found, file, within="state"), tuple(skipped))
        positions = RunState.from_dict(value.get("positions"), file, within="positions")
        blend = BlendState.from_dict(found, file)
        if blend.consumed != position.consumed:
            raise ValueError(f"its state has consumed {blend.consumed}, and the rest of it {position.consumed}")
        return replace(_with_state(position, positions, tuple(skipped)), blend=blend)
    except (StateInvalid, VersionUnsupported, ValueError) as cause:
        if isinstance(cause, PositionInvalid):
            raise
        raise invalid(str(cause).removeprefix(f"{file}: ")) from cause


def _only_part(position: Position) -> RunState | None:
    """Returns the state that a position of format 1 stands for: the ranks were the same all the time.

    Raises:
        ValueError: there can be none.
    """
    if position.layout != "strided":
        return None
    draws, more = divmod(position.consumed, position.dp_size) if position.dp_size else (0, 1)
    if more:
        raise ValueError(f"consumed is {position.consumed}, expected a multiple of dp_size {position.dp_size}")
    per_step, more = divmod(draws, position.step) if position.step else (0, 0)
    part = Part(position.dp_size, position.batch_size, draws, draws_per_step=0 if more else per_step)
    size = position.samples_per_chunk
    stream_id = stream_id_of(position.stream)
    return RunState(stream_id, size, size, position.window * size, position.seed, None, (part,), position.consumed)


def _with_state(position: Position, state: RunState | None, skipped: tuple[str, ...] = ()) -> Position:
    """Returns the position with its state.

    Raises:
        ValueError: the two contradict each other.
    """
    if state is not None:
        size, part = position.samples_per_chunk, state.parts[-1]
        told = {
            "stream_id": (state.stream_id, stream_id_of(position.stream)),
            "samples_per_chunk": (state.samples_per_chunk, size),
            "consumed": (state.consumed, position.consumed),
            "dp": (part.dp, position.dp_size),
            "batch_size": (part.batch_size, position.batch_size),
            "window": (state.window, window_positions(position.window, size, state.unit)),
            "seed": (state.seed, position.seed),
        }
        for name, (there, here) in told.items():
            if there != here:
                raise ValueError(f"its state has {name} {there!r}, and the rest of it {here!r}")
    return replace(position, skipped=skipped, state=state)


def stamp() -> float:
    """Returns the time for `saved_at`."""
    return time.time()


def check_fits(position: Position, now: Position, checkpoint: str) -> None:
    """Refuses to go on where the next sample could not be exactly the next one.

    The number of ranks, the micro batch and the steps may differ, but under the stock sampler's own shuffle.

    Args:
        position: what the checkpoint says.
        now: what this run would save before its first step if it began anew.
        checkpoint: the checkpoint's folder.

    Raises:
        ResumeRefused: naming what differs, and the way out.
    """

    def refuse(what: str, way_out: str) -> ResumeRefused:
        expected, actual = getattr(position, what), getattr(now, what)
        name = what.replace("_", " ")
        return ResumeRefused(
            f"{checkpoint}: saved with {name} {expected}, this run has {name} {actual}: {way_out}",
            checkpoint=checkpoint,
            expected=str(expected),
            actual=str(actual),
        )

    if (position.blend is None) != (now.stream != BLENDED):
        one = f"the stream in {position.directory}" if position.blend is None else f"a blend of {position.directory}"
        raise ResumeRefused(
            f"{checkpoint}: it was trained on {one}, this run is on {now.directory}: give --dataset as it was, at "
            f"least two streams for a blend",
            checkpoint=checkpoint,
            expected=position.directory,
            actual=now.directory,
        )
    if position.stream != now.stream:
        raise ResumeRefused(
            f"{checkpoint}: it was trained on the stream {position.stream} (then in {position.directory}), and "
            f"{now.directory} holds the stream {now.stream}: give the directory of that stream as --dataset, or start "
            f"on this one anew from the weights alone",
            checkpoint=checkpoint,
            expected=position.stream,
            actual=now.stream,
        )
    if position.samples_per_chunk != now.samples_per_chunk:
        raise refuse("samples_per_chunk", "the same sample would be in another chunk")
    if position.seed != now.seed:
        raise refuse("seed", f"give --data_seed {position.seed}, or the order would be another")
    if position.window != now.window:
        raise refuse(
            "window",
            f"leave out --sharded_lazy_shuffle_window and --sharded_lazy_shuffle_distance, and keep "
            f"--train_dataloader_shuffle {'true' if position.window else 'false'}, or the order would be another",
        )
    if position.unit != now.unit:
        raise refuse("unit", "leave out --sharded_lazy_unit, or the order would be another")
    if position.layout != now.layout:
        raise refuse("layout", "the order would be another; keep --data_sharding as it was")
    if position.layout == "strided":
        return
    option = "--group_by_length true" if position.layout == GROUPED else "--data_sharding true"
    for what, why in (
        ("dp_size", "start with the number it had"),
        ("batch_size", "start with the micro batch that it had"),
        ("epoch_samples", "the stream must be the same length"),
    ):
        if getattr(position, what) != getattr(now, what):
            raise refuse(
                what,
                f"ms-swift's own shuffle over the whole data set ({option}) would be another; {why}. Runs that are to "
                f"be resumed with other ranks are started without {option.partition(' ')[0]}",
            )
    if position.grouping != now.grouping:
        raise ResumeRefused(
            f"{checkpoint}: its samples were grouped by other lengths than they have now, or by another version of "
            f"ms-swift, transformers or torch, so the order would be another: take the stream and the versions of "
            f"then, or start on it anew from the weights alone",
            checkpoint=checkpoint,
            expected=position.grouping,
            actual=now.grouping,
        )
