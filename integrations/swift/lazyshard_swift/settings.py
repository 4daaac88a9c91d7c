"""Which combinations of arguments work, and what follows from them. Decisions only: no files, no ms-swift, no torch."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args

from lazyshard.format.byte_size import parse_size
from lazyshard.format.cursor import check_consumer
from lazyshard.format.kept_sample import LEAST_CACHE_BYTES
from lazyshard.plan import UNIT_NAMES
from lazyshard.storage.files import list_names
from lazyshard.storage.urls import is_url, stream_name, stream_path
from lazyshard_swift.distance import check_alone
from lazyshard_swift.errors import SettingsRefused
from lazyshard_swift.grouping import check_alone as check_grouping
from lazyshard_swift.skipping import parse_skips

OnEnd = Literal["stop", "repeat"]
OnBadSample = Literal["substitute", "raise"]

LIVE_WINDOW: Final = 2
"""Chunks of a rank that are shuffled together while the stream is live: training can start once ranks * 2 are there."""

ENDED_WINDOW: Final = 8
"""The same once it has ended: nothing has to be waited for, and 8 chunks are cheap to keep open."""

RLHF_TYPES: Final = ("dpo", "orpo", "simpo", "cpo", "rm")
"""Those that encode in advance, read each sample once, and take their batches from the ordinary data loader."""

_VERSIONED: Final = re.compile(r"v\d+-\d{8}-\d{6}")
"""The last folder that ms-swift adds to an output directory with ``--add_version true``."""

_COLLECTIVE_SLACK_S: Final = 60.0
"""A rank that gives up waiting needs a moment to say so before its peers' collectives time out."""


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


def check(args: Any) -> None:
    """Refuses what cannot work, before anything is loaded.

    Args:
        args: the parsed arguments of a command that trains, with ``sharded_lazy`` true.

    Raises:
        SettingsRefused: with the reason and the way out.
    """
    _check_dataset(list(getattr(args, "dataset", None) or []))
    _check_others(args)
    _check_own(args)


def _check_dataset(names: list[str]) -> None:
    if not any(names):
        raise _refused("dataset", "--sharded_lazy true takes stream directories as --dataset, none was given")
    if len(set(map(stream_name, names))) != len(names):
        raise _refused(
            "dataset",
            f"--dataset {' '.join(names)}: one stream is given twice; give it once, with the sum of its weights in "
            f"--interleave_prob",
        )
    for name in names:
        _check_name(name)


def _check_name(name: str) -> None:
    if not name:
        raise _refused("dataset", "--dataset has an empty name in it: give the paths of stream directories")
    if "\0" in name:
        raise _refused("dataset", "--dataset has a NUL character in it: give the path of a stream directory")
    if "#" in os.path.basename(name) and (is_url(name) or not os.path.isdir(name)):
        raise _refused(
            "dataset",
            f"--dataset {name}: '#' takes a part of an ordinary data set; with --sharded_lazy true give the stream "
            f"directory alone, and --train_iters or --max_steps for how much of it to train",
        )
    if os.path.isfile(name):
        raise _refused(
            "dataset",
            f"--dataset {name} is a file, --sharded_lazy true reads a stream directory. Make one of it with "
            f"`lazyshard-producer run --source {name} --out STREAM --samples-per-chunk 1000`, or leave out "
            f"--sharded_lazy",
        )


