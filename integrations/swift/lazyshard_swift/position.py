"""Where a run stands in its stream: a small file in every checkpoint, and what it takes to go on from it.

``checkpoint-N/lazyshard.json`` holds a JSON object with the fields of `Position`. It is written before the rest of the
checkpoint, so a checkpoint that is complete has it.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import orjson

from lazyshard.storage.durable import publish_bytes, remove
from lazyshard_swift.errors import PositionInvalid, ResumeRefused

NAME: Final = "lazyshard.json"
FORMAT: Final = 1
LAYOUTS: Final = ("strided", "block")


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
        layout: "strided" or "block", see `lazyshard.LazyShardedDataset`.
        window: chunks of a rank that are shuffled together.
        seed: of the shuffle.
        epoch_samples: what ms-swift was told is the length of an epoch.
        by_steps: whether steps decided how long the run is, not epochs.
        consumer: name of the run's cursor.
        saved_at: seconds since 1970.
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

    def to_bytes(self) -> bytes:
        """Returns the content of the file."""
        return orjson.dumps({"format": FORMAT, **asdict(self)}, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


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
        value = orjson.loads(data)
    except orjson.JSONDecodeError as cause:
        raise invalid(f"expected a JSON object, found {len(data)} bytes that are none ({cause}): torn?") from cause
    if not isinstance(value, dict):
        raise invalid(f"expected a JSON object, found {type(value).__name__}")
    version = value.get("format")
    if type(version) is not int or version != FORMAT:
        raise invalid(f"format is {version!r}, this release reads {FORMAT}; was it written by a later one?")
    kinds: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool}
    known: dict[str, Any] = {}
    for entry in fields(Position):
        kind = kinds[str(entry.type)]
        found = value.get(entry.name)
        if kind is float and type(found) is int:
            found = float(found)
        if type(found) is not kind or (isinstance(found, int) and found < 0):
            raise invalid(f"{entry.name} is {found!r}, expected {kind.__name__}{' from 0' if kind is int else ''}")
        known[entry.name] = found
    if known["layout"] not in LAYOUTS:
        raise invalid(f"layout is {known['layout']!r}, expected one of {', '.join(LAYOUTS)}")
    return Position(**known)


def load(checkpoint: str | os.PathLike[str]) -> Position | None:
    """Reads the position in a checkpoint's folder; None if there is none.

    Raises:
        PositionInvalid: it is there and cannot be read.
        OSError: the filesystem failed.
    """
    file = Path(checkpoint) / NAME
    try:
        data = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return parse(data, str(file))


def save(position: Position, checkpoint: str | os.PathLike[str]) -> None:
    """Writes a position into a checkpoint's folder, which is made if need be, whole or not at all.

    Raises:
        OSError: the filesystem refused.
    """
    folder = Path(checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{NAME}.{os.getpid()}"
    try:
        publish_bytes(position.to_bytes(), folder / NAME, temporary)
    except BaseException:
        with contextlib.suppress(OSError):
            remove(temporary)
        raise


def load_if_there(checkpoint: str | os.PathLike[str]) -> Position | None:
    """Reads the position in a checkpoint's folder; None if there is none or it cannot be read."""
    try:
        return load(checkpoint)
    except (PositionInvalid, OSError):
        return None


def saved_in(*output_dirs: Path) -> list[Position]:
    """Returns the positions of all checkpoints in these folders, those that cannot be read left out."""
    found = (load_if_there(file.parent) for folder in output_dirs for file in folder.glob(f"checkpoint-*/{NAME}"))
    return [position for position in found if position is not None]


def check_resume(position: Position, now: Position, checkpoint: str, first_epoch: bool) -> None:
    """Refuses to go on where the next sample would not be exactly the next one.

    Args:
        position: what the checkpoint says.
        now: what this run has, with `consumed` as its trainer has restored it.
        checkpoint: the checkpoint's folder.
        first_epoch: whether the run stands in its first epoch: then, in strided order, the micro batch decides nothing
            but what will be left over.

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
    if position.dp_size != now.dp_size:
        raise refuse(
            "dp_size",
            "changing the number of data-parallel ranks on resume is not there yet; start with the number it had",
        )
    if position.seed != now.seed:
        raise refuse("seed", f"give --data_seed {position.seed}, or the order would be another")
    if position.window != now.window:
        raise refuse(
            "window",
            f"leave out --sharded_lazy_shuffle_window and keep --train_dataloader_shuffle "
            f"{'true' if position.window else 'false'}, or the order would be another",
        )
    if position.layout != now.layout:
        raise refuse("layout", "the order would be another; keep --data_sharding as it was")
    if position.consumed != now.consumed:
        raise ResumeRefused(
            f"{checkpoint}: {position.consumed} samples were trained in {position.step} steps; with the batch sizes of "
            f"this run the trainer would go on after {now.consumed}. Keep micro batch * accumulation * ranks as it "
            f"was, or the position is another checkpoint's",
            checkpoint=checkpoint,
            expected=str(position.consumed),
            actual=str(now.consumed),
        )
    if (position.layout == "block" or not first_epoch) and position.batch_size != now.batch_size:
        raise refuse("batch_size", "epochs would end elsewhere; start with the micro batch that it had")
    if position.layout == "block" and position.epoch_samples != now.epoch_samples:
        raise refuse("epoch_samples", "the sampler's shuffle over the whole data set would be another")


def stamp() -> float:
    """Returns the time for `saved_at`."""
    return time.time()
