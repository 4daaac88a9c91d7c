"""Saves a `Position` as ``checkpoint-N/lazyshard.json``, and the cursor once the checkpoint is durable.

The file is written atomically, before the rest of the checkpoint. Format 1, which does not record changes of the number
of ranks, is still read. One process owns the cursor of a run until it exits: a lock excludes a second run of the same
name. Global rank 0 writes for all, and broadcasts what it finds.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias, TypeVar

import orjson
import torch.distributed as dist

from lazyshard.errors import CursorTaken, LazyShardError
from lazyshard.format.records import in_file, parse_object, read, take
from lazyshard.format.state import BLEND, KIND, BlendState, RunState, SequenceState
from lazyshard.part import BOOLEAN, NUMBER, TEXT, Checked, Kind, Part, integer, or_null, tuples
from lazyshard.plan.deal import window_positions
from lazyshard.store.durable import publish_bytes, remove, sync_directory, sync_file
from lazyshard.store.files import read_given_file
from lazyshard.stream import CursorOwner
from lazyshard_swift.errors import PositionInvalid, not_resumed
from lazyshard_swift.ms_swift import caution, is_megatron

if TYPE_CHECKING:
    from lazyshard_swift.run_plan import RunPlan

NAME: Final = "lazyshard.json"

_TRACKER: Final = "latest_checkpointed_iteration.txt"
_TRAINER: Final = "trainer_state.json"
"""The last file of a checkpoint: of Megatron, except with --async_save, and of the Hugging Face trainer."""

_METADATA: Final = ("metadata.json", ".metadata")
"""What Megatron writes into ``iter_N`` after the parts of all ranks."""

_VERSIONED: Final = re.compile(r"v\d+-\d{8}-\d{6}")
"""The last folder of an output directory, which ms-swift adds with ``--add_version true``."""

FOREIGN: Final = "first-row-"
"""Prefix of the identity of a stream without an id; a digest of its first row follows."""

GROUPED: Final = "grouped"
_FORMAT: Final = 2

Inner: TypeAlias = BlendState | SequenceState  # the state of what the positions of a run consist of
_T = TypeVar("_T")
_held: dict[tuple[str, str], CursorOwner] = {}


def stream_id_of(stream: str) -> str | None:
    """Returns the manifest's id for the identity of a stream; None if it has none."""
    return None if stream.startswith(FOREIGN) else stream


_Number = Annotated[int, integer(0, 2**63 - 1)]
_Text = Annotated[str, TEXT]
_LAYOUT: Final = Kind("one of strided, block, grouped", lambda value: value in ("strided", "block", GROUPED))
_TEXTS: Final = Kind("a list of strings", lambda value: type(value) is tuple and all(map(TEXT.fits, value)), tuples)


