"""Which combinations of arguments work. Decisions only: no ms-swift, no torch, and of files but the names."""

from __future__ import annotations

import os
from typing import Any, Final, get_args

from lazyshard.errors import StreamMissing
from lazyshard.format.cursor import check_consumer
from lazyshard.format.fields import parse_size
from lazyshard.format.kept_sample import LEAST_CACHE_BYTES
from lazyshard.format.names import MANIFEST, parse_chunk_name
from lazyshard.store.files import list_names
from lazyshard.store.urls import check_place, is_url, stream_name, stream_path
from lazyshard.stream.listing import other_files
from lazyshard_swift.errors import SettingsRefused, refused
from lazyshard_swift.settings import (
    DISTANCE,
    OnBadSample,
    OnEnd,
    grouping_refused,
    groups_by_length,
    is_megatron,
    parse_skips,
    parse_unit,
)

RLHF_TYPES: Final = ("dpo", "orpo", "simpo", "cpo", "rm")
"""Those that encode in advance, read each sample once, and take their batches from the ordinary data loader."""

_OF_ORDERS: Final = ("shuffle_window", "shuffle_distance", "unit", "skip")
"""Arguments for an order of ours, without ``sharded_lazy_``."""

_COLLECTIVE_SLACK_S: Final = 60.0
"""A rank that gives up waiting needs a moment to say so before its peers' collectives time out."""


def check_combinations(args: Any) -> None:
    """Refuses what cannot work, before anything is loaded.

    Args:
        args: the parsed arguments of a command that trains, with ``sharded_lazy`` true.

    Raises:
        SettingsRefused: with the reason and the way out.
    """
    _check_dataset(list(getattr(args, "dataset", None) or []))
    _check_others(args)
    check_own(args)


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
    def on(name: str) -> Any:
        return getattr(args, name, None)

    if on("streaming"):
        raise refused(
            "streaming",
            "--streaming true has rank 0 read and scatter everything, --sharded_lazy true has every rank read its own "
            "chunks: leave out --streaming",
        )
    validation = on("val_dataset") or []
    for name in map(os.path.expanduser, [validation] if isinstance(validation, str) else validation):
        if os.path.isdir(name) and any(one == MANIFEST or parse_chunk_name(one) for one in os.listdir(name)):
            raise refused(
                "val_dataset",
                f"--val_dataset {name} is a stream, and validation data are read by ms-swift itself, from files: if it "
                f"has ended and its rows are not encoded, give its chunk files, --val_dataset {name}/chunk_*.jsonl; "
                f"otherwise the files that it was made of",
            )
    if on("cached_dataset") or on("cached_val_dataset"):
        raise refused(
            "cached_dataset",
            "--cached_dataset holds data that were encoded in advance, --sharded_lazy true reads a stream: leave out "
            "one of them",
        )
    if on("packing") and on("rlhf_type") is not None:
        raise refused(
            "packing",
            f"--packing true with --rlhf_type {on('rlhf_type')}: packs of a stream are for sft and pt; leave it out",
        )
    if on("truncation_strategy") == "split":
        raise refused(
            "truncation_strategy",
            "--truncation_strategy split makes several samples of one row, so the row would no longer be one sample: "
            "split long rows where they are produced, or choose delete, left or right",
        )
    if (on("split_dataset_ratio") or 0) > 0:
        raise refused(
            "split_dataset_ratio",
            f"--split_dataset_ratio {on('split_dataset_ratio')} takes validation samples out of the training data, "
            f"whose end a stream does not know: give validation data of their own with --val_dataset FILE",
        )
    names, weights = list(on("dataset") or []), on("interleave_prob")
    if weights and len(weights) != len(names):
        raise refused(
            "interleave_prob",
            f"--interleave_prob has {len(weights)} weights for {len(names)} streams of --dataset: give one for each",
        )
    if len(names) > 1 and on("sharded_lazy_skip"):
        raise refused(
            "sharded_lazy_skip",
            "--sharded_lazy_skip names samples of one stream, --dataset has several: leave it out, or skip in a start "
            "on that stream alone",
        )
    kind = on("rlhf_type")
    if kind is not None and kind not in RLHF_TYPES:
        raise refused(
            "rlhf_type",
            f"--rlhf_type {kind} does not take encoded samples from the data loader in their order; --sharded_lazy "
            f"true works with {', '.join(RLHF_TYPES)}, sft and pt",
        )
    if not is_megatron(args):
        if (on("sequence_parallel_size") or 1) > 1:
            raise refused(
                "sequence_parallel_size",
                "--sequence_parallel_size above 1 has a sampler of its own in `swift`; use `megatron sft "
                "--context_parallel_size N --sharded_lazy true`, or leave it out",
            )
        if on("use_flash_ckpt"):
            raise refused(
                "use_flash_ckpt",
                "--use_flash_ckpt true saves in another process, so nothing tells when a position is durable: leave "
                "it out",
            )
        if on("auto_find_batch_size"):
            raise refused(
                "auto_find_batch_size",
                "--auto_find_batch_size true changes the batch size in mid-run, and with it which sample comes next: "
                "leave it out",
            )
        if on("ignore_data_skip") and on("resume_from_checkpoint") and not on("resume_only_model"):
            raise refused(
                "ignore_data_skip",
                "--ignore_data_skip true would train samples again that the checkpoint has seen: leave it out, or "
                "start anew from the weights with --resume_only_model true --ignore_data_skip true",
            )


