"""What follows from arguments: how long a run is, its window, its name. Decisions only: no ms-swift, no torch."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from lazyshard_swift.errors import refused

OnEnd = Literal["stop", "repeat"]
OnBadSample = Literal["substitute", "raise"]

LIVE_WINDOW: Final = 2
"""Chunks of a rank that are shuffled together while the stream is live: training can start once ranks * 2 are there."""

ENDED_WINDOW: Final = 8
"""The same once it has ended: nothing has to be waited for, and 8 chunks are cheap to keep open."""

_VERSIONED: Final = re.compile(r"v\d+-\d{8}-\d{6}")
"""The last folder that ms-swift adds to an output directory with ``--add_version true``."""


class Progress(NamedTuple):
    """By what a run is measured.

    Attributes:
        steps: how many steps were asked for; None if epochs decide.
        epochs: how many epochs were asked for; None if steps decide.
    """

    steps: int | None
    epochs: float | None


def is_megatron(args: Any) -> bool:
    """Returns whether these are the arguments of a `megatron` command."""
    return hasattr(args, "micro_batch_size")


def is_training(args: Any) -> bool:
    """Returns whether these are the arguments of a command that trains."""
    return any(
        kind.__name__ in ("SftArguments", "TrainArguments", "MegatronSftArguments", "MegatronTrainArguments")
        for kind in type(args).__mro__
    )


def progress(args: Any, live: bool) -> Progress:
    """Returns whether steps or epochs decide how long the run is, as ms-swift would, but by steps on a live stream.

    Args:
        args: the parsed arguments.
        live: whether the stream was still being produced when the run first started.

    Raises:
        SettingsRefused: the stream is live and only epochs are given, or saving goes by epochs.
    """
    if is_megatron(args):
        steps, epochs = args.train_iters, args.num_train_epochs
        option = "--train_iters"
    else:
        steps, epochs = (args.max_steps if args.max_steps > 0 else None), args.num_train_epochs
        option = "--max_steps"
    if live:
        if not steps:
            raise refused(
                option[2:],
                f"the stream is still being produced, so an epoch has no length yet: say with {option} N how many "
                f"steps to train at the most. If the stream ends earlier, training stops with it, unless "
                f"--sharded_lazy_on_end repeat is given",
            )
        for name in ("save_strategy", "eval_strategy"):
            if str(getattr(args, name, "")).rsplit(".", 1)[-1].lower() == "epoch":
                raise refused(
                    name,
                    f"--{name} epoch needs an end of the epoch, and the stream is still being produced: use "
                    f"--{name} steps",
                )
        return Progress(steps, None)
    # ms-swift: Megatron's epochs count before its iterations, in the Hugging Face trainer steps count before epochs.
    if is_megatron(args):
        if epochs is None and not steps:
            raise refused("train_iters", "say how long to train, with --num_train_epochs N or --train_iters N")
        return Progress(None, epochs) if epochs is not None else Progress(steps, None)
    return Progress(steps, None) if steps else Progress(None, epochs)


def default_window(shuffle: bool, live: bool) -> int:
    """Returns how many chunks of a rank are shuffled together if the user does not say."""
    if not shuffle:
        return 0
    return LIVE_WINDOW if live else ENDED_WINDOW


def consumer_name(output_dir: str) -> str:
    """Returns the name of a run's cursor: the folder of its outputs, the same over its restarts.

    ms-swift adds a folder with version and time to the output directory of each start; the one above it counts. The
    digest keeps apart runs in folders of the same name.
    """
    path = os.path.abspath(output_dir)
    if _VERSIONED.fullmatch(os.path.basename(path)):
        path = os.path.dirname(path)
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", os.path.basename(path)).strip("-")[:64] or "run"
    return f"{readable}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"


def version_folders(output_dir: str | os.PathLike[str]) -> list[Path]:
    """Returns the folders that ms-swift made for other starts of the run whose outputs go here."""
    path = Path(os.path.abspath(output_dir))
    if not _VERSIONED.fullmatch(path.name):
        return []
    return [other for other in path.parent.glob("v*") if _VERSIONED.fullmatch(other.name) and other != path]
