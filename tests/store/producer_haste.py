"""Makes a producer's waits short: called in the process of a command, before it runs."""

from __future__ import annotations

from typing import Any

from lazyshard_producer import shipping
from lazyshard_producer.shipping import shipper


def install() -> None:
    """A run that is told to stop leaves at once."""
    module: Any = shipping
    module.LEAVE_S = 0.3


def talkative() -> None:
    """The head is put as often as there is a new one."""
    module: Any = shipper
    module.HEAD_S = 0.0
