"""Makes a producer's waits short: called in the process of a command, before it runs."""

from typing import Any

from lazyshard_producer import loop
from lazyshard_producer.shipping import shipper, store

SHIPPER: Any = shipper


def install() -> None:
    """A run that is told to stop leaves at once, and soon says what it waits for."""
    modules: list[Any] = [SHIPPER, store, loop]
    for module, name, seconds in zip(modules, ("LEAVE_S", "SHOWN_S", "WAIT_BEAT_S"), (0.3, 0.3, 0.5), strict=True):
        setattr(module, name, seconds)


def attentive() -> None:
    """The consumers are looked at all the time."""
    SHIPPER.PULL_S = 0.1


def talkative() -> None:
    """The head is put as often as there is a new one."""
    SHIPPER.HEAD_S = 0.0
