"""The arguments: added to ms-swift's `DataArguments`, from which all of its commands take theirs."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from types import ModuleType
from typing import Any, Literal

from lazyshard.store.urls import stream_name
from lazyshard_swift import ms_swift, settings
from lazyshard_swift.errors import install_exits, refused
from lazyshard_swift.settings_checks import check_combinations


def extend(module: ModuleType) -> None:
    """Puts a subclass with our fields in the place of `DataArguments`.

    It is not made a dataclass again in place: its default factories are gone once the first decorator has run.
    `base_args` imports the name after this, so all argument classes inherit from the subclass.
    """
    original = module.DataArguments
    # A reload of ms-swift's module makes a new class, an import of it elsewhere must not stack a second subclass.
    if "sharded_lazy" in {known.name for known in fields(original)}:
        return
    module.DataArguments = _with_ours(original)  # type: ignore[attr-defined]


# Values, not annotations: transformers.HfArgumentParser, with which ms-swift parses, would find the annotations of a
# class in this module as strings and look their names up in ms-swift's.
_FIELDS: list[tuple[str, Any, Any, str]] = [
    (
        "sharded_lazy",
        bool,
        False,
        "Read --dataset as a lazyshard stream directory: every data-parallel rank reads only its own "
        "chunks, while they are still being produced, each sample exactly once. Several are blended by "
        "--interleave_prob.",
    ),
    (
        "sharded_lazy_samples_per_chunk",
        int | None,
        None,
        "Rows of every chunk file. Needed for directories that another program fills, which have no "
        "stream.json; otherwise checked against that.",
    ),
    (
        "sharded_lazy_max_wait",
        float,
        600.0,
        "Seconds to wait for data at the most; then every rank ends with exit code 75.",
    ),
    (
        "sharded_lazy_shuffle_window",
        int | None,
        None,
        f"How many chunks of a rank are shuffled together. Default: {settings.LIVE_WINDOW} while the "
        f"stream is being produced, {settings.ENDED_WINDOW} once it has ended, 0 (in order) with "
        "--train_dataloader_shuffle false. A wider window mixes better and has to be published before it can "
        "be read.",
    ),
    (
        "sharded_lazy_shuffle_distance",
        int | None,
        None,
        "Instead of --sharded_lazy_shuffle_window, how far apart two samples that are neighbours in "
        "the stream are to be drawn on average: in steps of one sample of a data-parallel rank. The window is "
        "three times as many samples, in whole chunks.",
    ),
    (
        "sharded_lazy_unit",
        str | None,
        None,
        "What is dealt to the ranks in turn: chunk, batch (a micro batch), sample, a number of "
        "samples, or auto: chunks if there is a full one for every rank, else batches. Default: chunk; a run "
        "that goes on from a checkpoint keeps what it began with. Units smaller than a chunk are for streams "
        "with fewer chunks than ranks.",
    ),
    (
        "sharded_lazy_consumer",
        str | None,
        None,
        "Name of this run's cursor in STREAM/cursors, which tells the producer what is safely trained. "
        "Default: from the output directory.",
    ),
    (
        "sharded_lazy_on_bad_sample",
        Literal["substitute", "raise"] | None,
        None,
        "What to do with a row that cannot be read or encoded: train another row of its chunk and log "
        "it, or stop. Default: substitute, with --strict true raise.",
    ),
    (
        "sharded_lazy_on_end",
        Literal["stop", "repeat"],
        "stop",
        "What to do where the stream ends before --train_iters or --max_steps: stop all ranks at the "
        "last whole global batch, with a checkpoint, or go on with the next epoch.",
    ),
    (
        "sharded_lazy_skip",
        str | None,
        None,
        "What not to train from here on: 'samples 120:180, chunks 7:8, steps 41:61', each from the "
        "first to the one before the last. Steps 41:61 are those between checkpoint-40 and checkpoint-60, and "
        "need a checkpoint to go on from. Kept in the checkpoints; given again, it leaves nothing out twice.",
    ),
    (
        "sharded_lazy_encode_cache",
        str | None,
        None,
        "Directory of this node, on its disk or in /dev/shm, where encoded samples of raw streams are "
        "kept: each row is then encoded once for all model-parallel ranks and workers of the node, for later "
        "epochs and for restarts. Not for templates that encode a row otherwise each time.",
    ),
    (
        "sharded_lazy_encode_cache_size",
        str | None,
        None,
        "Bytes that --sharded_lazy_encode_cache may take, such as 20GB or 512MiB; what was used "
        "longest ago goes first. Default: 16GiB.",
    ),
    (
        "sharded_lazy_take_over",
        bool,
        False,
        "Take over the cursor in STREAM/cursors although another run of the same name still holds it; "
        "that one writes it no more. Without it the second run is refused.",
    ),
]
"""Name, type, default and help."""


def _with_ours(original: Any) -> Any:
    def __post_init__(self: Any) -> None:
        check(self)
        original.__post_init__(self)

    namespace: dict[str, Any] = {
        "__doc__": original.__doc__,
        # Pickles and messages name the class as if it were ms-swift's.
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__annotations__": {name: kind for name, kind, _, _ in _FIELDS},
        "__post_init__": __post_init__,
        **{name: field(default=default, metadata={"help": text}) for name, _, default, text in _FIELDS},
    }
    return dataclass(type(original.__name__, (original,), namespace))


def check(args: Any) -> None:
    """Looks at the arguments of a command before ms-swift does, and puts those of a stream in order.

    Raises:
        SettingsRefused: with these arguments nothing can be promised, or ms-swift is too old.
    """
    if not args.sharded_lazy:
        for name in [args.dataset] if isinstance(args.dataset, str) else args.dataset:
            if os.path.exists(os.path.join(name, "stream.json")):
                # Only now: what a run without the flag does not need is not loaded.
                from lazyshard_swift.parallel import caution

                caution(
                    f"--dataset {name} is a lazyshard stream, and --sharded_lazy true is missing: ms-swift takes the "
                    f"directory for one of ordinary data files. Give --sharded_lazy true to read the stream"
                )
        return
    if not settings.is_training(args):
        from lazyshard_swift.parallel import notice

        notice("--sharded_lazy is for commands that train; it is put aside here")
        args.sharded_lazy = False
        return
    install_exits()
    if ms_swift.is_too_old(ms_swift.version()):
        raise refused("sharded_lazy", f"--sharded_lazy true needs ms-swift {ms_swift.needed()}")
    if isinstance(args.dataset, str):
        args.dataset = [args.dataset]
    args.dataset = [os.path.expanduser(name) for name in args.dataset]
    check_combinations(args)
    # As ms-swift does with its own paths: args.json then says what was read, wherever the command was started.
    args.dataset = [stream_name(name) for name in args.dataset]
