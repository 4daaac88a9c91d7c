"""The data set's way through ms-swift's pipeline: made instead of loaded, and left alone by what follows.

Validation data, and everything without the flag, take ms-swift's own way.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from lazyshard_swift import ms_swift
from lazyshard_swift.errors import refused
from lazyshard_swift.ms_swift import Maker, for_streams, is_stream, wrap


def extend(module: ModuleType) -> None:
    """Wraps four methods of `SwiftSft`, from which the pipelines of pre-training, RLHF and Megatron inherit."""
    makers: dict[str, Maker] = {"_get_dataset": _get_dataset, "_post_process_datasets": _post_process_datasets}
    makers |= {"_encode_dataset": for_streams(_encode_dataset), "_show_dataset": for_streams(_show_dataset)}
    wrap(module.SwiftSft, makers)


def _get_dataset(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_dataset(self: Any, *rest: Any, **options: Any) -> Any:
        args = self.args
        if not getattr(args, "sharded_lazy", False):
            return original(self, *rest, **options)
        from lazyshard_swift.opening import open_train_stream

        _check_hooks(args)
        stream = open_train_stream(args, self.template)
        # With no training data to load, ms-swift loads the validation data alone.
        names, args.dataset = args.dataset, []
        try:
            _, validation = original(self, *rest, **options)
        finally:
            args.dataset = names
        return stream, validation

    return get_dataset


def _encode_dataset(original: Any, self: Any, train_dataset: Any, *rest: Any, **options: Any) -> Any:
    return [train_dataset, original(self, None, *rest, **options)[1]]


def _post_process_datasets(original: Callable[..., Any]) -> Callable[..., Any]:
    def post_process_datasets(self: Any, datasets: Any, *rest: Any, **options: Any) -> Any:
        train_dataset, val_dataset = datasets
        if not is_stream(train_dataset):
            return original(self, datasets, *rest, **options)
        return [train_dataset, original(self, [None, val_dataset], *rest, **options)[1]]

    return post_process_datasets


def _show_dataset(original: Any, pipeline: Any, stream: Any, val_dataset: Any, *rest: Any, **options: Any) -> None:
    """Logs the first sample of a stream, if it is there already; ms-swift would then count the tokens of all."""
    from lazyshard_swift.parallel import is_first, notice

    if is_first():
        sample = stream.first_sample()
        if sample is None:
            notice("nothing of the stream is there to be shown yet")
        else:
            pipeline.template.print_inputs(sample[0] if isinstance(sample, list) else sample)
    pipeline.train_msg["train_dataset"] = repr(stream)
    counted = not pipeline.args.lazy_tokenize and not getattr(pipeline.args, "predict_with_generate", False)
    if val_dataset is not None and len(val_dataset) and counted:
        pipeline.train_msg["val_dataset"] = pipeline._stat_dataset(val_dataset)


def _check_hooks(args: Any) -> None:
    """Refuses to train with half of the integration: the trainer would deal the samples in an order of its own."""
    trainer = "swift.megatron.trainers.base" if ms_swift.is_megatron(args) else "swift.trainers.mixin"
    # ms-swift imports its trainers late.
    importlib.import_module(trainer)
    reasons = [outcome.reason for outcome in ms_swift.outcomes.values() if outcome.reason]
    if trainer not in ms_swift.outcomes:
        reasons.append(f"{trainer} was imported before lazyshard could extend it")
    if reasons:
        why = f"cannot work with this ms-swift: {'; '.join(reasons)}. Supported is {ms_swift.SUPPORTED}"
        raise refused("sharded_lazy", f"--sharded_lazy true {why}; `lazyshard doctor swift` shows what is missing")
