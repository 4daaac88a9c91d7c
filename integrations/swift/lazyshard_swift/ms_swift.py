"""The installed ms-swift: its version, its logger, and how functions of it are replaced.

ms-swift continues unharmed whatever fails here: `outcomes` keeps it, and a run with the flag refuses to train by that.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from lazyshard.errors import redact

DISTRIBUTION: Final = "ms-swift"
SUPPORTED: Final = "4.0 to 4.6"
REQUIREMENT: Final = "ms-swift>=4.0,<4.7"
_OLDEST: Final = (4, 0)
_NEWEST: Final = (4, 6)

# The distributions that its Megatron needs, and what is imported of them; 4.0 needs the first alone.
DEPENDENCIES: Final = {"megatron-core": "megatron.core", "mcore-bridge": "mcore_bridge"}
# Environment variable that is set once the warning was given, for the processes that are started from here on.
WARNED: Final = "LAZYSHARD_SWIFT_WARNED"
# Environment variables that are 0 or unset in the one process that warns; RANK is unset in every launcher.
_RANKS: Final = ("RANK", "NODE_RANK", "GROUP_RANK")

outcomes: Final[dict[str, str]] = {}
"""By module that was imported so far, why it could not be extended the last time; empty where it was."""


def folder() -> Path | None:
    """Returns the folder of the package `swift`, ms-swift's or another one of this name; None where there is none."""
    spec = None
    # ValueError: what is in sys.modules by this name has no specification.
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec("swift")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]) if places else None


def version() -> str | None:
    """Returns the version of ms-swift, of the distribution or else of a checkout; None where there is none."""
    told, place = distribution_version(DISTRIBUTION), folder()
    if told is None and place is not None:
        # A checkout on PYTHONPATH has no metadata; and OpenStack's package of the same name has no such file.
        with contextlib.suppress(OSError, ValueError):
            text = (place / "version.py").read_text(encoding="utf-8")
            told = (re.findall(r"^__version__ *= *['\"]([^'\"]+)['\"]", text, re.MULTILINE) or [None])[0]
    return told


def distribution_version(name: str) -> str | None:
    """Returns the version of an installed distribution, None where it is not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        # None where the metadata are damaged, whatever the annotation says.
        return importlib.metadata.version(name) or None
    return None


def release(version: str | None) -> tuple[int, int] | None:
    """Returns the first two numbers of a version.

    >>> release("4.6.0.dev0"), release("unknown")
    ((4, 6), None)
    """
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(numbers[1]), int(numbers[2])) if numbers is not None else None


def is_supported(version: str | None) -> bool:
    """Says whether `lazyshard_swift` is made for this version of ms-swift."""
    return _OLDEST <= (release(version) or (0, 0)) <= _NEWEST


def is_too_old(version: str | None) -> bool:
    """Says whether this version of ms-swift is older than all that are supported."""
    return (release(version) or _OLDEST) < _OLDEST


def dependencies(version: str | None) -> list[str]:
    """Returns the distributions that Megatron of this ms-swift needs."""
    return list(DEPENDENCIES)[: 2 if (release(version) or _NEWEST) > _OLDEST else 1]


def needed() -> str:
    """Returns which version is needed, which is installed and what to do: the end of a sentence."""
    found = version()
    there = "none is installed" if found is None else f"ms-swift {found} is installed"
    return f">= {_OLDEST[0]}.{_OLDEST[1]}.0 (supported: {SUPPORTED}), {there}: pip install '{REQUIREMENT}'"


def is_megatron(args: Any) -> bool:
    """Returns whether these are the arguments of a `megatron` command."""
    return hasattr(args, "micro_batch_size")


def is_stream(dataset: Any) -> bool:
    """Returns whether a training data set is ours, without loading what ours needs."""
    return type(dataset).__module__ == "lazyshard_swift.stream"


def notice(text: str) -> None:
    """Tells something once for the whole job: ms-swift's logger is silent on all but the first rank of a node."""
    _logger().info("lazyshard: %s", redact(text))


def caution(text: str) -> None:
    """Tells something once for the whole job that goes wrong unless somebody acts."""
    _logger().warning("lazyshard: %s", redact(text))


def _logger() -> Any:
    with contextlib.suppress(ImportError):
        from swift.utils import get_logger

        return get_logger()
    return logging.getLogger("lazyshard")


def extend(module: ModuleType, extension: str) -> None:
    """Calls `extend(module)` of an extension, records how it went, and warns if need be; raises nothing."""
    installed, reason = version(), ""
    # The launcher refuses the flag.
    if (too_old := is_too_old(installed)) and module.__name__ != "swift.cli.main":
        return
    try:
        importlib.import_module(extension).extend(module)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, AttributeError) and error.obj is module:
            # Python would say that it is partially initialized, most likely due to a circular import.
            reason = f"AttributeError: it has no {error.name}"
    outcomes[module.__name__] = reason
    if reason or not (too_old or is_supported(installed)):
        warn_once()


def failures() -> str:
    """Returns which modules could not be extended and why, on one line; empty where all could."""
    return "; ".join(f"{module} ({' '.join(reason.split())})" for module, reason in outcomes.items() if reason)


def warn_once() -> None:
    """Says which ms-swift is installed, which are supported and what could not be extended: once in the whole job."""
    if os.environ.get(WARNED) or any(os.environ.get(name) not in (None, "", "0") for name in _RANKS):
        return
    os.environ[WARNED] = "1"
    failed = f" Could not be extended: {failures()}." if failures() else ""
    text = f"ms-swift {version() or 'of an unknown version'} is installed, lazyshard is made for {SUPPORTED}.{failed}"
    text = f"{text} Runs without --sharded_lazy are not affected. `lazyshard doctor swift` shows the details."
    logger = logging.getLogger("lazyshard")
    if logger.hasHandlers():
        logger.warning("%s", text)
    else:
        tell(f"warning: {text}")


def tell(text: str) -> None:
    """Prints a line on standard error, whether or not anybody listens."""
    with contextlib.suppress(OSError, ValueError):
        print(f"lazyshard: {text}", file=sys.stderr, flush=True)


def wrap(owner: Any, ours: Mapping[str, Callable[..., Any]]) -> None:
    """Has functions of a class or a module, all or none, call `ours(original, *arguments)`.

    Behind the name of a function stand the first of its parameters that we rely on.
    """
    made = {}
    for given, own in ours.items():
        name, *expected = given.split()
        require(owner, name)
        found = list(inspect.signature(vars(owner)[name]).parameters)
        if found[: len(expected)] != expected:
            wanted = f"expected ({', '.join(expected)}, ...)"
            raise AttributeError(f"{owner.__name__}.{name} takes ({', '.join(found)}), {wanted}")
        made[name] = _replacement(vars(owner)[name], own)
    for name, replacement in made.items():
        setattr(owner, name, replacement)


def _replacement(original: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    # A function, not a partial: of a class it becomes a method.
    return functools.wraps(original)(lambda *arguments, **options: own(original, *arguments, **options))


def require(owner: Any, *names: str) -> None:
    """Checks that a class or a module has these functions or classes itself. Raises AttributeError."""
    missing = [name for name in names if not callable(vars(owner).get(name))]
    if missing:
        raise AttributeError(f"{owner.__name__} has no {', no '.join(missing)}")


@contextlib.contextmanager
def changed(owner: Any, **values: Any) -> Iterator[None]:
    """Gives attributes other values for a while, those that there are."""
    before = {name: getattr(owner, name) for name in values if hasattr(owner, name)}
    vars(owner).update({name: values[name] for name in before})
    try:
        yield
    finally:
        vars(owner).update(before)
