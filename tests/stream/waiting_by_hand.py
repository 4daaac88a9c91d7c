"""A watchdog whose time is set by hand, and what it has told."""

from typing import Any

from lazyshard.stream.waiting import Watchdog


class World:
    """A watchdog of 60 s; `options` are its own."""

    def __init__(self, **options: Any) -> None:
        self.now = 0.0
        self.told: list[str] = []
        self.watchdog = Watchdog(self.told.append, **options)
        self.watchdog._clock = lambda: self.now

    def look_at(self, now: float) -> list[str]:
        self.now = now
        self.watchdog.look()
        told, self.told[:] = list(self.told), []
        return told