def _check_others(args: Any) -> None:
    def on(name: str) -> Any:
        return getattr(args, name, None)

    if on("streaming"):
        raise _refused(
            "streaming",
            "--streaming true has rank 0 read and scatter everything, --sharded_lazy true has every rank read its own "
            "chunks: leave out --streaming",
        )
    if on("cached_dataset") or on("cached_val_dataset"):
        raise _refused(
            "cached_dataset",
            "--cached_dataset holds data that were encoded in advance, --sharded_lazy true reads a stream: leave out "
            "one of them",
        )
    if on("packing") and on("rlhf_type") is not None:
        raise _refused(
            "packing",
            f"--packing true with --rlhf_type {on('rlhf_type')}: packs of a stream are for sft and pt; leave it out",
        )
    if on("truncation_strategy") == "split":
        raise _refused(
            "truncation_strategy",
            "--truncation_strategy split makes several samples of one row, so the row would no longer be one sample: "
            "split long rows where they are produced, or choose delete, left or right",
        )
    if (on("split_dataset_ratio") or 0) > 0:
        raise _refused(
            "split_dataset_ratio",
            f"--split_dataset_ratio {on('split_dataset_ratio')} takes validation samples out of the training data, "
            f"whose end a stream does not know: give validation data of their own with --val_dataset FILE",
        )
    names, weights = list(on("dataset") or []), on("interleave_prob")
    if weights and len(weights) != len(names):
        raise _refused(
            "interleave_prob",
            f"--interleave_prob has {len(weights)} weights for {len(names)} streams of --dataset: give one for each",
        )
    if len(names) > 1 and on("sharded_lazy_skip"):
        raise _refused(
            "sharded_lazy_skip",
            "--sharded_lazy_skip names samples of one stream, --dataset has several: leave it out, or skip in a start "
            "on that stream alone",
        )
    kind = on("rlhf_type")
    if kind is not None and kind not in RLHF_TYPES:
        raise _refused(
            "rlhf_type",
            f"--rlhf_type {kind} does not take encoded samples from the data loader in their order; --sharded_lazy "
            f"true works with {', '.join(RLHF_TYPES)}, sft and pt",
        )
    if not is_megatron(args):
        if (on("sequence_parallel_size") or 1) > 1:
            raise _refused(
                "sequence_parallel_size",
                "--sequence_parallel_size above 1 has a sampler of its own in `swift`; use `megatron sft "
                "--context_parallel_size N --sharded_lazy true`, or leave it out",
            )
        if on("use_flash_ckpt"):
            raise _refused(
                "use_flash_ckpt",
                "--use_flash_ckpt true saves in another process, so nothing tells when a position is durable: leave "
                "it out",
            )
        if on("auto_find_batch_size"):
            raise _refused(
                "auto_find_batch_size",
                "--auto_find_batch_size true changes the batch size in mid-run, and with it which sample comes next: "
                "leave it out",
            )
        if on("ignore_data_skip") and on("resume_from_checkpoint") and not on("resume_only_model"):
            raise _refused(
                "ignore_data_skip",
                "--ignore_data_skip true would train samples again that the checkpoint has seen: leave it out, or "
                "start anew from the weights with --resume_only_model true --ignore_data_skip true",
            )


def _check_own(args: Any) -> None:
    wait, timeout = args.sharded_lazy_max_wait, getattr(args, "ddp_timeout", None)
    if not wait > 0:
        raise _refused("sharded_lazy_max_wait", f"--sharded_lazy_max_wait is a number of seconds above 0, got {wait}")
    if timeout is not None and wait + _COLLECTIVE_SLACK_S > timeout:
        raise _refused(
            "sharded_lazy_max_wait",
            f"--sharded_lazy_max_wait {wait:g} must end at least {_COLLECTIVE_SLACK_S:g} s before --ddp_timeout "
            f"{timeout}, or a collective times out first and hides the reason: raise --ddp_timeout or wait less",
        )
    window = args.sharded_lazy_shuffle_window
    if window is not None and window < 0:
        raise _refused(
            "sharded_lazy_shuffle_window",
            f"--sharded_lazy_shuffle_window is a number of chunks, 0 for none, got {window}",
        )
    if window and not getattr(args, "train_dataloader_shuffle", True):
        raise _refused(
            "sharded_lazy_shuffle_window",
            f"--sharded_lazy_shuffle_window {window} shuffles, --train_dataloader_shuffle false does not: leave out "
            f"one of them",
        )
    distance = args.sharded_lazy_shuffle_distance
    if distance is not None:
        check_alone(distance, window, getattr(args, "train_dataloader_shuffle", True), len(args.dataset))
    parse_unit(args.sharded_lazy_unit)
    check_grouping(args, is_megatron(args))
    size = args.sharded_lazy_samples_per_chunk
    if size is not None and size < 1:
        raise _refused(
            "sharded_lazy_samples_per_chunk", f"--sharded_lazy_samples_per_chunk is a number from 1, got {size}"
        )
    if args.sharded_lazy_consumer is not None:
        try:
            check_consumer(args.sharded_lazy_consumer)
        except ValueError as cause:
            raise _refused(
                "sharded_lazy_consumer", f"--sharded_lazy_consumer: {cause}; give another, or none"
            ) from cause
    _check_encode_cache(args.sharded_lazy_encode_cache, args.sharded_lazy_encode_cache_size)
    if args.sharded_lazy_skip is not None:
        try:
            parse_skips(args.sharded_lazy_skip)
        except ValueError as cause:
            raise _refused("sharded_lazy_skip", f"--sharded_lazy_skip: {cause}") from cause
    for name, choices in (("sharded_lazy_on_end", OnEnd), ("sharded_lazy_on_bad_sample", OnBadSample)):
        value = getattr(args, name)
        if value is not None and value not in get_args(choices):
            raise _refused(name, f"--{name} is one of {', '.join(get_args(choices))}, got {value!r}")


