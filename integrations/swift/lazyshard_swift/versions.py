"""Which ms-swift is installed, and which are supported; found without importing it, which takes ten seconds."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path
from typing import Final

DISTRIBUTION: Final = "ms-swift"
PACKAGE: Final = "swift"

SUPPORTED: Final = "4.0 to 4.6"
"""The releases that `lazyshard_swift` is made for, in words."""

REQUIREMENT: Final = "ms-swift>=4.0,<4.7"
"""What pip is to be asked for."""

_OLDEST: Final = (4, 0)
_NEWEST: Final = (4, 6)

MEGATRON: Final = ("megatron-core", "mcore-bridge")
"""The distributions that ms-swift's Megatron needs."""

BRIDGE_SINCE: Final = (4, 1)
"""The first release that needs mcore-bridge for it."""

_VERSION_LINE: Final = re.compile(r"^__version__ *= *['\"]([^'\"]+)['\"]", re.MULTILINE)


def folder() -> Path | None:
    """Returns the folder of the package `swift`, ms-swift's or another one of this name; None where there is none."""
    try:
        spec = importlib.util.find_spec(PACKAGE)
    except (ImportError, ValueError):
        # ValueError: what is in sys.modules by this name has no specification.
        return None
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]) if places else None


def installed() -> str | None:
    """Returns the version of ms-swift, of the distribution or else of a checkout; None where there is none."""
    version = distribution_version(DISTRIBUTION)
    if version is not None:
        return version
    place = folder()
    try:
        # A checkout on PYTHONPATH has no metadata; and OpenStack's package of the same name has no such file.
        line = _VERSION_LINE.search((place / "version.py").read_text(encoding="utf-8")) if place is not None else None
    except (OSError, ValueError):
        return None
    return line[1] if line is not None else None


def distribution_version(name: str) -> str | None:
    """Returns the version of an installed distribution, None where it is not installed."""
    try:
        # None where the metadata are damaged, whatever the annotation says.
        return importlib.metadata.version(name) or None
    except importlib.metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, int] | None:
    """Returns the first two numbers of a version.

    >>> release("4.6.0.dev0"), release("unknown")
    ((4, 6), None)
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers is not None else None


def is_supported(version: str) -> bool:
    """Says whether `lazyshard_swift` is made for this version of ms-swift."""
    found = release(version)
    return found is not None and _OLDEST <= found <= _NEWEST


def is_too_old(version: str | None) -> bool:
    """Says whether this version of ms-swift is older than all that are supported."""
    found = release(version) if version is not None else None
    return found is not None and found < _OLDEST


def needed() -> str:
    """Returns which version is needed, which is installed and what to do: the end of a sentence."""
    version = installed()
    there = "none is installed" if version is None else f"ms-swift {version} is installed"
    oldest = ".".join(map(str, _OLDEST))
    return f">= {oldest}.0 (supported: {SUPPORTED}), {there}: pip install '{REQUIREMENT}'"
