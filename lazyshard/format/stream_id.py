"""The identity of a stream: chosen at random when it is created, so that it is told from its replacement."""

from __future__ import annotations

import re
from typing import Any, Final

_STREAM_ID: Final = re.compile(r"[0-9a-f]{32}")


def is_stream_id(value: Any) -> bool:
    """Returns whether a value is the identity of a stream: 32 hexadecimal digits."""
    return isinstance(value, str) and _STREAM_ID.fullmatch(value) is not None
