"""What `lazyshard doctor swift` finds: versions, the start-up file, the hook points, and what they come to.

Nothing of ms-swift, torch or Megatron is imported, so it takes a moment only, and it works where one of them is broken.
"""

from __future__ import annotations

import platform
import site
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from lazyshard import __version__
from lazyshard.examination import Finding
from lazyshard_swift import hook, ms_swift

_OPTIONS: Final = "lazyshard_swift.arguments"
"""The extension without which ms-swift does not know the option."""

_PTH: Final = "lazyshard_swift.pth"

_ANY: Final = ("torch", "transformers")


def applies() -> bool:
    """Returns whether there is an ms-swift to work with."""
    return ms_swift.version() is not None


def examine() -> list[Finding]:
    """Returns the findings; the entry point of the group `lazyshard.doctor`."""
    version = ms_swift.version()
    folder = ms_swift.folder()
    needed = {ms_swift.SWIFT: _ANY, ms_swift.MEGATRON: (*_ANY, *_megatron_needs(version))}
    found = ms_swift.check_points(ms_swift.POINTS, folder) if version is not None and folder is not None else []
    return [
        *_versions(version, folder, needed[ms_swift.MEGATRON]),
        *_startup(),
        *_extensions(),
        *(Finding("hook points", checked.point.title, _answer(checked), checked.problem is None) for checked in found),
        *(
            Finding("verdict", f"{command} --sharded_lazy true", text, ok)
            for command in (ms_swift.MEGATRON, ms_swift.SWIFT)
            for text, ok in [_verdict(command, version, needed[command], found)]
        ),
    ]


def _megatron_needs(version: str | None) -> tuple[str, ...]:
    bridged = (ms_swift.release(version or "") or ms_swift.BRIDGE_SINCE) >= ms_swift.BRIDGE_SINCE
    return ms_swift.DEPENDENCIES if bridged else ms_swift.DEPENDENCIES[:1]


def _versions(version: str | None, folder: Path | None, needed: Iterable[str]) -> Iterator[Finding]:
    section = "versions"
    yield Finding(section, "python", f"{platform.python_version()} in {sys.executable}")
    yield Finding(section, "lazyshard", __version__)
    if version is None:
        yield Finding(section, ms_swift.DISTRIBUTION, f"not installed: pip install '{ms_swift.REQUIREMENT}'", False)
    elif ms_swift.is_supported(version):
        yield Finding(section, ms_swift.DISTRIBUTION, f"{version} in {folder}", True)
    else:
        yield Finding(
            section,
            ms_swift.DISTRIBUTION,
            f"{version} in {folder}; lazyshard is made for {ms_swift.SUPPORTED}: pip install '{ms_swift.REQUIREMENT}'",
            False,
        )
    for name in (*_ANY, *ms_swift.DEPENDENCIES):
        there = ms_swift.distribution_version(name)
        if name in needed:
            yield Finding(section, name, there or f"not installed: pip install {name}", there is not None)
        else:
            yield Finding(section, name, there or "not installed, and not needed by this ms-swift")


def _startup() -> Iterator[Finding]:
    section = "start-up"
    # These folders alone count. A copy elsewhere on sys.path, such as a checkout's own, is never read.
    places = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    files = [path for path in dict.fromkeys(Path(place, _PTH) for place in places) if path.is_file()]
    missing = f"not in {' or '.join(places)}: install lazyshard with pip into this environment"
    yield Finding(section, _PTH, ", ".join(map(str, files)) or missing, bool(files))
    active = hook.active()
    idle = (
        f"not active in this interpreter, which has not read {_PTH} at its start: see the line above, and leave out -S"
    )
    yield Finding(section, "finder", "active in this interpreter" if active else idle, active)


def _extensions() -> Iterator[Finding]:
    for extension in dict.fromkeys(hook.EXTENSIONS.values()):
        there = _is_there(extension)
        yield Finding("extensions", extension, "there" if there else "missing: install lazyshard again", there)


def _is_there(extension: str) -> bool:
    # Not through find_spec: some of them import torch once their package looks for them.
    return Path(__file__).with_name(f"{extension.rpartition('.')[2]}.py").is_file()


def _answer(checked: ms_swift.CheckedHookPoint) -> str:
    place = checked.file if checked.line is None else f"{checked.file}:{checked.line}"
    return f"{place} ({checked.point.purpose})" if checked.problem is None else f"{place}: {checked.problem}"


def _verdict(
    command: str, version: str | None, needed: Iterable[str], found: Iterable[ms_swift.CheckedHookPoint]
) -> tuple[str, bool]:
    """Returns what the command would do, and whether that is what is wanted."""
    own = [checked for checked in found if command in checked.point.commands]
    bad = {checked.point.title: checked.point.module for checked in own if checked.problem is not None}
    bad |= {
        extension: module
        for module, extension in hook.EXTENSIONS.items()
        if any(checked.point.module == module for checked in own) and not _is_there(extension)
    }
    missing = [name for name in needed if ms_swift.distribution_version(name) is None]
    if version is None:
        return "cannot start: ms-swift is not installed", False
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        return f"does not start, with or without the option: {_listed(missing)} {verb} not installed", False
    if not hook.active():
        return "refuses the option, which ms-swift does not know: lazyshard is not active in this interpreter", False
    if any(hook.EXTENSIONS[module] == _OPTIONS for module in bad.values()):
        return f"refuses the option, which ms-swift does not know: {_lacks(bad, version)}", False
    if bad:
        return f"stops before training: {_lacks(bad, version)}", False
    if not ms_swift.is_supported(version):
        return f"may run: all hook points are there, but nobody has tried it with ms-swift {version}", False
    return "runs: every rank reads its own chunks", True


def _lacks(bad: Iterable[str], version: str) -> str:
    """Returns what is not there, and what to do."""
    names = list(bad)
    verb = "is" if len(names) == 1 else "are"
    remedy = (
        "install lazyshard and ms-swift again"
        if ms_swift.is_supported(version)
        else f"pip install '{ms_swift.REQUIREMENT}'"
    )
    return f"{_listed(names)} {verb} missing; {remedy}"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
