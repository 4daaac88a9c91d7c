"""Samples of tokens by a Hugging Face tokenizer, and batches of them, for configurations that name one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from lazyshard.errors import SkipSample

__all__ = ["PadBatch", "Tokenize", "open_tokenizer"]

_IGNORED: Final = -100
"""What losses of torch and transformers leave out."""


def open_tokenizer(path: str) -> Any:
    """Returns the tokenizer of a local directory; nothing is fetched, and no code of it is run.

    Raises:
        ImportError: transformers is not installed.
        Exception: whatever transformers raises where it cannot be loaded.
    """
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as cause:
        if cause.name != "transformers":
            raise
        raise ImportError("a tokenizer needs transformers: pip install transformers") from cause
    return AutoTokenizer.from_pretrained(path, local_files_only=True)


class Tokenize:
    """Makes a sample of a row: `input_ids` of its `messages`, by the chat template, or else of its `text`.

    Args:
        tokenizer: of transformers.
        max_length: most tokens of a sample; None for any number.
        too_long: "drop" trains another row in the place of a longer one, "truncate" cuts it.
    """

    def __init__(self, tokenizer: Any, max_length: int | None = None, too_long: str = "drop") -> None:
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._too_long = too_long

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Returns the sample.

        Raises:
            SkipSample: it is too long.
            ValueError: the row has neither messages nor a text.
        """
        if isinstance(row.get("messages"), (list, tuple)):
            tokens = self._tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=True)["input_ids"]
        elif isinstance(row.get("text"), str):
            tokens = self._tokenizer(row["text"])["input_ids"]
        else:
            raise ValueError(
                f"expected a list `messages` or a text `text`, the row has {', '.join(map(repr, row))[:200]}; a "
                f"message_transform makes messages of it"
            )
        if self._max_length is not None and len(tokens) > self._max_length:
            if self._too_long == "drop":
                raise SkipSample(f"{len(tokens)} tokens, max_length is {self._max_length}")
            tokens = tokens[: self._max_length]
        return {"input_ids": list(tokens)}


class PadBatch:
    """Collates samples of tokens: each as long as the longest, by padding behind it.

    Args:
        pad: the token that fills up.
    """

    def __init__(self, pad: int) -> None:
        self._pad = pad

    def __call__(self, samples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Returns `input_ids`, `attention_mask` and `labels`, each (samples, tokens) of int64.

        Labels are the tokens themselves, and -100 where padding is.
        """
        lengths = [len(sample["input_ids"]) for sample in samples]
        shape = (len(samples), max(lengths, default=0))
        tokens, labels = torch.full(shape, self._pad), torch.full(shape, _IGNORED)
        mask = torch.zeros(shape, dtype=torch.int64)
        for row, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
            found = torch.tensor(sample["input_ids"], dtype=torch.int64)
            tokens[row, :length] = labels[row, :length] = found
            mask[row, :length] = 1
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels}
