"""Errors of the integration. They extend `lazyshard.LazyShardError`, so one `except` takes them all."""

from __future__ import annotations

from lazyshard.errors import FormatInvalid, LazyShardError


class SettingsRefused(LazyShardError, ValueError):
    """Arguments that cannot work together with ``--sharded_lazy true``."""

    argument: str | None = None


def refused(argument: str, message: str) -> SettingsRefused:
    """Returns the error of an argument, by its name without dashes."""
    return SettingsRefused(message, argument=argument)


class PositionInvalid(FormatInvalid):
    """The position saved beside a checkpoint cannot be read."""


class ResumeRefused(LazyShardError, ValueError):
    """A checkpoint that cannot be gone on from with these data and settings."""

    checkpoint: str | None = None
    expected: str | None = None
    actual: str | None = None


class StreamTooShort(LazyShardError, ValueError):
    """The stream has ended with fewer samples than one step takes."""

    directory: str | None = None
    samples: int | None = None
