"""Changes of a filesystem on the near side, and when and how the far side sees them."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from lazyshard.filesystem.side import Side, error_name

REPLACEMENTS: Final = 200  # Enough that a replacement in two steps, with a moment of nothing in between, is met
NAME_LENGTHS: Final = (255, 226, 143, 100, 64)  # What most have, the longest name of a consumer takes, ..., none takes
ENTER_S: Final = 15.0  # A folder just made, under a name that nobody has asked for, shows at once on anything usable
_NO_ROOM: Final = ("ENOSPC", "EDQUOT")


class Untried(Exception):
    """It could not be tried: the far side did not answer, the two folders are not the same one, or the disk is full."""


class Far:
    """The far side: a process that serves `Side`, here or elsewhere, started by a command. A context manager."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)

    def __enter__(self) -> Far:
        """Starts it; raises Untried where there is no such command."""
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, text=True)  # noqa: S603 - as asked
        except OSError as cause:
            raise Untried(f"the command of the other side cannot be started ({self._command[0]}): {cause}") from cause
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        return self

    def __exit__(self, *_: object) -> None:
        """Ends it: a far side whose input ends has nothing left to do."""
        # Of one that has died something may be left to write.
        with contextlib.suppress(OSError):
            self._stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stdout.close()

    def ask(self, *question: Any) -> None:
        """Asks for an operation; `answer` waits for it."""
        try:
            self._stdin.write(json.dumps(question) + "\n")
            self._stdin.flush()
        except OSError as cause:
            raise self._silent() from cause

    def answer(self) -> Any:
        """Returns what the last question gave. Raises OSError where the filesystem refused there, Untried for none."""
        line = self._stdout.readline().strip()
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or not answer.keys() & {"error", "done"}:
            raise self._silent(line)
        if "error" in answer:
            raise OSError(0, answer["error"])
        return answer["done"]

    def do(self, *question: Any) -> Any:
        """Asks and waits."""
        self.ask(*question)
        return self.answer()

    def _silent(self, said: str = "") -> Untried:
        words = f": it said {said}" if said else ""
        return Untried(f"no answer from the other side ({' '.join(self._command)}){words}")


@dataclass(frozen=True)
class Sightings:
    """What was found. Seconds count from the end of the change; an error is empty for none."""

    waited_s: float  # until all of `seen` had shown, or no longer
    near: str = ""  # type of the filesystem on the near side
    far: str = ""
    round_trip_s: float = 0.0  # what a question to the far side and its answer take; part of all seconds below
    seen: dict[str, float | None] = field(default_factory=dict)  # by label of `LOOKS`; None: longer than was waited
    torn: int = 0  # looks, of those at names that are new, that found a renamed file cut or mixed
    errors: dict[str, int] = field(default_factory=dict)  # by name the other errors of these looks
    storm: dict[str, Any] = field(default_factory=dict)  # while a file was replaced again and again, see `Side.storm`
    rename: str = ""  # the error of renaming over an existing file
    linked_over: bool | None = False  # a second hard link took a name that was there; None where there are none
    lock: str = "holds"  # flock between the two sides: "holds", "does not hold" or the error
    sync_file: str = ""  # the error of syncing a file
    sync_folder: str = ""  # of syncing a directory
    unlinked: str = "read on"  # what the far side gets from a file it holds open that was removed, "cut" or the error
    replaced: str = "read on"  # likewise of one that was replaced; "read on" is the old content
    longest_name: int = NAME_LENGTHS[0]  # the largest of `NAME_LENGTHS` that a name may have, in bytes


LOOKS: Final[dict[str, tuple[str, str, int]]] = {
    "new, by open": ("open", "fresh/new", 7),
    "new, by open, asked for before": ("open", "asked/new", 7),
    "new, by listing": ("list", "list/new", 7),
    "replaced, by open": ("open", "replaced/file", 9),
    "grown, by open": ("open", "grown/file", 9),
}
"""Each in a folder of its own, so that one way of looking does not refresh what another one has cached."""


