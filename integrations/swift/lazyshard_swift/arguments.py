"""The arguments: added to ms-swift's `DataArguments`, from which all of its commands take theirs, and checked.

The checks are decisions only: no ms-swift, no torch, and of files but the names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from types import ModuleType
from typing import Any, Final, Literal, TypeAlias, get_args

from lazyshard.errors import StreamMissing
from lazyshard.format.cursor import check_consumer
from lazyshard.format.fields import parse_size
from lazyshard.format.kept_sample import LEAST_CACHE_BYTES
from lazyshard.format.names import MANIFEST, parse_chunk_name
from lazyshard.store.urls import check_place, is_url, stream_name
from lazyshard_swift import settings
from lazyshard_swift.errors import install_exits, refused
from lazyshard_swift.settings import (
    OnBadSample,
    OnEnd,
    check_distance,
    check_grouping,
    is_megatron,
    parse_skips,
    parse_unit,
)

RLHF_TYPES: Final = ("dpo", "orpo", "simpo", "cpo", "rm")
"""Those that encode in advance, read each sample once, and take their batches from the ordinary data loader."""

_Wrong: TypeAlias = tuple[Any, str, str]
"""Whether something is wrong, the argument, and what to say of it."""

_COLLECTIVE_SLACK_S: Final = 60.0
"""A rank that gives up waiting needs a moment to say so before its peers' collectives time out."""


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
        SettingsRefused: with these arguments nothing can be promised.
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
    if isinstance(args.dataset, str):
        args.dataset = [args.dataset]
    args.dataset = [os.path.expanduser(name) for name in args.dataset]
    check_combinations(args)
    # As ms-swift does with its own paths: args.json then says what was read, wherever the command was started.
    args.dataset = [stream_name(name) for name in args.dataset]


def check_combinations(args: Any) -> None:
    """Refuses what cannot work, before anything is loaded.

    Args:
        args: the parsed arguments of a command that trains, with ``sharded_lazy`` true.

    Raises:
        SettingsRefused: with the reason and the way out.
    """
    _check_dataset(list(getattr(args, "dataset", None) or []))
    _check_others(args)
    _check_order(args)
    check_grouping(args)
    _check_encode_cache(args.sharded_lazy_encode_cache, args.sharded_lazy_encode_cache_size)
    _check_own(args)


def _check_dataset(names: list[str]) -> None:
    if not any(names):
        raise refused("dataset", "--sharded_lazy true takes stream directories as --dataset, none was given")
    if len(set(map(stream_name, names))) != len(names):
        raise refused(
            "dataset",
            f"--dataset {' '.join(names)}: one stream is given twice; give it once, with the sum of its weights in "
            f"--interleave_prob",
        )
    for name in names:
        _check_name(name)


def _check_name(name: str) -> None:
    if not name:
        raise refused("dataset", "--dataset has an empty name in it: give the paths of stream directories")
    if "\0" in name:
        raise refused("dataset", "--dataset has a NUL character in it: give the path of a stream directory")
    if "#" in os.path.basename(name) and (is_url(name) or not os.path.isdir(name)):
        raise refused(
            "dataset",
            f"--dataset {name}: '#' takes a part of an ordinary data set; with --sharded_lazy true give the stream "
            f"directory alone, and --train_iters or --max_steps for how much of it to train",
        )
    if os.path.isfile(name):
        raise refused(
            "dataset",
            f"--dataset {name} is a file, --sharded_lazy true reads a stream directory. Make one of it with "
            f"`lazyshard-producer run --source {name} --out STREAM --samples-per-chunk 1000`, or leave out "
            f"--sharded_lazy",
        )
    try:
        check_place(name)
    except StreamMissing as missing:
        raise refused("dataset", f"--dataset {missing}") from missing


def _check_others(args: Any) -> None:
    """Refuses options of ms-swift's that cannot work with a stream."""

    def on(name: str) -> Any:
        return getattr(args, name, None)

    _check_validation(on("val_dataset") or [])
    kind, ratio = on("rlhf_type"), on("split_dataset_ratio") or 0
    streams, weights = len(on("dataset") or []), len(on("interleave_prob") or [])
    wrong = [
        (
            on("streaming"),
            "streaming",
            "--streaming true has rank 0 read and scatter everything, --sharded_lazy true has every rank read its own "
            "chunks: leave out --streaming",
        ),
        (
            on("cached_dataset") or on("cached_val_dataset"),
            "cached_dataset",
            "--cached_dataset holds data that were encoded in advance, --sharded_lazy true reads a stream: leave out "
            "one of them",
        ),
        (
            on("packing") and kind is not None,
            "packing",
            f"--packing true with --rlhf_type {kind}: packs of a stream are for sft and pt; leave it out",
        ),
        (
            on("truncation_strategy") == "split",
            "truncation_strategy",
            "--truncation_strategy split makes several samples of one row, so the row would no longer be one sample: "
            "split long rows where they are produced, or choose delete, left or right",
        ),
        (
            ratio > 0,
            "split_dataset_ratio",
            f"--split_dataset_ratio {ratio} takes validation samples out of the training data, whose end a stream does "
            f"not know: give validation data of their own with --val_dataset FILE",
        ),
        (
            weights and weights != streams,
            "interleave_prob",
            f"--interleave_prob has {weights} weights for {streams} streams of --dataset: give one for each",
        ),
        (
            streams > 1 and on("sharded_lazy_skip"),
            "sharded_lazy_skip",
            "--sharded_lazy_skip names samples of one stream, --dataset has several: leave it out, or skip in a start "
            "on that stream alone",
        ),
        (
            kind is not None and kind not in RLHF_TYPES,
            "rlhf_type",
            f"--rlhf_type {kind} does not take encoded samples from the data loader in their order; --sharded_lazy "
            f"true works with {', '.join(RLHF_TYPES)}, sft and pt",
        ),
    ]
    _refuse_first([*wrong, *([] if is_megatron(args) else _of_hugging_face(on))])


