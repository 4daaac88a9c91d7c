"""The arguments: adds them to ms-swift's `DataArguments`, from which all of its commands inherit, and checks them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from fractions import Fraction
from types import ModuleType
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args, get_type_hints

from lazyshard.errors import StreamMissing
from lazyshard.format.records import MANIFEST, parse_chunk_name
from lazyshard.format.state import check_consumer
from lazyshard.part import MOST_SHARES
from lazyshard.plan.deal import UNIT_NAMES, check_field
from lazyshard.store.files import check_place, is_url, stream_name
from lazyshard.stream.listing import other_files
from lazyshard_swift.errors import install_exits, refused
from lazyshard_swift.ms_swift import caution, is_megatron, notice, release, version

OnEnd = Literal["stop", "repeat"]

# Types whose trainers take rows, not encoded samples, and train what they draw in several micro batches.
TAKE_ROWS: Final = ("gkd", "grpo")
STORED: Final = "rows"  # As --teacher_model_server: the rows hold the teacher's outputs
_TRAINING: Final = {"SftArguments", "TrainArguments", "MegatronSftArguments", "MegatronTrainArguments"}

_COLLECTIVE_SLACK_S: Final = 60.0  # Time for a rank that gives up to report it before its peers' collectives time out

_FILES: Final = (".jsonl", ".json", ".csv", ".txt", ".parquet", ".arrow")  # which ms-swift reads

_Problems: TypeAlias = Iterator[tuple[str, str]]
_Given: TypeAlias = Callable[[str], Any]
"""`_Given` returns the value of an argument by its name; `_Problems` are names and what follows them in the message."""


class _Ours:
    """The added arguments; the paragraphs are their help.

    sharded_lazy: Read --dataset as a lazyshard stream directory: every data-parallel rank reads only its own chunks,
    while they are still being produced, each sample exactly once. Several streams, and ordinary data sets, are blended
    by --interleave_prob. STREAM#N are the first N samples.

    sharded_lazy_samples_per_chunk: Rows of every chunk file. Required for directories that another program fills, which
    have no stream.json; otherwise checked against stream.json.

    sharded_lazy_max_wait: Maximum time to wait for data, in seconds; then every rank exits with exit code 75.

    sharded_lazy_shuffle_window: Number of chunks of a rank that are shuffled together. Default: 2 while the stream is
    being produced, 8 once it has ended, 0 (in order) with --train_dataloader_shuffle false. A wider window mixes better
    and must be published before it can be read.

    sharded_lazy_shuffle_distance: Instead of --sharded_lazy_shuffle_window, the average distance at which two
    neighbouring samples of the stream are drawn, in steps of one sample of a data-parallel rank. The window is three
    times as many samples, in whole chunks.

    sharded_lazy_unit: Unit dealt to the ranks in turn: chunk, batch (a micro batch), sample, a number of samples, or
    auto: chunks if there is a full one for every rank, else batches. Default: chunk; a run that continues from a
    checkpoint keeps its unit. Units smaller than a chunk are for streams with fewer chunks than ranks.

    sharded_lazy_consumer: Name of this run's cursor in STREAM/cursors, which reports to the producer what is safely
    trained. Default: derived from the output directory.

    sharded_lazy_on_bad_sample: How to handle a row that cannot be read or encoded: substitute trains another row of its
    chunk and logs it, raise stops. Default: substitute, with --strict true raise.

    sharded_lazy_on_end: What to do if the stream ends before --train_iters or --max_steps: stop all ranks at the last
    whole global batch, with a checkpoint, or repeat: continue with the next epoch.

    sharded_lazy_skip: What to exclude from training from now on, as half-open ranges: 'samples 120:180, chunks 7:8,
    steps 41:61'. Steps 41:61 are the steps between checkpoint-40 and checkpoint-60, and need a checkpoint to continue
    from. Checkpoints keep the exclusion; repeating the option excludes nothing twice.

    sharded_lazy_encode_cache: Directory of this node, on its disk or in /dev/shm, that caches encoded samples of raw
    streams: each row is then encoded once for all model-parallel ranks and workers of the node, for later epochs and
    for restarts. Not for templates whose encoding of a row varies from call to call.

    sharded_lazy_encode_cache_size: Maximum size of --sharded_lazy_encode_cache, such as 20GB or 512MiB; the least
    recently used chunks are evicted first. Default: 16GiB.

    sharded_lazy_take_over: Take over the cursor in STREAM/cursors although another run of the same name still holds it;
    the other run can then no longer write it. Without it the second run is refused.
    """

    sharded_lazy: bool = False
    sharded_lazy_samples_per_chunk: int | None = None
    sharded_lazy_max_wait: float = 600.0
    sharded_lazy_shuffle_window: int | None = None
    sharded_lazy_shuffle_distance: int | None = None
    sharded_lazy_unit: str | None = None
    sharded_lazy_consumer: str | None = None
    sharded_lazy_on_bad_sample: Literal["substitute", "raise"] | None = None
    sharded_lazy_on_end: OnEnd = "stop"
    sharded_lazy_skip: str | None = None
    sharded_lazy_encode_cache: str | None = None
    sharded_lazy_encode_cache_size: str | None = None
    sharded_lazy_take_over: bool = False


def extend(module: ModuleType) -> None:
    """Replaces `DataArguments` by a subclass with the added fields.

    The original cannot be made a dataclass again in place: its default factories are gone once the first decorator has
    run. `base_args` imports the name after this, so all argument classes inherit from the subclass.
    """
    original = module.DataArguments
    # A reload of ms-swift's module makes a new class; an import of it elsewhere must not add a second subclass.
    if "sharded_lazy" in {known.name for known in fields(original)}:
        return

    def __post_init__(self: Any) -> None:
        check(self)
        original.__post_init__(self)

    # Pickles and messages use the name of ms-swift's class.
    own: dict[str, Any] = {name: getattr(original, name) for name in ("__doc__", "__module__", "__qualname__")}
    own |= {"__post_init__": __post_init__, "__annotations__": get_type_hints(_Ours)}
    # Without docstrings (python -OO) there is no help.
    texts = dict(" ".join(text.split()).split(": ", 1) for text in (_Ours.__doc__ or "").split("\n\n")[1:])
    for name in own["__annotations__"]:
        own[name] = field(default=getattr(_Ours, name), metadata={"help": texts.get(name, "")})
    module.DataArguments = dataclass(type(original.__name__, (original,), own))  # type: ignore[attr-defined]


def check(args: Any) -> None:
    """Checks the arguments of a command before ms-swift does, and normalises those of a stream."""
    names = [args.dataset] if isinstance(args.dataset, str) else args.dataset
    if not args.sharded_lazy:
        for name in (one for one in names if os.path.exists(os.path.join(one, MANIFEST))):
            caution(f"--dataset {name} is a lazyshard stream, but --sharded_lazy true is missing: add it")
        return
    if not any(kind.__name__ in _TRAINING for kind in type(args).__mro__):
        notice("--sharded_lazy only applies to training commands; it is ignored here")
        args.sharded_lazy = False
        return
    install_exits()
    args.dataset = [os.path.expanduser(name) for name in names]
    check_combinations(args)
    # As ms-swift does with its own paths: args.json then records what was read, wherever the command was started.
    args.dataset = [_absolute(name) for name in args.dataset]
    if validation := validation_streams(vars(args).get):
        args.val_dataset = [stream_name(name) for name in validation]


def first_of(name: str) -> tuple[str, int | None]:
    """Splits ``STREAM#N`` into the stream and N; without a number N is None.

    >>> first_of("s3://bucket/chats#1000"), first_of("chats")
    (('s3://bucket/chats', 1000), ('chats', None))
    """
    match = None if os.path.exists(name) else re.fullmatch(r"(.+)#([1-9]\d{0,17})", name)
    return (name, None) if match is None else (match[1], int(match[2]))


def place_of(name: str) -> str:
    """Returns the path, or the name in a hub, of an ordinary data set that ms-swift knows as ``PLACE:SUBSET#N``."""
    whole = re.sub(r"#\d+$", "", name)
    return next((one for one in (name, whole) if os.path.exists(one)), re.sub(r"(?<!:):(?!:).*", "", whole))


