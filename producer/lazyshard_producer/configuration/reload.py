"""Settings that may change while a run goes on: SIGHUP reads the configuration file again.

    may change     rate, the limits, max_bad_rows (not where on_bad_row changes), log_every_seconds
    may not        everything else: it decides which rows there are, in which order, and where

A file that cannot be read, or says what cannot be, changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, Final, Protocol

from lazyshard.errors import LazyShardError
from lazyshard_producer.configuration.quantities import Amount, show_amount, show_bytes
from lazyshard_producer.configuration.settings import OPTIONS, Limits, Settings

_NAMES: Final = {"sources": "source"} | {option.field: option.name for option in OPTIONS}
"""What fields are called in the file."""

_MAY_CHANGE: Final = [option for option in OPTIONS if option.about.reload]


class Teller(Protocol):
    """Says things: the part of a display that is needed here."""

    def note(self, text: str) -> None:
        """Says what may be of interest."""

    def warn(self, text: str) -> None:
        """Says what is odd."""


def reloaded(old: Settings, new: Settings) -> tuple[Settings, list[str]]:
    """Returns the settings to go on with, and the names of those in which `new` differs and may not."""
    changing = {option.field for option in _MAY_CHANGE if option.owner is Settings} | {"limits"}
    # With another policy its number means something else.
    taken = changing if new.on_bad_row == old.on_bad_row else changing - {"max_bad_rows"}
    kept = [one.name for one in fields(Settings) if one.name not in changing]
    refused = [_NAMES[name] for name in kept if getattr(old, name) != getattr(new, name)]
    return replace(old, **{name: getattr(new, name) for name in taken}), refused


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


def _changes(old: Settings, new: Settings) -> Iterator[str]:
    for option in _MAY_CHANGE:
        before, after = (getattr(one.limits if option.owner is Limits else one, option.field) for one in (old, new))
        if before != after:
            yield f"{option.name} from {_shown(option.name, before)} to {_shown(option.name, after)}"


def _shown(name: str, value: Any) -> str:
    if isinstance(value, Amount):
        return show_amount(value)
    if value is not None and name.endswith("_disk"):
        return show_bytes(value)
    return "none" if value is None or value == () else str(value)