def _of_hugging_face(on: Callable[[str], Any]) -> list[_Wrong]:
    """Returns what `swift` has and `megatron` has not."""
    return [
        (
            (on("sequence_parallel_size") or 1) > 1,
            "sequence_parallel_size",
            "--sequence_parallel_size above 1 has a sampler of its own in `swift`; use `megatron sft "
            "--context_parallel_size N --sharded_lazy true`, or leave it out",
        ),
        (
            on("use_flash_ckpt"),
            "use_flash_ckpt",
            "--use_flash_ckpt true saves in another process, so nothing tells when a position is durable: leave it out",
        ),
        (
            on("auto_find_batch_size"),
            "auto_find_batch_size",
            "--auto_find_batch_size true changes the batch size in mid-run, and with it which sample comes next: "
            "leave it out",
        ),
        (
            on("ignore_data_skip") and on("resume_from_checkpoint") and not on("resume_only_model"),
            "ignore_data_skip",
            "--ignore_data_skip true would train samples again that the checkpoint has seen: leave it out, or start "
            "anew from the weights with --resume_only_model true --ignore_data_skip true",
        ),
    ]


def _refuse_first(wrong: Iterable[_Wrong]) -> None:
    for found, argument, message in wrong:
        if found:
            raise refused(argument, message)


def _check_validation(given: str | list[str]) -> None:
    for name in map(os.path.expanduser, [given] if isinstance(given, str) else given):
        if os.path.isdir(name) and any(one == MANIFEST or parse_chunk_name(one) for one in os.listdir(name)):
            raise refused(
                "val_dataset",
                f"--val_dataset {name} is a stream, and validation data are read by ms-swift itself, from files: if it "
                f"has ended and its rows are not encoded, give its chunk files, --val_dataset {name}/chunk_*.jsonl; "
                f"otherwise the files that it was made of",
            )


def _check_order(args: Any) -> None:
    """Refuses windows, distances and units that cannot be."""
    window, distance = args.sharded_lazy_shuffle_window, args.sharded_lazy_shuffle_distance
    shuffles = getattr(args, "train_dataloader_shuffle", True)
    _refuse_first(
        [
            (
                window is not None and window < 0,
                "sharded_lazy_shuffle_window",
                f"--sharded_lazy_shuffle_window is a number of chunks, 0 for none, got {window}",
            ),
            (
                window and not shuffles,
                "sharded_lazy_shuffle_window",
                f"--sharded_lazy_shuffle_window {window} shuffles, --train_dataloader_shuffle false does not: leave "
                f"out one of them",
            ),
        ]
    )
    if distance is not None:
        check_distance(distance, window, shuffles, len(args.dataset))
    parse_unit(args.sharded_lazy_unit)


def _check_own(args: Any) -> None:
    """Refuses values that cannot be, by themselves or with the arguments that bear on them."""
    wait, timeout = args.sharded_lazy_max_wait, getattr(args, "ddp_timeout", None)
    if not wait > 0:
        raise refused("sharded_lazy_max_wait", f"--sharded_lazy_max_wait is a number of seconds above 0, got {wait}")
    if timeout is not None and wait + _COLLECTIVE_SLACK_S > timeout:
        raise refused(
            "sharded_lazy_max_wait",
            f"--sharded_lazy_max_wait {wait:g} must end at least {_COLLECTIVE_SLACK_S:g} s before --ddp_timeout "
            f"{timeout}, or a collective times out first and hides the reason: raise --ddp_timeout or wait less",
        )
    size = args.sharded_lazy_samples_per_chunk
    if size is not None and size < 1:
        raise refused(
            "sharded_lazy_samples_per_chunk", f"--sharded_lazy_samples_per_chunk is a number from 1, got {size}"
        )
    for name, check in (("sharded_lazy_consumer", check_consumer), ("sharded_lazy_skip", parse_skips)):
        if getattr(args, name) is not None:
            try:
                check(getattr(args, name))
            except ValueError as cause:
                raise refused(name, f"--{name}: {cause}") from cause
    for name, choices in (("sharded_lazy_on_end", OnEnd), ("sharded_lazy_on_bad_sample", OnBadSample)):
        value = getattr(args, name)
        if value is not None and value not in get_args(choices):
            raise refused(name, f"--{name} is one of {', '.join(get_args(choices))}, got {value!r}")


def _check_encode_cache(directory: str | None, size: str | None) -> None:
    if directory is not None and (not directory or "\0" in directory):
        raise refused("sharded_lazy_encode_cache", "--sharded_lazy_encode_cache is a directory of this node")
    if size is None:
        return
    if directory is None:
        raise refused(
            "sharded_lazy_encode_cache_size",
            f"--sharded_lazy_encode_cache_size {size} bounds the cache that --sharded_lazy_encode_cache DIR makes: "
            f"give both, or none",
        )
    try:
        number = parse_size(size)
    except ValueError as cause:
        raise refused("sharded_lazy_encode_cache_size", f"--sharded_lazy_encode_cache_size: {cause}") from cause
    if number < LEAST_CACHE_BYTES:
        raise refused(
            "sharded_lazy_encode_cache_size",
            f"--sharded_lazy_encode_cache_size is at least {LEAST_CACHE_BYTES} bytes, got {size}: less keeps no sample",
        )