def measure(folder: str, far: Far, longest: float, left: Callable[[str], None]) -> Sightings:
    """Measures everything, in a folder made and removed below the given one. Takes about as long as the slowest sight.

    What does not show is waited for `longest` seconds; `left` is told of a folder that could not be removed.
    """
    near = Side(folder)
    name = f".verify-filesystem-{secrets.token_hex(4)}"
    kinds = near.hello(), far.do("hello")
    near.make_folder(name)
    try:
        if not far.do("enter", name, ENTER_S):
            raise Untried(
                f"what was made in {folder} does not show on the other side within {ENTER_S:.0f} s: are both the "
                f"same folder?"
            )
        started = time.monotonic()
        far.do("look", "list", "nothing")
        round_trip = time.monotonic() - started
        rename = _error(near, "put", "rename", 1) or _error(near, "put", "rename", 2)
        if rename:
            return Sightings(0.0, *kinds, round_trip, rename=rename)
        seen, torn, errors, waited = _sights(near, far, longest)
        return Sightings(
            waited,
            *kinds,
            round_trip,
            seen=seen,
            torn=torn,
            errors=errors,
            storm=_storm(near, far, longest),
            linked_over=_linked_over(near, far),
            lock=_lock(near, far),
            sync_file=_error(near, "sync_file", "sync"),
            sync_folder=_error(near, "sync_folder"),
            unlinked=_held(near, far, "unlinked", removed=True),
            replaced=_held(near, far, "held", removed=False),
            longest_name=near.longest_name(NAME_LENGTHS),
        )
    finally:
        # What is left does no harm, and its name says whose it was.
        with contextlib.suppress(Untried, OSError):
            far.do("clear")
        for path in near.clear()[-1:]:
            held = ", ".join(sorted(os.listdir(path))) or "nothing that this side can see"
            left(f"{path} could not be removed whole: remove it by hand (it holds {held})")


def _sights(near: Side, far: Far, longest: float) -> tuple[dict[str, float | None], int, dict[str, int], float]:
    for _, name, _ in LOOKS.values():
        near.make_sub_folder(name.partition("/")[0])
    for kind, name, _ in LOOKS.values():
        if name.startswith("grown"):
            near.begin(name, 9)
        elif name.endswith("/file"):
            near.put(name, 3)
        # The far side has asked, so that it holds what its caches hold: nothing, or the old content. Of one new file
        # it knows not even the name.
        if name != "fresh/new":
            far.do("look", kind, name)
    changed: dict[str, float] = {}
    for label, (_, name, version) in LOOKS.items():
        near.answer("grow" if name.startswith("grown") else "put", [name, version])
        changed[label] = time.monotonic()
    asked = time.monotonic()
    found = far.do("watch", LOOKS, longest)
    waited = time.monotonic() - asked
    seen = {
        label: None if state["seconds"] is None else asked - changed[label] + state["seconds"]
        for label, state in found.items()
    }
    # A file that grows is half at first. One that was replaced may come cut, by the size that was known of it, and is
    # read again, as in the storm: how long that lasts is what is measured of it.
    torn = sum(state["torn"] for label, state in found.items() if label.startswith("new"))
    errors = sum((Counter(state["errors"]) for state in found.values()), Counter())
    return seen, torn, dict(errors), waited


def _storm(near: Side, far: Far, longest: float) -> dict[str, Any]:
    near.put("storm", 1)
    far.do("look", "open", "storm")
    far.ask("storm", "storm", REPLACEMENTS, longest)
    for version in range(2, REPLACEMENTS + 1):
        near.put("storm", version)
    found: dict[str, Any] = far.answer()
    return found


def _linked_over(near: Side, far: Far) -> bool | None:
    # The far side remembers that the name is not there: what counts is what the server says.
    far.do("look", "open", "linked")
    near.put("linked-near", 1)
    far.do("put", "linked-far", 2)
    try:
        far.do("link", "linked-far", "linked-again")
        near.link("linked-near", "linked")
    except OSError:
        return None
    try:
        far.do("link", "linked-far", "linked")
    except OSError:
        return False
    return True


def _lock(near: Side, far: Far) -> str:
    try:
        if not near.lock("lock"):
            return "does not hold"
        try:
            return "does not hold" if far.do("lock", "lock") else "holds"
        finally:
            near.let_go("lock")
            far.do("let_go", "lock")
    except OSError as error:
        return _name(error)


def _held(near: Side, far: Far, name: str, *, removed: bool) -> str:
    near.put(name, 5)
    try:
        far.do("hold", name)
        if removed:
            near.remove(name)
        else:
            near.put(name, 6)
        return "read on" if far.do("read_held", name) == 5 else "cut"
    except OSError as error:
        return _name(error)
    finally:
        far.do("let_go", name)


def _error(side: Side, operation: str, *arguments: Any) -> str:
    try:
        side.answer(operation, arguments)
    except OSError as error:
        return _name(error)
    return ""


def _name(error: OSError) -> str:
    # Of the far side's errors only the name comes here.
    name = error_name(error) if error.errno else str(error.strerror)
    if name in _NO_ROOM:
        raise Untried(f"there is no room left on the filesystem ({name}): make some, and try again") from error
    return name
