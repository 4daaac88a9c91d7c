"""Numbers of bytes as people write them: "20GB", "512MiB"."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["parse_size"]

_SIZE: Final = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,6}))? *(?:([kmgt])(i?))?b?", re.IGNORECASE)


def parse_size(text: str | int) -> int:
    """Returns a number of bytes, with units of the SI (kB = 1,000) or of the IEC (KiB = 1,024).

    >>> parse_size("20GB"), parse_size("1.5 MiB"), parse_size("512")
    (20000000000, 1572864, 512)

    Raises:
        ValueError: it is none, or 0.
    """
    found = _SIZE.fullmatch(str(text).strip())
    size = 0
    if found is not None:
        whole, part, prefix, binary = found.groups("")
        unit = (1024 if binary else 1000) ** ("kmgt".index(prefix.lower()) + 1) if prefix else 1
        size = int(whole + part) * unit // 10 ** len(part)
    if size < 1:
        raise ValueError(f"expected a number of bytes such as 20GB or 512MiB, got {text!r}")
    return size