@dataclass(frozen=True, slots=True)
class Position(Checked):
    """The position of a run; `stream` is the identity as in `run_plan.Stream`.

    Attributes:
        consumed: samples trained so far, over all ranks and epochs.
        layout: "strided" or "block", see `lazyshard.Order`; or "grouped", see `lazyshard_swift.opening`.
        epoch_samples: the length of an epoch as passed to ms-swift.
        skipped: what the run was told to exclude, as on the command line, in all its starts.
        state: the course of the run, for a blend that of its positions, for packs made during training that of the
            packs, and `blend` is the state of what these consist of; None if ms-swift's sampler sets the order.
    """

    stream: _Text
    directory: _Text
    samples_per_chunk: _Number
    consumed: _Number
    step: _Number
    dp_size: _Number
    batch_size: _Number
    layout: Annotated[str, _LAYOUT]
    window: _Number
    seed: _Number
    epoch_samples: _Number
    by_steps: Annotated[bool, BOOLEAN]
    consumer: _Text
    saved_at: Annotated[float, NUMBER]
    skipped: Annotated[tuple[str, ...], _TEXTS] = ()
    state: RunState | None = None
    blend: Inner | None = None
    grouping: Annotated[str | None, or_null(TEXT)] = None

    @property
    def unit(self) -> int:
        """Number of consecutive samples that a rank is dealt."""
        return self.samples_per_chunk if self.state is None else self.state.unit

    def to_bytes(self) -> bytes:
        """Returns the contents of the file."""
        values = {"format": _FORMAT} | self.to_dict()
        if (blend := values.pop("blend")) is not None:
            # The blend's state takes the place of `state`, since it records what was trained when.
            values |= {"positions": values["state"], "state": blend}
        if self.grouping is None:
            del values["grouping"]
        return orjson.dumps(values, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def parse(data: bytes, file: str) -> Position:
    """Parses the contents of the file."""
    try:
        with in_file(file):
            found = parse_object(data, _FORMAT)
            position = read(Position, found, {"grouping", *(["skipped"] if found["format"] == 1 else ())})
            if position.layout == GROUPED:
                take(found, "grouping", TEXT)
        if position.layout != "strided":
            return position
        if found["format"] == 1:
            return _with_state(position, _only_part(position))
        blend: Inner | None = None
        state, within = found.get("state"), "state"
        if isinstance(state, dict) and (kind := state.get("kind")) in (BLEND, KIND):
            blend = (BlendState if kind == BLEND else SequenceState).from_dict(state, file)
            state, within = found.get("positions"), "positions"
        return _with_state(position, RunState.from_dict(state, file, within=within), blend)
    except (LazyShardError, ValueError) as cause:
        why = str(cause).removeprefix(f"{file}: ")
        raise PositionInvalid(f"{file}: {why}; use an older one, or start over from the weights", file=file) from cause


def _only_part(position: Position) -> RunState:
    """Returns the state for a position of format 1, in which the number of ranks never changed."""
    draws, more = divmod(position.consumed, position.dp_size) if position.dp_size else (0, 1)
    if more:
        raise ValueError(f"consumed is {position.consumed}, expected a multiple of dp_size {position.dp_size}")
    per_step, more = divmod(draws, position.step) if position.step else (0, 0)
    part = Part(position.dp_size, position.batch_size, draws, draws_per_step=0 if more else per_step)
    size, stream_id = position.samples_per_chunk, stream_id_of(position.stream)
    return RunState(stream_id, size, size, position.window * size, position.seed, None, (part,), position.consumed)


def _with_state(position: Position, state: RunState, blend: Inner | None = None) -> Position:
    """Returns the position with its state. Raises ValueError if they contradict each other."""
    size, part = position.samples_per_chunk, state.parts[-1]
    for name, there, here in (
        ("stream_id", state.stream_id, stream_id_of(position.stream)),
        ("samples_per_chunk", state.samples_per_chunk, size),
        ("consumed", (blend if isinstance(blend, BlendState) else state).consumed, position.consumed),
        ("consumed", state.consumed, position.consumed),
        ("dp", part.dp, position.dp_size),
        ("batch_size", part.batch_size, position.batch_size),
        ("window", state.window, window_positions(position.window, size, state.unit)),
        ("seed", state.seed, position.seed),
    ):
        if there != here:
            raise ValueError(f"its state has {name} {there!r}, but the rest has {here!r}")
    return replace(position, state=state, blend=blend)


def several() -> bool:
    """Returns whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def agree(value: _T) -> _T:
    """Returns the value of global rank 0 on all ranks. A collective: every rank calls it."""
    values = [value]
    if several():
        dist.broadcast_object_list(values, src=0)
    return values[0]


def barrier() -> None:
    """Waits for all ranks, if there are several."""
    if several():
        dist.barrier()


def is_first() -> bool:
    """Returns whether this process writes for all ranks."""
    return not several() or dist.get_rank() == 0


class Checkpoints:
    """Keeps the positions and the cursor of a run. Only global rank 0 writes.

    The cursor reports which chunks the run no longer needs, so it never passes the oldest existing checkpoint
    of the run. If it cannot be written, that is logged and not raised: training does not depend on it.
    """

    def __init__(self, plan: RunPlan, output_dir: str) -> None:
        self._plan, self._output_dir = plan, Path(output_dir)
        self.pending: list[tuple[Path, Position]] = []
        self.last_step, self._fenced = -1, False

    def register(self) -> None:
        """Sets the cursor to this run's start, even backwards. A collective: all ranks raise `CursorTaken`, or none."""
        plan, taken = self._plan, None
        try:
            if is_first():
                self._write(plan.position(plan.consumed, plan.step))
        except CursorTaken as error:
            taken = f"{error} (--sharded_lazy_consumer NAME, or --sharded_lazy_take_over true)"
        if (taken := agree(taken)) is not None:
            raise CursorTaken(taken, directory=plan.directory, consumer=plan.consumer)

    def is_due(self, step: int) -> bool:
        """Returns whether this start has trained steps, up to this one, that none of its checkpoints holds."""
        return step not in (self._plan.step, self.last_step)

    def folder(self, step: int) -> Path:
        """Returns the folder in which both trainers save a step."""
        return self._output_dir / f"checkpoint-{step}"

    def begin(self, consumed: int, step: int) -> None:
        """Writes the position into the folder of a checkpoint to be saved, which counts as incomplete from then on."""
        self.last_step = step
        if is_first():
            position, folder = self._plan.position(consumed, step), self.folder(step)
            for last in (_TRACKER, _TRAINER, *(f"iter_*/{name}" for name in _METADATA)):
                for file in folder.glob(last):
                    file.unlink()
            save_position(position, folder)
            self.pending.append((folder, position))

    def commit(self, unfinished: int = 0) -> None:
        """Moves the cursor to the newest complete checkpoint: the last `unfinished` ones may still be written."""
        if (whole := len(self.pending) - unfinished) <= 0:
            return
        folder, position = self.pending[whole - 1]
        del self.pending[:whole]
        try:
            self._write(position, folder)
        except CursorTaken as error:
            if not self._fenced:
                caution(str(error))
            self._fenced = True

    def _write(self, position: Position, folder: Path | None = None) -> None:
        # Includes the checkpoint that this start continues from, wherever it is stored: if the run is lost before its
        # first checkpoint, it resumes from that one again.
        known = [] if self._plan.checkpoint is None else [load_if_there(self._plan.checkpoint)]
        try:
            if folder is not None:
                _make_durable(folder)
            known += [other for _, other in _saved_in(self._output_dir)]
            others = [other for other in known if other is not None and other.stream == position.stream]
            for directory, cursor in self._plan.cursors(position, others):
                # At the first commit of this process the run takes ownership.
                if (key := (directory, cursor.consumer)) not in _held:
                    _held[key] = CursorOwner(*key, take_over=self._plan.take_over)
                _held[key].put(cursor)
        except OSError as error:
            caution(f"the cursor could not be written ({error}); the producer uses the previous one, if there is one")


def _make_durable(folder: Path) -> None:
    """Syncs all files in a checkpoint's folder that this machine wrote."""
    for path in (Path(parent, name) for parent, _, names in os.walk(folder) for name in names):
        if path.is_file() and not path.is_symlink():
            sync_file(path, os.O_NONBLOCK | os.O_NOFOLLOW)
    sync_directory(folder)
    sync_directory(folder.parent)


def load_position(checkpoint: str | os.PathLike[str]) -> Position | None:
    """Reads the position in a checkpoint's folder; None if there is none."""
    file = Path(checkpoint) / NAME
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return parse(read_given_file(file), str(file))
    return None


def load_if_there(checkpoint: str | os.PathLike[str]) -> Position | None:
    """Reads the position in a checkpoint's folder; None if there is none or it cannot be read."""
    with contextlib.suppress(PositionInvalid, OSError):
        return load_position(checkpoint)
    return None


def save_position(position: Position, checkpoint: str | os.PathLike[str]) -> None:
    """Atomically writes a position into a checkpoint's folder, creating the folder if needed."""
    folder = Path(checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{NAME}.{secrets.token_hex(8)}"
    try:
        publish_bytes(position.to_bytes(), folder / NAME, temporary)
    finally:
        with contextlib.suppress(OSError):
            remove(temporary)


def is_whole(checkpoint: str | os.PathLike[str]) -> bool:
    """Returns whether the trainer has finished saving a checkpoint, judging by the files it writes last."""
    folder = Path(checkpoint)
    if not (folder / _TRACKER).exists():
        return (folder / _TRAINER).exists()
    parts = {file.parent for file in folder.glob("iter_*/*.distcp")}
    return all(any((part / name).exists() for name in _METADATA) for part in parts)


def resume_checkpoint(args: Any) -> str | None:
    """Returns the folder of the checkpoint that ms-swift will continue from; None for a new start."""
    if megatron := is_megatron(args):
        # Highest precedence first: ms-swift loads it last, overriding what it loaded from the others.
        options, anew = ["mcore_adapter", "mcore_model", "adapters", "model"], args.finetune
    else:
        options, anew = ["resume_from_checkpoint"], getattr(args, "resume_only_model", False) and args.ignore_data_skip
    for option in options if not anew else ():
        if given := getattr(args, option):
            folder = str(given[0] if option == "adapters" else given)
            _check_whole(folder, option)
            if not megatron or os.path.exists(os.path.join(folder, _TRACKER)):
                return folder
    return None


def _check_whole(checkpoint: str, option: str) -> None:
    """Refuses a checkpoint, given by an option, whose save was interrupted: a trainer might start over from it."""
    torn = load_position(checkpoint)
    if torn is None or is_whole(checkpoint):
        return
    saved = _saved_in(Path(checkpoint).resolve().parent)
    whole = [(one.saved_at, str(folder)) for folder, one in saved if one.consumer == torn.consumer and is_whole(folder)]
    newest = max(whole)[1] if whole else None
    way_out = f"use the newest complete one of this run, --{option} {newest}"
    if newest is None:
        way_out = f"this run has no complete one: start over, without --{option}"
    raise not_resumed(checkpoint, f"its save was interrupted: {way_out}", newest)


def _saved_in(output_dir: Path) -> Iterator[tuple[Path, Position]]:
    """Yields the readable checkpoints of all starts of a run; each start has its own folder."""
    path = Path(os.path.abspath(output_dir))
    starts = {path, *(path.parent.glob("v*") if _VERSIONED.fullmatch(path.name) else ())}
    for folder in (start for start in starts if start == path or _VERSIONED.fullmatch(start.name)):
        for file in folder.glob(f"checkpoint-*/{NAME}"):
            if (position := load_if_there(file.parent)) is not None:
                yield file.parent, position


def run_folder(output_dir: str) -> Path:
    """Returns the output folder of a run, the same for all its starts."""
    path = Path(os.path.abspath(output_dir))
    return path.parent if _VERSIONED.fullmatch(path.name) else path


def consumer_name(output_dir: str) -> str:
    """Returns the name of a run's cursor, derived from its output folder, so that restarts keep it."""
    path = run_folder(output_dir)
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", path.name).strip("-")[:64] or "run"
    return f"{readable}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"
