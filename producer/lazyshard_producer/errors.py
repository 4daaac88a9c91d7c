"""Errors of the producer command. Like all of lazyshard's they extend its root and a builtin and carry fields."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from lazyshard.errors import LazyShardError


class SettingInvalid(LazyShardError, ValueError):
    """An option of the command that cannot be."""

    option: str | None = None


class Problem(NamedTuple):
    """What cannot be about a setting.

    Attributes:
        option: as on the command line: ``--rate``.
        text: what is expected, what was found, and what would do.
        source: which source it is about, from 0; None where it is about none or about all.
    """

    option: str
    text: str
    source: int | None = None


class SettingsInvalid(SettingInvalid):
    """Settings that cannot be, or not together. Its `problems` are all of them, not the first one only."""

    problems: tuple[Problem, ...] = ()

    @classmethod
    def of(cls, problems: Iterable[Problem]) -> SettingsInvalid:
        """Returns the error for problems, of which there is at least one."""
        found = tuple(problems)
        message = "; ".join(f"{problem.option}: {problem.text}" for problem in found)
        return cls(message, option=found[0].option, problems=found)


class ExtraMissing(LazyShardError, ImportError):
    """A package that is needed for what was asked is not installed."""

    package: str | None = None
    extra: str | None = None


class SourceRefused(LazyShardError, ValueError):
    """A source that cannot be read, is of a kind that is not read, or is not what it was when it was published."""

    file: str | None = None
    expected: str | None = None
    actual: str | None = None


class WorkerFailed(LazyShardError, RuntimeError):
    """A worker process has ended in the middle of its work."""
