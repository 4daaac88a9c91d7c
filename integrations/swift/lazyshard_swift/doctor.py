"""What `lazyshard doctor swift` finds: versions, the start-up file, the hook points, and what they come to.

Nothing of ms-swift, torch or Megatron is imported, so it takes a moment only, and it works where one of them is broken.
"""

from __future__ import annotations

import platform
import site
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final

from lazyshard import __version__
from lazyshard.examination import Finding
from lazyshard_swift import hook, ms_swift

_OPTIONS: Final = "lazyshard_swift.arguments"
"""The extension without which ms-swift does not know the option."""
_PTH: Final = "lazyshard_swift.pth"
_ANY: Final = ("torch", "transformers")


def examine() -> list[Finding]:
    """Returns the findings; the entry point of the group `lazyshard.doctor`."""
    version, folder = ms_swift.version(), ms_swift.folder()
    dependencies = ms_swift.DEPENDENCIES if ms_swift.needs_bridge(version) else ms_swift.DEPENDENCIES[:1]
    needed = {ms_swift.MEGATRON: (*_ANY, *dependencies), ms_swift.SWIFT: _ANY}
    found = ms_swift.check_points(ms_swift.POINTS, folder) if version is not None and folder is not None else []
    return [
        *_versions(version, folder, needed[ms_swift.MEGATRON]),
        *_startup(),
        *(Finding("hook points", checked.point.title, _answer(checked), checked.problem is None) for checked in found),
        *(
            Finding("verdict", f"{command} --sharded_lazy true", *_verdict(command, version, names, found))
            for command, names in needed.items()
        ),
    ]


def _versions(version: str | None, folder: Path | None, needed: Collection[str]) -> Iterator[Finding]:
    section, remedy = "versions", f"pip install '{ms_swift.REQUIREMENT}'"
    yield Finding(section, "python", f"{platform.python_version()} in {sys.executable}")
    yield Finding(section, "lazyshard", __version__)
    there = f"{version} in {folder}"
    if version is None:
        there = f"not installed: {remedy}"
    elif not ms_swift.is_supported(version):
        there += f"; lazyshard is made for {ms_swift.SUPPORTED}: {remedy}"
    yield Finding(section, ms_swift.DISTRIBUTION, there, ms_swift.is_supported(version))
    for name in (*_ANY, *ms_swift.DEPENDENCIES):
        found = ms_swift.distribution_version(name)
        if name in needed:
            yield Finding(section, name, found or f"not installed: pip install {name}", found is not None)
        else:
            yield Finding(section, name, found or "not installed, and not needed by this ms-swift")


def _startup() -> Iterator[Finding]:
    # These folders alone count. A copy elsewhere on sys.path, such as a checkout's own, is never read.
    places = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    files = [path for path in dict.fromkeys(Path(place, _PTH) for place in places) if path.is_file()]
    missing = f"not in {' or '.join(places)}: install lazyshard with pip into this environment"
    yield Finding("start-up", _PTH, ", ".join(map(str, files)) or missing, bool(files))
    active = hook.active()
    idle = f"not active in this interpreter, which has not read {_PTH} at its start: see above, and leave out -S"
    yield Finding("start-up", "finder", "active in this interpreter" if active else idle, active)
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
    command: str, version: str | None, needed: Collection[str], found: Collection[ms_swift.CheckedHookPoint]
) -> tuple[str, bool]:
    """Returns what the command would do, and whether that is what is wanted."""
    own = [checked for checked in found if command in checked.point.commands]
    modules = {checked.point.module for checked in own}
    bad = {checked.point.title: checked.point.module for checked in own if checked.problem is not None}
    bad |= {name: module for module, name in hook.EXTENSIONS.items() if module in modules and not _is_there(name)}
    missing = [name for name in needed if ms_swift.distribution_version(name) is None]
    if version is None:
        return "cannot start: ms-swift is not installed", False
    if missing:
        return f"does not start, with or without the option: {_listed(missing)} not installed", False
    unknown = "refuses the option, which ms-swift does not know: "
    if not hook.active():
        return f"{unknown}lazyshard is not active in this interpreter", False
    if bad:
        again = "install lazyshard and ms-swift again"
        remedy = again if ms_swift.is_supported(version) else f"pip install '{ms_swift.REQUIREMENT}'"
        refuses = any(hook.EXTENSIONS[module] == _OPTIONS for module in bad.values())
        return f"{unknown if refuses else 'stops before training: '}{_listed(list(bad))} missing; {remedy}", False
    if not ms_swift.is_supported(version):
        return f"may run: all hook points are there, but nobody has tried it with ms-swift {version}", False
    return "runs: every rank reads its own chunks", True


def _listed(names: Sequence[str]) -> str:
    """Returns names with the verb that goes with them."""
    listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    return f"{listed} {'is' if len(names) == 1 else 'are'}"