def is_ordinary(name: str) -> bool:
    """Returns whether ms-swift loads an entry: a file, a directory of files, or a data set of a hub.

    ``a/b`` is of a hub if no stream can appear there, since there is no directory ``a``.
    """
    place = place_of(name)
    # A stream's directory may hold very many files: not listed if the manifest is there.
    if is_url(name) or os.path.exists(os.path.join(name, MANIFEST)):
        return False
    if os.path.isdir(place):
        # Hidden files may be those of a stream's producer, or of a hub's client.
        return bool(other_files(one for one in os.listdir(place) if not one.startswith(".")))
    if os.path.isfile(place) or place.endswith(_FILES) or name.startswith(("hf::", "ms::")):
        return True
    return re.fullmatch(r"[\w.-]+/[\w.-]+", place) is not None and not os.path.isdir(os.path.dirname(place))


def _absolute(name: str) -> str:
    # The name of a data set of a hub is no path.
    return name if is_ordinary(name) and not os.path.exists(place_of(name)) else stream_name(name)


def validation_streams(given: _Given) -> list[str]:
    """Returns which of the names of ``--val_dataset`` are streams: URLs, and directories with a stream.json."""
    return [name for name in _validation(given) if is_url(name) or os.path.exists(os.path.join(name, MANIFEST))]