def check_directory(directory: str) -> None:
    """Refuses a directory that holds other things than a stream; one that is empty or not there may yet become one.

    Raises:
        SettingsRefused: naming some of what is there.
    """
    try:
        found = other_files(list_names(stream_path(directory)))
    except FileNotFoundError:
        return
    except OSError:
        if is_url(directory):
            raise
        return
    if found:
        raise refused(
            "dataset",
            f"--dataset {directory}: there is no stream in it, but other files ({found}). A stream has files named "
            f"chunk_00000.jsonl and so on; `lazyshard-producer run --source FILES --out STREAM --samples-per-chunk "
            f"1000` makes one",
        )


def check_own(args: Any) -> None:
    """Refuses what cannot be, by itself or with the arguments that bear on it.

    Raises:
        SettingsRefused: with the reason and the way out.
    """
    wait, timeout = args.sharded_lazy_max_wait, getattr(args, "ddp_timeout", None)
    if not wait > 0:
        raise refused("sharded_lazy_max_wait", f"--sharded_lazy_max_wait is a number of seconds above 0, got {wait}")
    if timeout is not None and wait + _COLLECTIVE_SLACK_S > timeout:
        raise refused(
            "sharded_lazy_max_wait",
            f"--sharded_lazy_max_wait {wait:g} must end at least {_COLLECTIVE_SLACK_S:g} s before --ddp_timeout "
            f"{timeout}, or a collective times out first and hides the reason: raise --ddp_timeout or wait less",
        )
    window = args.sharded_lazy_shuffle_window
    if window is not None and window < 0:
        raise refused(
            "sharded_lazy_shuffle_window",
            f"--sharded_lazy_shuffle_window is a number of chunks, 0 for none, got {window}",
        )
    if window and not getattr(args, "train_dataloader_shuffle", True):
        raise refused(
            "sharded_lazy_shuffle_window",
            f"--sharded_lazy_shuffle_window {window} shuffles, --train_dataloader_shuffle false does not: leave out "
            f"one of them",
        )
    distance = args.sharded_lazy_shuffle_distance
    if distance is not None:
        _check_distance(distance, window, getattr(args, "train_dataloader_shuffle", True), len(args.dataset))
    parse_unit(args.sharded_lazy_unit)
    check_grouping(args, is_megatron(args))
    size = args.sharded_lazy_samples_per_chunk
    if size is not None and size < 1:
        raise refused(
            "sharded_lazy_samples_per_chunk", f"--sharded_lazy_samples_per_chunk is a number from 1, got {size}"
        )
    if args.sharded_lazy_consumer is not None:
        try:
            check_consumer(args.sharded_lazy_consumer)
        except ValueError as cause:
            raise refused(
                "sharded_lazy_consumer", f"--sharded_lazy_consumer: {cause}; give another, or none"
            ) from cause
    _check_encode_cache(args.sharded_lazy_encode_cache, args.sharded_lazy_encode_cache_size)
    if args.sharded_lazy_skip is not None:
        try:
            parse_skips(args.sharded_lazy_skip)
        except ValueError as cause:
            raise refused("sharded_lazy_skip", f"--sharded_lazy_skip: {cause}") from cause
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


def _check_distance(distance: int, window: int | None, shuffle: bool, streams: int) -> None:
    """Refuses what is no distance, and what contradicts it among the arguments.

    Raises:
        SettingsRefused: with the way out.
    """
    why = None
    if distance < 1:
        why = "a distance is a number of samples from 1; --sharded_lazy_shuffle_window 0 keeps the order of the stream"
    elif window is not None:
        why = f"it chooses the window, and --sharded_lazy_shuffle_window {window} is one: leave out one of them"
    elif not shuffle:
        why = "it shuffles, --train_dataloader_shuffle false does not: leave out one of them"
    elif streams > 1:
        why = (
            "it is one of neighbours in one stream, and --dataset has several, each with chunks of its own size: give "
            "--sharded_lazy_shuffle_window, which is in chunks of each"
        )
    if why is not None:
        raise SettingsRefused(f"--{DISTANCE} {distance}: {why}", argument=DISTANCE)


def check_grouping(args: Any, megatron: bool) -> None:
    """Refuses what cannot work together with ``--group_by_length true``, if that is given.

    Args:
        args: the parsed arguments.
        megatron: whether they are those of a `megatron` command.

    Raises:
        SettingsRefused: with the way out.
    """
    if not groups_by_length(args):
        return
    if len(args.dataset) > 1:
        raise grouping_refused(
            "it is for one stream, and --dataset has several: leave it out, or train one after the other"
        )
    if getattr(args, "packing", False):
        raise grouping_refused("packs are all of about one length already: leave it out")
    if megatron and getattr(args, "padding_free", False):
        raise grouping_refused(
            "with --padding_free true, which is Megatron-SWIFT's default, nothing is padded, so nothing is won by it: "
            "leave it out, or give --padding_free false"
        )
    if not getattr(args, "train_dataloader_shuffle", True):
        raise grouping_refused("it shuffles, --train_dataloader_shuffle false does not: leave out one of them")
    for name in _OF_ORDERS:
        value = getattr(args, f"sharded_lazy_{name}")
        if value is not None:
            raise grouping_refused(
                f"the order is that of ms-swift's sampler over the whole stream, and --sharded_lazy_{name} {value} is "
                f"for an order of lazyshard's: leave out one of them"
            )
