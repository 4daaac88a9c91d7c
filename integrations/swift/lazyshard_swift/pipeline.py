"""The data set's way through ms-swift's pipeline: made instead of loaded, and left alone by what follows.

Validation data, and everything without the flag, take ms-swift's own way.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from lazyshard_swift import hooked, ms_swift, settings
from lazyshard_swift.errors import SettingsRefused
from lazyshard_swift.hooked import wrap

_STREAM: Final = "lazyshard_swift.stream"
"""The module of our data set."""


def extend(module: ModuleType) -> None:
    """Wraps four methods of `SwiftSft`, from which the pipelines of pre-training, RLHF and Megatron inherit."""
    wrap(
        module.SwiftSft,
        {
            "_get_dataset": _get_dataset,
            "_encode_dataset": _encode_dataset,
            "_post_process_datasets": _post_process_datasets,
            "_show_dataset": _show_dataset,
        },
    )


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


def _encode_dataset(original: Callable[..., Any]) -> Callable[..., Any]:
    def encode_dataset(self: Any, train_dataset: Any, *rest: Any, **options: Any) -> Any:
        if not is_stream(train_dataset):
            return original(self, train_dataset, *rest, **options)
        return [train_dataset, original(self, None, *rest, **options)[1]]

    return encode_dataset


def _post_process_datasets(original: Callable[..., Any]) -> Callable[..., Any]:
    def post_process_datasets(self: Any, datasets: Any, *rest: Any, **options: Any) -> Any:
        train_dataset, val_dataset = datasets
        if not is_stream(train_dataset):
            return original(self, datasets, *rest, **options)
        return [train_dataset, original(self, [None, val_dataset], *rest, **options)[1]]

    return post_process_datasets


def _show_dataset(original: Callable[..., Any]) -> Callable[..., Any]:
    def show_dataset(self: Any, train_dataset: Any, val_dataset: Any, *rest: Any, **options: Any) -> Any:
        if not is_stream(train_dataset):
            return original(self, train_dataset, val_dataset, *rest, **options)
        return show(self, train_dataset, val_dataset)

    return show_dataset


def show(pipeline: Any, stream: Any, val_dataset: Any) -> None:
    """Logs the first sample of a stream, if it is there already, and what there is of validation data.

    ms-swift shows the first sample too, but then counts the tokens of all.

    Args:
        pipeline: ms-swift's, which has template and messages.
        stream: the training data.
        val_dataset: the validation data, None for none.
    """
    from lazyshard_swift.parallel import is_first, notice

    if is_first():
        sample = stream.first_sample()
        if sample is None:
            notice("nothing of the stream is there to be shown yet")
        else:
            pipeline.template.print_inputs(sample[0] if isinstance(sample, list) else sample)
    args = pipeline.args
    pipeline.train_msg["train_dataset"] = repr(stream)
    generated = getattr(args, "predict_with_generate", False)
    if val_dataset is not None and len(val_dataset) and not args.lazy_tokenize and not generated:
        pipeline.train_msg["val_dataset"] = pipeline._stat_dataset(val_dataset)


def _check_hooks(args: Any) -> None:
    """Refuses to train with half of the integration: the trainer would deal the samples in an order of its own."""
    trainer = "swift.megatron.trainers.base" if settings.is_megatron(args) else "swift.trainers.mixin"
    # ms-swift imports its trainers late.
    importlib.import_module(trainer)
    reasons = [outcome.reason for outcome in hooked.failures()]
    if trainer not in {outcome.module for outcome in hooked.outcomes()}:
        reasons.append(f"{trainer} was imported before lazyshard could extend it")
    if reasons:
        raise SettingsRefused(
            f"--sharded_lazy true cannot work with this ms-swift: {'; '.join(reasons)}. Supported is "
            f"{ms_swift.SUPPORTED}; `lazyshard doctor swift` shows what is missing",
            argument="sharded_lazy",
        )


def is_stream(dataset: Any) -> bool:
    """Returns whether a training data set is ours, without loading what ours needs."""
    return type(dataset).__module__ == _STREAM
