"""How the integration speaks: through ms-swift's logger, which is silent on all but the first rank of a node."""

from __future__ import annotations

import logging
import sys
from typing import Any, Final

from lazyshard.errors import redact

_FORMAT: Final = "[%(levelname)s:lazyshard] %(message)s"


def notice(text: str) -> None:
    """Tells something once for the whole job."""
    _swift_logger().info("lazyshard: %s", redact(text))


def caution(text: str) -> None:
    """Tells something once for the whole job that goes wrong unless somebody acts."""
    _swift_logger().warning("lazyshard: %s", redact(text))


def attend() -> None:
    """Makes the lines of the library itself visible, such as those of a rank that waits, on every rank.

    Where the program has set up the logger `lazyshard`, or the root logger, it stays so.
    """
    logger = logging.getLogger("lazyshard")
    if not logger.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
        logger.propagate = False


def _swift_logger() -> Any:
    try:
        from swift.utils import get_logger
    except ImportError:
        return logging.getLogger("lazyshard")
    return get_logger()
