"""Errors of the producer command. Like all of lazyshard's they extend its root and a builtin and carry fields."""

from __future__ import annotations

from lazyshard.errors import LazyShardError


class SettingInvalid(LazyShardError, ValueError):
    """An option of the command that cannot be."""

    option: str | None = None


class SourceRefused(LazyShardError, ValueError):
    """A source that cannot be read, is of a kind that is not read, or is not what it was when it was published."""

    file: str | None = None
    expected: str | None = None
    actual: str | None = None