def _validation(given: _Given) -> list[str]:
    names = given("val_dataset") or []
    return [os.path.expanduser(name) for name in ([names] if isinstance(names, str) else names)]


def shares_of(given: _Given) -> tuple[int, int] | None:
    """Returns the shares of training and validation in ``--split_dataset_ratio``; None if nothing is split."""
    ratio = given("split_dataset_ratio")
    # ms-swift itself sets it to 0 later if there is other data.
    if not ratio or given("val_dataset"):
        return None
    share = Fraction(str(ratio)).limit_denominator(MOST_SHARES)
    return share.denominator - share.numerator, share.numerator


def check_combinations(args: Any) -> None:
    """Refuses combinations that cannot work, before anything is loaded."""
    for part in (_of_dataset, _of_data, _of_validation, _of_order, _of_values):
        for argument, why in part(vars(args).get):
            raise refused(argument, why)


def _of_dataset(given: _Given) -> _Problems:
    names = list(given("dataset") or [])
    if not any(names):
        yield "dataset", "names no stream: --sharded_lazy true takes stream directories and ordinary data sets"
    if len({_absolute(name if is_ordinary(name) else first_of(name)[0]) for name in names}) != len(names):
        yield "dataset", f"{' '.join(names)}: a stream is given twice; give it once, with the sum of its weights"
    for name in names:
        if not name or "\0" in name:
            yield "dataset", "has an empty name or a name with a NUL character: give the paths of stream directories"
        if is_ordinary(name):
            if (place := place_of(name)).endswith(_FILES) and not os.path.exists(place):
                yield "dataset", f"{name}: there is no such file"
            continue
        directory, _ = first_of(name)
        if "#" in os.path.basename(directory) and (is_url(directory) or not os.path.isdir(directory)):
            yield "dataset", f"{name}: expected STREAM#N for its first N samples, with N from 1 on"
        try:
            check_place(directory)
        except StreamMissing as missing:
            yield "dataset", str(missing)


