"""Findings of `lazyshard doctor swift`: versions, the start-up file, the extended modules, and the verdict.

It does not import ms-swift, torch or Megatron, so it is fast and works even if one of them is broken.
"""

from __future__ import annotations

import importlib.util
import platform
import site
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from lazyshard import __version__
from lazyshard.cli.doctor import Finding
from lazyshard_swift import hook, ms_swift

_PTH: Final = "lazyshard_swift.pth"
_ANY: Final = ("torch", "transformers")


def examine() -> list[Finding]:
    """Returns the findings; the entry point of the group `lazyshard.doctor`."""
    version = ms_swift.version()
    needed = {"megatron sft": (*_ANY, *ms_swift.dependencies(version)), "swift sft": _ANY}
    found = [*_versions(version, needed["megatron sft"]), *_startup()]
    verb = "not installed, would be extended" if version is None else "extended"
    found += [Finding("extensions", name, f"{verb} by {extension}") for name, extension in hook.EXTENSIONS.items()]
    return found + [Finding("verdict", f"{one} --sharded_lazy true", *_verdict(version, needed[one])) for one in needed]


def _versions(version: str | None, needed: Sequence[str]) -> Iterator[Finding]:
    section, remedy, supported = "versions", f"pip install '{ms_swift.REQUIREMENT}'", ms_swift.is_supported(version)
    yield Finding(section, "python", f"{platform.python_version()} in {sys.executable}")
    yield Finding(section, "lazyshard", __version__)
    there = f"not installed: {remedy}" if version is None else f"{version} in {ms_swift.folder()}"
    if version is not None and not supported:
        there += f"; lazyshard supports {ms_swift.SUPPORTED}: {remedy}"
    yield Finding(section, ms_swift.DISTRIBUTION, there, supported)
    for name in (*_ANY, *ms_swift.DEPENDENCIES):
        found = ms_swift.distribution_version(name)
        if name in needed:
            yield Finding(section, name, found or f"not installed: pip install {name}", found is not None)
        else:
            yield Finding(section, name, found or "not installed, and not needed by this ms-swift")


def _startup() -> Iterator[Finding]:
    # Only these folders count: copies elsewhere on sys.path, such as that of a checkout, are never read.
    places = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    files = [path for path in dict.fromkeys(Path(place, _PTH) for place in places) if path.is_file()]
    missing = f"not in {' or '.join(places)}: install lazyshard with pip into this environment"
    yield Finding("start-up", _PTH, ", ".join(map(str, files)) or missing, bool(files))
    active = hook.active()
    idle = f"not active in this interpreter, which did not read {_PTH} at its start: see above, and do not use -S"
    yield Finding("start-up", "finder", "active in this interpreter" if active else idle, active)


def _verdict(version: str | None, needed: Sequence[str]) -> tuple[str, bool]:
    """Returns what the command would do, and whether it works."""
    missing = [name for name in needed if ms_swift.distribution_version(name) is None]
    if "mcore-bridge" in needed and importlib.util.find_spec("transformer_engine") is None:
        # Distributions of several names contain it.
        missing.append("transformer_engine, which mcore-bridge imports")
    if version is None:
        return "cannot start: ms-swift is not installed", False
    if missing:
        return f"does not start, with or without the option; not installed: {', '.join(missing)}", False
    if not hook.active():
        return "refuses the option, which is unknown to ms-swift: lazyshard is not active in this interpreter", False
    if ms_swift.is_too_old(version):
        return f"refuses the option: needs ms-swift {ms_swift.needed()}", False
    if not ms_swift.is_supported(version):
        return f"may run: not tested with ms-swift {version}; it stops immediately if a hook does not fit", False
    return "runs: every rank reads its own chunks", True
