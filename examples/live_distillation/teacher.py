"""The teacher, as a source of rows for `lazyshard-producer run --source python:teacher:rows`.

A row is a generated text with the four most likely tokens at each position and their probabilities. The model is tiny
and has random weights; load a real one in its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import torch

TOKENS = 32
LENGTH = 24
BATCH = 32
"""Texts that are generated at a time."""


class Model(torch.nn.Module):
    """Predicts a token from the previous one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(TOKENS, width)
        self.head = torch.nn.Linear(width, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Takes tokens of any shape, and returns logits of that shape × TOKENS."""
        return self.head(torch.tanh(self.embed(tokens)))  # type: ignore[no-any-return]


def rows(position: int | None) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields (row, position after it) endlessly, starting after `position` if it is given."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    teacher = Model(width=16)
    torch.nn.init.normal_(teacher.head.weight, std=2.0)
    start = position or 0
    for first in count(start - start % BATCH, BATCH):
        # Seeded by the number of the text, so that a restart generates the same texts again.
        made = generate(teacher, torch.Generator().manual_seed(first))
        for number, row in enumerate(made, first):
            if number >= start:
                yield {"id": number, **row}, number + 1


@torch.no_grad()
def generate(teacher: Model, chance: torch.Generator) -> list[dict[str, Any]]:
    """Generates a batch of texts."""
    tokens = torch.randint(TOKENS, (BATCH, 1), generator=chance)
    while tokens.shape[1] < LENGTH:
        likely = teacher(tokens[:, -1]).softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(likely, 1, generator=chance)], 1)
    probabilities, candidates = teacher(tokens).softmax(-1).topk(4)
    made = zip(tokens.tolist(), candidates.tolist(), probabilities.tolist(), strict=True)
    return [{"tokens": text, "candidates": some, "probabilities": shares} for text, some, shares in made]
