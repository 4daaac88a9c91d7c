"""The installed ms-swift: its version, its logger, and how its functions are replaced.

ms-swift is not affected by failures here: `outcomes` records them, and a run with the flag then refuses to train.
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

# The distributions that its Megatron support needs, and what is imported from them; 4.0 needs only the first.
DEPENDENCIES: Final = {"megatron-core": "megatron.core", "mcore-bridge": "mcore_bridge"}
# Environment variable that is set once the warning was printed, for processes started later.
WARNED: Final = "LAZYSHARD_SWIFT_WARNED"
# Environment variables that are 0 or unset in the process that warns; RANK is unset in every launcher.
_RANKS: Final = ("RANK", "NODE_RANK", "GROUP_RANK")

outcomes: Final[dict[str, str]] = {}
"""For each module imported so far, why it could not be extended the last time; empty if it was."""


def folder() -> Path | None:
    """Returns the folder of the package `swift`, ms-swift's or another one of this name; None if there is none."""
    spec = None
    # ValueError: the entry in sys.modules has no specification.
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec("swift")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]) if places else None


def version() -> str | None:
    """Returns the version of ms-swift, of the distribution or else of a checkout; None if there is none."""
    found, place = distribution_version(DISTRIBUTION), folder()
    if found is None and place is not None:
        # A checkout on PYTHONPATH has no metadata; OpenStack's package of the same name has no such file.
        with contextlib.suppress(OSError, ValueError):
            text = (place / "version.py").read_text(encoding="utf-8")
            found = (re.findall(r"^__version__ *= *['\"]([^'\"]+)['\"]", text, re.MULTILINE) or [None])[0]
    return found


def distribution_version(name: str) -> str | None:
    """Returns the version of a distribution; None if it is not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        # None if the metadata are damaged, despite the annotation.
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
    """Returns whether `lazyshard_swift` supports this version of ms-swift."""
    return _OLDEST <= (release(version) or (0, 0)) <= _NEWEST


def is_too_old(version: str | None) -> bool:
    """Returns whether this version of ms-swift is older than all supported ones."""
    return (release(version) or _OLDEST) < _OLDEST


def dependencies(version: str | None) -> list[str]:
    """Returns the distributions that this ms-swift needs for Megatron."""
    return list(DEPENDENCIES)[: 2 if (release(version) or _NEWEST) > _OLDEST else 1]


def needed() -> str:
    """Returns the needed version, the installed one and the remedy, as the end of a sentence."""
    found = version()
    there = "none is installed" if found is None else f"ms-swift {found} is installed"
    return f">= {_OLDEST[0]}.{_OLDEST[1]}.0 (supported: {SUPPORTED}), {there}: pip install '{REQUIREMENT}'"


def is_megatron(args: Any) -> bool:
    """Returns whether these are the arguments of a `megatron` command."""
    return hasattr(args, "micro_batch_size")


def is_stream(dataset: Any) -> bool:
    """Returns whether a data set is a `TrainStream` or a `Validation`, without importing these classes."""
    return type(dataset).__module__ == "lazyshard_swift.stream"


def notice(text: str) -> None:
    """Logs a message once per job: ms-swift's logger is silent on all but the first rank of a node."""
    _logger().info("lazyshard: %s", redact(text))


def caution(text: str) -> None:
    """Logs a warning once per job."""
    _logger().warning("lazyshard: %s", redact(text))


def _logger() -> Any:
    with contextlib.suppress(ImportError):
        from swift.utils import get_logger

        return get_logger()
    return logging.getLogger("lazyshard")


def extend(module: ModuleType, extension: str) -> None:
    """Calls `extend(module)` of an extension, records the outcome, and warns if needed; raises nothing."""
    installed, reason = version(), ""
    # The launcher alone is extended, to refuse the flag.
    if (too_old := is_too_old(installed)) and module.__name__ != "swift.cli.main":
        return
    try:
        importlib.import_module(extension).extend(module)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, AttributeError) and error.obj is module:
            # Python would report a partially initialized module, most likely due to a circular import.
            reason = f"AttributeError: it has no {error.name}"
    outcomes[module.__name__] = reason
    if reason or not (too_old or is_supported(installed)):
        warn_once()


def failures() -> str:
    """Returns the modules that could not be extended and why, on one line; empty if there is none."""
    return "; ".join(f"{module} ({' '.join(reason.split())})" for module, reason in outcomes.items() if reason)


def warn_once() -> None:
    """Warns once per job of the installed ms-swift, the supported versions, and modules that could not be extended."""
    if os.environ.get(WARNED) or any(os.environ.get(name) not in (None, "", "0") for name in _RANKS):
        return
    os.environ[WARNED] = "1"
    failed = f" Could not be extended: {failures()}." if failures() else ""
    text = f"ms-swift {version() or 'of an unknown version'} is installed, lazyshard supports {SUPPORTED}.{failed}"
    text = f"{text} Runs without --sharded_lazy are not affected. `lazyshard doctor swift` shows the details."
    logger = logging.getLogger("lazyshard")
    if logger.hasHandlers():
        logger.warning("%s", text)
    else:
        tell(f"warning: {text}")


def tell(text: str) -> None:
    """Prints a line on standard error; errors of writing are ignored."""
    with contextlib.suppress(OSError, ValueError):
        print(f"lazyshard: {text}", file=sys.stderr, flush=True)


def wrap(owner: Any, ours: Mapping[str, Callable[..., Any]]) -> None:
    """Makes functions of a class or a module, all or none, call `ours(original, *arguments)`.

    Each key is the name of a function, followed by the first parameters that are relied on.
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
    # A function, not a partial: in a class it becomes a method.
    return functools.wraps(original)(lambda *arguments, **options: own(original, *arguments, **options))


def require(owner: Any, *names: str) -> None:
    """Checks that a class or a module itself defines these functions or classes. Raises AttributeError."""
    missing = [name for name in names if not callable(vars(owner).get(name))]
    if missing:
        raise AttributeError(f"{owner.__name__} has no {', no '.join(missing)}")


@contextlib.contextmanager
def changed(owner: Any, **values: Any) -> Iterator[None]:
    """Temporarily changes attributes, as far as they exist."""
    before = {name: getattr(owner, name) for name in values if hasattr(owner, name)}
    vars(owner).update({name: values[name] for name in before})
    try:
        yield
    finally:
        vars(owner).update(before)
