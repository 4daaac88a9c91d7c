"""The demo's language model: a causal transformer over bytes, small enough for a slow CPU core.

From a row to a batch: `encode` runs in the loader's workers, through `LazyShardedDataset`, and `collate` stacks.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

CONTEXT: Final = 256
"""Bytes of a sample that are trained; longer samples are truncated."""

WIDTH: Final = 64
HEADS: Final = 4
LAYERS: Final = 1

_PAD: Final = 256
_IGNORED: Final = -100
"""The target that cross_entropy ignores."""


class Batch(NamedTuple):
    """Samples of one micro batch; `inputs` and `targets` are of shape (samples, bytes)."""

    ids: list[int]
    inputs: Tensor
    targets: Tensor


def encode(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the bytes of a conversation and its id, by which the demo checks what was trained."""
    text = "".join(f"[{message['role']}]\n{message['content']}\n" for message in row["messages"])
    return {"id": row["id"], "input_ids": list(text.encode()[: CONTEXT + 1])}


def collate(samples: list[dict[str, Any]]) -> Batch:
    """Pads samples to the longest; each byte's target is the byte after it."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    padded = torch.tensor([s["input_ids"] + [_PAD] * (longest - len(s["input_ids"])) for s in samples])
    targets = padded[:, 1:].masked_fill(padded[:, 1:] == _PAD, _IGNORED)
    return Batch([sample["id"] for sample in samples], padded[:, :-1].contiguous(), targets)


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, with normalisation before each."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.merge = nn.Linear(WIDTH, WIDTH)
        self.before_feed = nn.LayerNorm(WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps (samples, bytes, WIDTH) to the same shape."""
        samples, length, _ = hidden.shape
        projected = self.project(self.before_attention(hidden)).view(samples, length, 3, HEADS, -1)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.merge(attended.transpose(1, 2).reshape(samples, length, WIDTH))
        return hidden + Tensor(self.feed(self.before_feed(hidden)))


class ByteModel(nn.Module):
    """Predicts each next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(_PAD + 1, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.last = nn.LayerNorm(WIDTH)
        self.scores = nn.Linear(WIDTH, 256)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean loss of a batch, in nats per byte."""
        hidden = self.bytes(inputs) + self.places.weight[: inputs.shape[1]]
        scores = self.scores(self.last(self.blocks(hidden)))
        return functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=_IGNORED)
