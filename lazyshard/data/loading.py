"""`load`: builds tokenizer, data sets and loader from one configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Sampler

from lazyshard.config import Source, read_config
from lazyshard.data.blended import BlendedDataset
from lazyshard.data.dataset import LazyShardedDataset
from lazyshard.data.iterable import LazyShardedStream
from lazyshard.data.rank import Stats
from lazyshard.data.run_state import StateDicts
from lazyshard.data.sequence_forms import Pack, Pad, Split
from lazyshard.data.sequences import LazyShardedSequences
from lazyshard.data.settings import BadRows, EncodeCache, Filter, Map, MessageTransform, Order, Step
from lazyshard.errors import ConfigInvalid, SkipSample
from lazyshard.lazy import named_function

if TYPE_CHECKING:
    from lazyshard.config.config import Config, DatasetConfig


class RankSampler(Sampler[int]):
    """The remaining indices of this rank in the current epoch, read again for each pass."""

    def __init__(self, dataset: LazyShardedDataset | BlendedDataset) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[int]:
        return iter(self._dataset.rank_indices)

    def __len__(self) -> int:
        return len(self._dataset.rank_indices)


class Loaded:
    """The objects of a configuration. Rank and length are resolved at the first use, as for a data set.

    Attributes:
        config: the parsed configuration.
        tokenizer: from transformers; None if the configuration has none.
        datasets: its data sets, in order.
        dataset: the only data set, or the blend of them.
        stream: the same as an iterable; None with ``form: map``; the `LazyShardedSequences` with ``sequences:``.
        loader: micro batches of this rank, the same number on every rank. A pass ends with the current epoch.
    """

    def __init__(self, config: Config, name: str, **rank: Any) -> None:
        self.config = config
        self.tokenizer: Any = None if config.tokenizer is None else _tokenizer(config.tokenizer.path, name)
        # With sequences, the sequences are dealt to the ranks instead of the rows.
        of_rows = rank if config.sequences is None else {}
        self._batch_size = config.dataloader.batch_size if config.sequences is None else 1
        self.datasets = tuple(self._open(one, of_rows) for one in config.datasets)
        self.dataset: LazyShardedDataset | BlendedDataset = self.datasets[0]
        if len(self.datasets) > 1:
            order = Order(micro_batches_per_step=config.micro_batches_per_step)
            options = config.model_dump(include={"num_samples", "stopping"})
            weighted = zip(self.datasets, (one.weight for one in config.datasets), strict=True)
            self.dataset = BlendedDataset(weighted, batch_size=self._batch_size, order=order, **options)
        self.stream: LazyShardedStream[Any] | LazyShardedSequences | None = None
        if (given := config.sequences) is not None:
            kind = {"pack": Pack, "split": Split, "pad": Pad}[given.form]
            form = kind(**given.model_dump(include={one.name for one in fields(kind)}))
            options = given.model_dump(include={"window", "seed", "at_end", "too_long"})
            options |= {"batch_size": config.dataloader.batch_size, "bad_rows": _bad_rows(given.max_error_count)}
            steps = config.micro_batches_per_step
            self.stream = LazyShardedSequences(self.dataset, form=form, micro_batches_per_step=steps, **options, **rank)
        elif config.dataloader.form == "stream":
            self.stream = LazyShardedStream(self.dataset, at_end=config.dataloader.at_end)
        self.loader: DataLoader[Any] = self._loader()

    @property
    def consumed(self) -> int:
        """Samples trained in the loaded state, over all ranks; 0 without a state, or once another epoch is set."""
        return (self.stream or self.dataset).consumed

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the following passes; see `LazyShardedDataset.set_epoch`."""
        (self.stream or self.dataset).set_epoch(epoch)

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Returns the state of the run after `consumed` samples: as `state_dict` of the data set or the stream."""
        return (self.stream or self.dataset).state_dict(consumed)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes a run, before the loader is used: as `load_state_dict` of the data set."""
        (self.stream or self.dataset).load_state_dict(state)

    def commit(self, consumed: int, *, last_epoch: bool, keep: StateDicts = (), take_over: bool = False) -> bool:
        """Commits the progress of the checkpoints for the ``consumer``: as `LazyShardedDataset.commit`."""
        return (self.stream or self.dataset).commit(consumed, last_epoch=last_epoch, keep=keep, take_over=take_over)

    def stats(self) -> tuple[Stats, ...]:
        """Returns the statistics of each data set so far; for sequences only theirs."""
        if isinstance(self.stream, LazyShardedSequences):
            return (self.stream.stats(),)
        return tuple(dataset.stats() for dataset in self.datasets)

    def _open(self, one: DatasetConfig, rank: dict[str, Any]) -> LazyShardedDataset:
        config = self.config
        of_run = config.model_dump(include={"seed", "micro_batches_per_step"})
        encode = None
        if (used := config.tokenizer) is not None:
            encode = partial(_tokenize, self.tokenizer, used.max_length, used.too_long)
        options = config.model_dump(include={"max_wait", "consumer"})
        options |= one.model_dump(include={"samples_per_chunk", "max_total_samples"})
        options |= {"num_samples": None if len(config.datasets) > 1 else config.num_samples}
        options |= {"batch_size": self._batch_size}
        of_run |= one.model_dump(include={"unit", "shuffle_window", "split", "splits"})
        groups: dict[str, Any] = {"order": Order(**of_run)}
        groups |= {"bad_rows": _bad_rows(one.max_error_count), "cache": EncodeCache(memory_bytes=one.cache_bytes)}
        calls = ((kind, call) for step in one.steps for kind, call in step if call is not None)
        steps = [_STEPS[kind](call.function, **call.model_dump(exclude={"function"})) for kind, call in calls]
        return LazyShardedDataset(one.path, encode, steps=steps, **options, **groups, **rank)

    def _loader(self) -> DataLoader[Any]:
        options = self.config.dataloader
        collate: Callable[[Any], Any] = list
        if (given := options.collate_fn) is not None:
            collate = named_function(given) if isinstance(given, str) else given
        elif self.tokenizer is not None and self.config.sequences is None:
            pad = self.tokenizer.pad_token_id
            collate = partial(_padded, (self.tokenizer.eos_token_id or 0) if pad is None else pad)
        sampler = RankSampler(self.dataset) if self.stream is None else None
        others = options.model_dump(exclude={"form", "at_end", "collate_fn"})
        return DataLoader(self.stream or self.dataset, sampler=sampler, collate_fn=collate, **others)


