"""Makes a producer's waits short: called in the process of a command, before it runs."""

from __future__ import annotations

from typing import Any

from fsspec.config import conf

from lazyshard_producer.shipping import objects, shipper


def install() -> None:
    """A run that is told to stop leaves at once."""
    module: Any = objects
    module.LEAVE_S = 0.3


def talkative() -> None:
    """The head is put as often as there is a new one."""
    module: Any = shipper
    module.HEAD_S = 0.0


def impatient() -> None:
    """A request that is not answered within half a second has failed."""
    conf.setdefault("s3", {})["config_kwargs"] = {"read_timeout": 0.5, "connect_timeout": 0.5}