def _of_data(given: _Given) -> _Problems:
    """Yields conflicts with ms-swift's other options for data."""
    kind = given("rlhf_type")
    streams, weights = len(given("dataset") or []), len(given("interleave_prob") or [])
    if given("streaming"):
        yield "streaming", "true makes rank 0 read everything, --sharded_lazy true each rank its chunks: omit it"
    if given("cached_dataset") or given("cached_val_dataset"):
        yield "cached_dataset", "is encoded in advance, --sharded_lazy true reads a stream: omit it"
    if given("packing") and kind is not None:
        yield "packing", f"true with --rlhf_type {kind}: packs of a stream are for sft and pt; omit it"
    if given("packing") and given("packing_strategy") not in (None, "binpack"):
        yield "packing_strategy", f"{given('packing_strategy')} is for ms-swift's own packs: omit it"
    if given("truncation_strategy") == "split":
        yield "truncation_strategy", "split makes several samples of a row: split rows in the producer instead"
    if weights and weights != streams:
        yield "interleave_prob", f"has {weights} weights for {streams} streams of --dataset: give one for each"
    if streams > 1 and given("sharded_lazy_skip"):
        yield "sharded_lazy_skip", "names samples of one stream, --dataset has several: omit it"
    yield from _of_rlhf(given, kind)
    if given("micro_batch_size") is not None:
        return
    # Options of `swift` that `megatron` does not have.
    if (given("sequence_parallel_size") or 1) > 1:
        yield "sequence_parallel_size", "above 1 has its own sampler: use `megatron sft --context_parallel_size N`"
    if given("use_flash_ckpt"):
        yield "use_flash_ckpt", "true does not report when a checkpoint is durable: omit it"
    if given("auto_find_batch_size"):
        yield "auto_find_batch_size", "true changes the batch size, and so the next samples, during the run: omit it"
    if given("ignore_data_skip") and given("resume_from_checkpoint") and not given("resume_only_model"):
        yield "ignore_data_skip", "true would train the same samples again: omit it, or add --resume_only_model"


def _of_rlhf(given: _Given, kind: str | None) -> _Problems:
    if kind == "ppo":
        yield "rlhf_type", "ppo shuffles the whole set in TRL's own loop, and cannot resume: use grpo"
    if kind == "grpo" and given("micro_batch_size") is not None:
        yield "rlhf_type", "grpo of `megatron` counts completions, not samples, in its checkpoints: use `swift rlhf`"
    if kind not in TAKE_ROWS:
        return
    if (release(version()) or (4, 6)) < (4, 6):
        yield "rlhf_type", f"{kind} needs ms-swift 4.6 or later, {version()} is installed"
    for name, why in (
        ("dynamic_sample", "replaces prompts by others from anywhere in the data"),
        ("async_generate", "draws prompts that a resume would lose"),
        ("group_by_length", f"needs encoded samples, --rlhf_type {kind} takes rows"),
        ("sharded_lazy_encode_cache", f"is for encoded samples, --rlhf_type {kind} takes rows"),
    ):
        if given(name):
            yield name, f"{given(name)} {why}: omit it"
    if given("teacher_model_server") == STORED and (kind != "gkd" or given("lmbda")):
        yield "teacher_model_server", f"{STORED}: they hold no outputs for what is generated: use gkd with --lmbda 0"


def _of_validation(given: _Given) -> _Problems:
    names, streams = _validation(given), validation_streams(given)
    if streams and len(streams) < len(names):
        yield "val_dataset", f"names streams, such as {streams[0]}, and other data: give either"
    for name in () if streams else names:
        if os.path.isdir(name) and any(map(parse_chunk_name, os.listdir(name))):
            yield "val_dataset", f"{name} is a stream without stream.json: give {name}/chunk_*.jsonl"
    ratio = 0 if names else given("split_dataset_ratio") or 0
    if ratio and not (0 < ratio < 1 and all(shares_of(given) or ())):
        yield "split_dataset_ratio", f"must be a number from 0.00001 to 0.99999, got {ratio}"
    for name in ("group_by_length", "data_sharding") if ratio else ():
        if given(name):
            yield name, "true draws all samples: omit it, or give --val_dataset instead of --split_dataset_ratio"
    if (ratio or streams) and given("predict_with_generate"):
        yield "predict_with_generate", "true evaluates rows that are not encoded: give files by --val_dataset"


