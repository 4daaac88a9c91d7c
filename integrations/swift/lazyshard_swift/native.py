"""What an ms-swift that knows `--sharded_lazy` by itself calls; `integrations/swift/upstream` holds the patch for it.

Each function stands for a place in ms-swift; our own extensions of an ms-swift that does not know it do the same there.
Their names and parameters stay as they are for as long as `INTERFACE` does. To import this module costs next to
nothing: what needs torch is imported when a run has a stream.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Final

INTERFACE: Final = 1
"""Changes when a function here is called otherwise, or must be called at another place."""


def check_arguments(args: Any) -> None:
    """Looks at the arguments, at the beginning of `DataArguments.__post_init__`, whether the flag is on or not.

    Raises:
        SettingsRefused: with these arguments nothing can be promised; a ValueError.
    """
    from lazyshard_swift import arguments

    arguments.check(args)


def open_stream(args: Any, template: Any) -> Any:
    """Returns the training data, which have a length and encode row by row; an attribute `is_sharded_lazy` is true.

    All ranks call it, once. `args` is not changed but for the number of epochs where steps decide.

    Args:
        args: ms-swift's.
        template: ms-swift's, in its training mode.

    Raises:
        SettingsRefused: these arguments do not go with this stream; a ValueError.
        LazyShardError: the stream cannot be read, or what was waited for did not come.
    """
    from lazyshard_swift import opening

    return opening.open_train_stream(args, template)


def show(pipeline: Any, stream: Any, val_dataset: Any) -> None:
    """Logs the first sample, for `SwiftSft._show_dataset`, without waiting for one."""
    from lazyshard_swift import pipeline as ours

    ours.show(pipeline, stream, val_dataset)


def loader_classes(trainer: Any, stream: Any, sampler: type[Any], loader: type[Any]) -> tuple[type[Any], type[Any]]:
    """Returns subclasses of ms-swift's `BatchSamplerShard` and `DataLoaderShard`, for `get_train_dataloader`."""
    from lazyshard_swift import huggingface

    return huggingface.loader_classes(trainer, stream, sampler, loader)


def begin_epoch(trainer: Any, stream: Any, loader: Any) -> None:
    """Has the loader that was made of these classes begin where the trainer stands."""
    from lazyshard_swift import huggingface

    huggingface.begin_epoch(trainer, stream, loader)


def saving(trainer: Any) -> AbstractContextManager[None]:
    """Within it `SwiftMixin` saves a checkpoint: the position is put into it first, the cursor follows."""
    from lazyshard_swift import huggingface

    return huggingface.saving(trainer)


def megatron_training(trainer: Any, stream: Any) -> AbstractContextManager[None]:
    """Within it `BaseMegatronTrainer` trains; left without an error where the stream ends early."""
    from lazyshard_swift import megatron

    return megatron.training(trainer, stream)


def megatron_loading(trainer: Any, stream: Any) -> AbstractContextManager[Any]:
    """Within it `BaseMegatronTrainer` makes the loader, of the data set that it yields."""
    from lazyshard_swift import megatron

    return megatron.loading(trainer, stream)


def megatron_saving(trainer: Any) -> AbstractContextManager[None]:
    """Within it `BaseMegatronTrainer` saves a checkpoint: the position is put into it first, the cursor follows."""
    from lazyshard_swift import megatron

    return megatron.saving(trainer)
