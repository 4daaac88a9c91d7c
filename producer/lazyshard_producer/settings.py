"""What a run is to do: the options of the command as one checked value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from lazyshard.format import check_samples_per_chunk
from lazyshard_producer.errors import SettingInvalid

MAX_ROW_BYTES: Final = 64 << 20
"""Longest row by default, in bytes: far above any text sample, and a few of them fit into any machine."""

_MAX_ROW_BYTES_MAX: Final = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a run is to do.

    Attributes:
        sources: paths of the files to read, in this order, as the user gave them: that is how positions name them.
        out: path of the stream's directory.
        samples_per_chunk: rows in a chunk.
        rate: at most so many samples a second; None for no limit.
        max_row_bytes: longest row that is accepted, in bytes without its line end.

    Raises:
        SettingInvalid: one of them cannot be.
    """

    sources: tuple[str, ...]
    out: str
    samples_per_chunk: int
    rate: float | None = None
    max_row_bytes: int = MAX_ROW_BYTES

    def __post_init__(self) -> None:
        """Checks what can be checked without looking at any file."""
        if not self.sources:
            raise SettingInvalid("--source: at least one file is needed, got none", option="--source")
        for path in self.sources:
            _check_path("--source", path)
        _check_path("--out", self.out)
        try:
            check_samples_per_chunk(self.samples_per_chunk)
        except ValueError as cause:
            raise SettingInvalid(f"--samples-per-chunk: {cause}", option="--samples-per-chunk") from None
        if self.rate is not None and not (math.isfinite(self.rate) and self.rate > 0):
            raise SettingInvalid(f"--rate is a number of samples a second above 0, got {self.rate}", option="--rate")
        if not 1 <= self.max_row_bytes <= _MAX_ROW_BYTES_MAX:
            raise SettingInvalid(
                f"--max-row-bytes is from 1 to {_MAX_ROW_BYTES_MAX}, got {self.max_row_bytes}", option="--max-row-bytes"
            )


def _check_path(option: str, path: str) -> None:
    if not path:
        raise SettingInvalid(f"{option}: a path is needed, got an empty one", option=option)
    if "\0" in path:
        raise SettingInvalid(f"{option}: a path cannot hold a NUL character, got {path!r}", option=option)
