"""Settings that may change while a run goes on: SIGHUP reads the configuration file again.

    may change     rate, the limits, max_bad_rows (not where on_bad_row changes), log_every_seconds
    may not        everything else: it decides which rows there are, in which order, and where

A file that cannot be read, or says what cannot be, changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from typing import Any, Final, Protocol

from lazyshard.errors import LazyShardError
from lazyshard_producer.configuration.quantities import show_amount, show_bytes
from lazyshard_producer.configuration.settings import Amount, Limits, Settings

_MAY_CHANGE: Final = ("rate", "limits", "log_every_s")

_NAMES: Final = {"log_every_s": "log_every_seconds", "sources": "source", "store_patience_s": "store_patience_seconds"}
"""Where a setting is called otherwise in the file."""


class Teller(Protocol):
    """Says things: the part of a display that is needed here."""

    def note(self, text: str) -> None:
        """Says what may be of interest."""

    def warn(self, text: str) -> None:
        """Says what is odd."""


def reloaded(old: Settings, new: Settings) -> tuple[Settings, list[str]]:
    """Returns the settings to go on with, and the names of those in which `new` differs and may not."""
    taken: dict[str, Any] = {name: getattr(new, name) for name in _MAY_CHANGE}
    # With another policy its number means something else.
    if new.on_bad_row == old.on_bad_row:
        taken["max_bad_rows"] = new.max_bad_rows
    names = [one.name for one in fields(Settings) if one.name not in (*_MAY_CHANGE, "max_bad_rows")]
    refused = [_NAMES.get(name, name) for name in names if getattr(old, name) != getattr(new, name)]
    return replace(old, **taken), refused


class Reload:
    """Reads the settings again.

    Args:
        load: reads flags and file as at the start; None where there is no configuration file.
        name: how to call the file.
    """

    def __init__(self, load: Callable[[], Settings] | None, name: str) -> None:
        self._load = load
        self._name = name

    def take(self, old: Settings, teller: Teller) -> Settings:
        """Returns the settings to go on with, and says what has changed and what cannot. Raises nothing.

        Args:
            old: those of now.
            teller: is told.
        """
        if self._load is None:
            teller.note("SIGHUP has come, and there is no configuration file to be read again: nothing changes")
            return old
        try:
            new = self._load()
        except (LazyShardError, OSError) as error:
            teller.warn(f"nothing is reloaded: {error}")
            return old
        settings, refused = reloaded(old, new)
        for name in refused:
            teller.warn(f"{self._name}: {name} cannot change while it runs; stop it and start it again for that")
        changed = ", ".join(_changes(old, settings))
        teller.note(f"reloaded {self._name}: {changed or 'nothing has changed'}")
        return settings


def _changes(old: Settings, new: Settings) -> list[str]:
    names = ("rate", "log_every_s", "max_bad_rows")
    limits = [one.name for one in fields(Limits)]
    return [*_differences(old, new, names), *_differences(old.limits, new.limits, limits)]


def _differences(old: object, new: object, names: Iterable[str]) -> Iterator[str]:
    for name in names:
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            yield f"{_NAMES.get(name, name)} from {_shown(name, before)} to {_shown(name, after)}"


def _shown(name: str, value: Any) -> str:
    if isinstance(value, Amount):
        return show_amount(value)
    if value is not None and name.endswith("_disk"):
        return show_bytes(value)
    return "none" if value is None or value == () else str(value)