def load(config: Source, *, dp_rank: int | None = None, dp_size: int | None = None) -> Loaded:
    """Builds the objects of a configuration: tokenizer, data sets with steps, their weighted blend, and the loader.

    Functions named in it are imported, so a configuration must be as trusted as code; see docs/pipeline.md.

    Args:
        config: the path of a YAML file (``pip install 'lazyshard[config]'``), or a dict.
        dp_rank: this data-parallel rank. None takes it from Megatron, then from torch.distributed, at the first use.
        dp_size: number of data-parallel ranks. Pass both `dp_rank` and `dp_size`, or neither.

    Raises:
        ConfigInvalid: it has mistakes; the message lists all of them. `check_config` returns them.
        OSError: the file cannot be read.
        ImportError: pydantic, PyYAML for a file, or transformers for a tokenizer, is not installed.
        WaitTimeout, StreamMismatch, FileInvalid, StreamInvalid, ConfigInvalid, ValueError: as
            `LazyShardedDataset` and `BlendedDataset`.
    """
    checked = read_config(config)
    assert checked.config is not None
    return Loaded(checked.config, checked.name, dp_rank=dp_rank, dp_size=dp_size)


_STEPS: Final[dict[str, Callable[..., Step]]] = {"message_transform": MessageTransform, "filter_fn": Filter, "map": Map}


def _bad_rows(limit: int | None) -> BadRows:
    return BadRows("raise") if limit == 0 else BadRows(limit=limit)


def _tokenizer(path: str, name: str) -> Any:
    """Loads the tokenizer of a local directory; downloads nothing and runs no code from it."""
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as cause:
        if cause.name != "transformers":
            raise
        raise ImportError("a tokenizer needs transformers: pip install transformers") from cause
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except ImportError:
        raise
    except Exception as cause:
        text = f"cannot load a tokenizer from {path!r}: {type(cause).__name__}: {cause}"
        raise ConfigInvalid(f"{name}: tokenizer.path: {text}", file=name, count=1) from cause


def _tokenize(tokenizer: Any, max_length: int | None, too_long: str, row: dict[str, Any]) -> dict[str, Any]:
    """Makes a sample of a row: `input_ids` of its `messages`, by the chat template, otherwise of its `text`."""
    if isinstance(row.get("messages"), (list, tuple)):
        tokens = tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=True)["input_ids"]
    elif isinstance(row.get("text"), str):
        tokens = tokenizer(row["text"])["input_ids"]
    else:
        fields = ", ".join(map(repr, row))[:200]
        raise ValueError(f"expected `messages` or `text`, the row has {fields}; convert it with a message_transform")
    if max_length is not None and len(tokens) > max_length:
        if too_long == "drop":
            raise SkipSample(f"{len(tokens)} tokens, max_length is {max_length}")
        tokens = tokens[:max_length]
    return {"input_ids": list(tokens)}


def _padded(pad: int, samples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Collates samples of tokens as int64, padded to the longest.

    Labels are the tokens, and -100, which the losses of torch and transformers ignore, at padded places.
    """
    tokens = [torch.tensor(sample["input_ids"], dtype=torch.int64) for sample in samples]
    mask = pad_sequence([torch.ones_like(one) for one in tokens], batch_first=True)
    padded, labels = (pad_sequence(tokens, batch_first=True, padding_value=value) for value in (pad, -100))
    return {"input_ids": padded, "attention_mask": mask, "labels": labels}