def _of_order(given: _Given) -> _Problems:
    window, distance, grouped = "sharded_lazy_shuffle_window", "sharded_lazy_shuffle_distance", "group_by_length"
    for name in (window, distance, grouped) if given("train_dataloader_shuffle") is False else ():
        if given(name):
            yield name, f"{given(name)} shuffles, --train_dataloader_shuffle false does not: omit one of them"
    if given(distance) is not None and given(window) is not None:
        yield distance, f"sets the window, and --{window} {given(window)} sets it too: omit one of them"
    if given(distance) is not None and len(given("dataset")) > 1:
        yield distance, f"is for one stream: use --{window}, which is in chunks of each"
    if not given(grouped):
        return
    if len(given("dataset")) > 1:
        yield grouped, "true: it is for one stream: omit it, or train one stream after the other"
    if given("packing"):
        yield grouped, "true: packs all have about the same length already: omit it"
    # Megatron's default.
    if given("micro_batch_size") is not None and given("padding_free"):
        yield grouped, "true: with --padding_free true nothing is padded: omit it, or use --padding_free false"
    for name in (window, distance, "sharded_lazy_unit", "sharded_lazy_skip"):
        if given(name) is not None:
            yield grouped, f"true: ms-swift's sampler sets the order, --{name} does not apply: omit one of them"


def _of_values(given: _Given) -> _Problems:
    from lazyshard.data.settings import BadRows, EncodeCache

    directory = given("sharded_lazy_encode_cache")
    if directory is not None and (not directory or "\0" in directory):
        yield "sharded_lazy_encode_cache", "must be a directory of this node"
    wait, timeout = given("sharded_lazy_max_wait"), given("ddp_timeout")
    if not wait > 0:
        yield "sharded_lazy_max_wait", f"must be a number of seconds above 0, got {wait}"
    if timeout is not None and wait + _COLLECTIVE_SLACK_S > timeout:
        yield "sharded_lazy_max_wait", f"{wait:g} must end {_COLLECTIVE_SLACK_S:g} s before --ddp_timeout {timeout}"
    if (on_end := given("sharded_lazy_on_end")) not in get_args(OnEnd):
        yield "sharded_lazy_on_end", f"must be one of {', '.join(get_args(OnEnd))}, got {on_end!r}"
    checks: dict[str, Callable[[Any], object]] = {"consumer": check_consumer, "skip": parse_skips, "unit": parse_unit}
    checks |= {"encode_cache_size": lambda size: EncodeCache(directory, size), "on_bad_sample": BadRows}
    checks |= dict.fromkeys(("shuffle_distance", "samples_per_chunk"), lambda count: check_field("it", count, 1))
    checks["shuffle_window"] = lambda count: check_field("it", count, 0)
    for name, check_value in checks.items():
        value = given(f"sharded_lazy_{name}")
        try:
            if value is not None:
                check_value(value)
        except ValueError as cause:
            yield f"sharded_lazy_{name}", f"{value!r}: {cause}"


def progress_of(args: Any, live: bool) -> tuple[int | None, float | None]:
    """Returns the steps or the epochs of a run, the other as None: as ms-swift, but always steps on a live stream."""
    megatron, epochs = is_megatron(args), args.num_train_epochs
    option = "train_iters" if megatron else "max_steps"
    steps = getattr(args, option)
    steps = steps if steps and steps > 0 else None
    if live:
        if steps is None:
            raise refused(option, "N is needed: an epoch of a stream that is still being produced has no length yet")
        for name in ("save_strategy", "eval_strategy"):
            if str(getattr(args, name, "")).rsplit(".", 1)[-1].lower() == "epoch":
                raise refused(name, f"epoch: the stream is still being produced: use --{name} steps")
        return steps, None
    if megatron and epochs is None and steps is None:
        raise refused(option, "N or --num_train_epochs N is needed: set the length of the training")
    # As in ms-swift: in Megatron epochs override iterations, in the Hugging Face trainer steps override epochs.
    by_epochs = epochs is not None if megatron else steps is None
    return (None, epochs) if by_epochs else (steps, None)


