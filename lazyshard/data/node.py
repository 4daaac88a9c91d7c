"""`LazyShardedNode`: a stream as a source of torchdata.nodes. The only module of lazyshard that imports torchdata."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

try:
    from torchdata.nodes import BaseNode
except ModuleNotFoundError as cause:
    raise ImportError("LazyShardedNode needs torchdata: pip install 'lazyshard[torchdata]'") from cause

from lazyshard.data.iterable import LazyShardedStream

__all__ = ["LazyShardedNode"]


class LazyShardedNode(BaseNode):  # type: ignore[misc]  # torchdata has no type information
    """The samples of one rank as the source of a `torchdata.nodes` pipeline. Its state is its exact position.

    ::

        source = LazyShardedNode(LazyShardedStream(LazyShardedDataset("stream", batch_size=8), at_end="loop"))
        loader = Loader(Batcher(ParallelMapper(source, tokenize, num_workers=4), batch_size=8))

    It has no workers; use `ParallelMapper` for them. Each pass begins like a pass over the stream; call
    `stream.set_epoch` before the next epoch.

    Args:
        stream: the stream to draw from, in this process; it must not be iterated elsewhere.

    Raises TypeError: it is not a `LazyShardedStream`.
    """

    def __init__(self, stream: LazyShardedStream[Any]) -> None:
        super().__init__()
        if not isinstance(stream, LazyShardedStream):
            example = "LazyShardedNode(LazyShardedStream(LazyShardedDataset(DIRECTORY)))"
            raise TypeError(f"expected a stream, such as {example}, got {stream!r:.100}")
        self.stream = stream
        """The stream to draw from."""
        self._samples: Iterator[Any] = iter(())

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begins a pass, as described in the class. Raises as `LazyShardedStream.load_state_dict`."""
        super().reset(initial_state)
        if initial_state is not None:
            self.stream.load_state_dict(initial_state)
        self._samples = iter(self.stream)

    def next(self) -> Any:
        """Returns the next sample. Raises StopIteration at the end, and the errors of `LazyShardedDataset`."""
        return next(self._samples)

    def get_state(self) -> dict[str, Any]:
        """Returns the state after the samples returned so far, as `LazyShardedStream.state_dict`."""
        return self.stream.state_dict()
