"""A patience whose time is set by hand, and what it has told."""

from __future__ import annotations

from typing import Any

from lazyshard.stream.patience import Patience


class World:
    """A patience of 60 s; `options` are its own."""

    def __init__(self, **options: Any) -> None:
        self.now = 0.0
        self.told: list[str] = []
        self.patience = Patience(self.told.append, 60.0, lambda: self.now, **options)

    def look_at(self, now: float) -> list[str]:
        """Returns what it tells at that moment."""
        self.now = now
        self.patience.look()
        told, self.told[:] = list(self.told), []
        return told