class Rollout(NamedTuple):
    """How a trainer that takes rows uses the samples that it draws at once: for whole steps, or several times a step.

    Attributes:
        copies: completions of each sample.
        batches: micro batches of the trainer for which they are used, in all iterations.
        steps: steps for which they are used.
    """

    copies: int = 1
    batches: int = 1
    steps: int = 1


ONCE: Final = Rollout()


def rollout_of(args: Any) -> Rollout:
    """Returns the rollout of the Hugging Face trainer."""
    if is_megatron(args) or getattr(args, "rlhf_type", None) not in TAKE_ROWS:
        return ONCE
    trainer, accumulation = args.training_args, args.training_args.gradient_accumulation_steps
    copies, iterations = (trainer.num_generations, trainer.num_iterations) if args.rlhf_type == "grpo" else (1, 1)
    batches = trainer.steps_per_generation * iterations
    if batches % accumulation and accumulation % batches:
        both = f"{trainer.steps_per_generation} with {iterations} iterations, and {accumulation} micro batches a step"
        raise refused("steps_per_generation", f"{both}: one must divide the other")
    return Rollout(copies, batches, max(1, batches // accumulation))


def batch_sizes(args: Any, dp_size: int) -> tuple[int, int]:
    """Returns the samples of one rank in a micro batch, or rollout, and the samples of all ranks in a step."""
    if is_megatron(args):
        if getattr(args, "rlhf_type", None) in TAKE_ROWS and args.steps_per_generation > 1:
            raise refused("steps_per_generation", f"{args.steps_per_generation} fetches samples of later steps: use 1")
        return args.micro_batch_size, args.global_batch_size
    # If no accumulation is given, ms-swift chooses it, and stores it only in the trainer's own arguments.
    trainer = args.training_args
    batch_size, rollout = trainer.per_device_train_batch_size * max(1, trainer.n_gpu), rollout_of(args)
    if rollout is not ONCE:
        completions = batch_size * trainer.steps_per_generation
        if completions % rollout.copies:
            why = f"{rollout.copies} does not divide the {completions} completions of a rank, which draws its prompts"
            raise refused("num_generations", f"{why}: use a multiple as micro batch or as --steps_per_generation")
        batch_size = completions // rollout.copies
    return batch_size, batch_size * max(1, trainer.gradient_accumulation_steps // rollout.batches) * dp_size


def parse_skips(text: str) -> dict[str, tuple[str, int, int]]:
    """Parses ``--sharded_lazy_skip``: kind, start and stop of each half-open range, by its text.

    >>> parse_skips("samples 120:180, steps  41:61")
    {'samples 120:180': ('samples', 120, 180), 'steps 41:61': ('steps', 41, 61)}
    """
    found = {}
    for item in map(str.strip, text.split(",")):
        match = re.fullmatch(r"(samples|chunks|steps)\s+(\d{1,18}):(\d{1,18})", item)
        if match is None or int(match[2]) >= int(match[3]):
            raise ValueError(f'expected FIRST:STOP, such as "samples 120:180, chunks 7:8, steps 41:61", got {item!r}')
        kind, start, stop = match[1], int(match[2]), int(match[3])
        found[f"{kind} {start}:{stop}"] = kind, start, stop
    return found


def parse_unit(given: str | int | None) -> str | int | None:
    """Parses ``--sharded_lazy_unit``: a name or a number of samples."""
    if given is None or given in UNIT_NAMES:
        return given
    # At most as many digits as a count can have; int() also accepts signs and other digits.
    if re.fullmatch(r"[1-9][0-9]{0,17}", str(given)):
        return int(given)
    raise ValueError(f"expected one of {', '.join(UNIT_NAMES)} or a number of samples of at least 1")