def _check_encode_cache(directory: str | None, size: str | None) -> None:
    if directory is not None and (not directory or "\0" in directory):
        raise _refused("sharded_lazy_encode_cache", "--sharded_lazy_encode_cache is a directory of this node")
    if size is None:
        return
    if directory is None:
        raise _refused(
            "sharded_lazy_encode_cache_size",
            f"--sharded_lazy_encode_cache_size {size} bounds the cache that --sharded_lazy_encode_cache DIR makes: "
            f"give both, or none",
        )
    try:
        number = parse_size(size)
    except ValueError as cause:
        raise _refused("sharded_lazy_encode_cache_size", f"--sharded_lazy_encode_cache_size: {cause}") from cause
    if number < LEAST_CACHE_BYTES:
        raise _refused(
            "sharded_lazy_encode_cache_size",
            f"--sharded_lazy_encode_cache_size is at least {LEAST_CACHE_BYTES} bytes, got {size}: less keeps no sample",
        )


def parse_unit(given: str | int | None) -> str | int | None:
    """Returns what is dealt to the ranks in turn, by name or as a number of samples; None where nothing is said.

    Args:
        given: as on the command line; a number where a configuration file has one.

    Raises:
        SettingsRefused: it is neither.
    """
    if given is None or given in UNIT_NAMES:
        return given
    # Not more digits than a count can have; int() takes signs and other digits too.
    if re.fullmatch(r"[1-9][0-9]{0,17}", str(given)):
        return int(given)
    raise _refused(
        "sharded_lazy_unit",
        f"--sharded_lazy_unit is one of {', '.join(UNIT_NAMES)} or a number of samples from 1, got {given!r}",
    )


def check_directory(directory: str) -> None:
    """Refuses a directory that holds other things than a stream; one that is empty or not there may yet become one.

    Raises:
        SettingsRefused: naming some of what is there.
    """
    try:
        names = sorted(list_names(stream_path(directory)))
    except FileNotFoundError:
        return
    except OSError:
        if is_url(directory):
            raise
        return
    if not names or any(name.startswith((".", "chunk_", "stream.", "head.json")) for name in names):
        return
    some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    raise _refused(
        "dataset",
        f"--dataset {directory}: there is no stream in it, but other files ({some}). A stream has files named "
        f"chunk_00000.jsonl and so on; `lazyshard-producer run --source FILES --out STREAM --samples-per-chunk 1000` "
        f"makes one",
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
            raise _refused(
                option[2:],
                f"the stream is still being produced, so an epoch has no length yet: say with {option} N how many "
                f"steps to train at the most. If the stream ends earlier, training stops with it, unless "
                f"--sharded_lazy_on_end repeat is given",
            )
        for name in ("save_strategy", "eval_strategy"):
            if str(getattr(args, name, "")).rsplit(".", 1)[-1].lower() == "epoch":
                raise _refused(
                    name,
                    f"--{name} epoch needs an end of the epoch, and the stream is still being produced: use "
                    f"--{name} steps",
                )
        return Progress(steps, None)
    # ms-swift: Megatron's epochs count before its iterations, in the Hugging Face trainer steps count before epochs.
    if is_megatron(args):
        if epochs is None and not steps:
            raise _refused("train_iters", "say how long to train, with --num_train_epochs N or --train_iters N")
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


def _refused(argument: str, message: str) -> SettingsRefused:
    return SettingsRefused(message, argument=argument)
