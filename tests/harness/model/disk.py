"""A filesystem as small as a value. After a power cut a name stands for whatever it stood for since its directory was
synced, each *by itself*, a file holds whatever it held since it was, or a torn form: ext4 and xfs keep much more."""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from lazyshard.format.records import TEMPORARY

Content: TypeAlias = tuple[Any, ...]  # What is in a file, as ("rows", 0); or one of the three below
Step: TypeAlias = tuple[Any, ...]  # as ("rename", "stream/.tmp/head.json.a", "stream/head.json")
FOLDER: Final[Content] = ("folder",)
SHORT: Final[Content] = ("short",)  # Empty, or cut off somewhere
ZEROS: Final[Content] = ("zeros",)  # As long as it should be, with other bytes; told apart by lengths alone
_NOTHING: Final = 0
_TEMPORARY: Final = f"/{TEMPORARY}"
_LEFT: Final = "/left"  # The directory that stands for all in `.tmp/` that may be back


class Disk(NamedTuple):
    names: tuple[tuple[str, int, tuple[int, ...]], ...] = ()  # path, its file (0: none), what else after a power cut
    files: tuple[tuple[Content, tuple[Content, ...]], ...] = ()  # content, what else after a power cut

    def visible(self) -> dict[str, Content]:
        return {path: self.files[file - 1][0] for path, file, _ in self.names if file}

    def all_names(self) -> Iterator[str]:
        return (path for path, _, _ in self.names)


def folder_of(path: str) -> str:
    return path.rpartition("/")[0]


def is_junk(path: str) -> bool:
    folder, _, name = path.rpartition("/")
    return f"{_TEMPORARY}/" in path or (folder.endswith("/cursors") and name.startswith("."))


class _Draft:
    def __init__(self, disk: Disk) -> None:
        self.now = {path: file for path, file, _ in disk.names}
        self.others = {path: set(others) for path, _, others in disk.names}
        self.files = {number: (value, set(others)) for number, (value, others) in enumerate(disk.files, 1)}

    def put(self, path: str, file: int) -> None:
        folder = folder_of(path)
        assert not folder or self.now.get(folder), path
        before = self.now.get(path, _NOTHING)
        self.now[path] = file
        if before != file:
            others = self.others.setdefault(path, set())
            others.add(before)
            others.discard(file)

    def new(self, value: Content) -> int:
        number = max(self.files, default=0) + 1
        self.files[number] = (value, set())
        return number

    def freeze(self) -> Disk:
        """Returns the disk, files numbered by where they are first named, so that equal disks are equal values."""
        numbers = {_NOTHING: _NOTHING}
        names = []
        for path in sorted(self.now):
            file, others = self.now[path], self.others.get(path, ())
            if not file and not others:
                continue
            if file not in numbers:
                numbers[file] = len(numbers)
            if others:
                for one in sorted(others, key=self._form):
                    numbers.setdefault(one, len(numbers))
                names.append((path, numbers[file], tuple(sorted(numbers[one] for one in others))))
            else:
                names.append((path, numbers[file], ()))
        del numbers[_NOTHING]
        files = tuple((value, tuple(sorted(others or ()))) for value, others in map(self.files.__getitem__, numbers))
        return Disk(tuple(names), files)

    def _form(self, file: int) -> tuple[Any, ...]:
        return (file, ()) if not file else (1, self.files[file][0], tuple(sorted(self.files[file][1])), file)


def do(disk: Disk, step: Step) -> Disk:
    """Returns the disk after a step that touches files. Raises KeyError: there is nothing of that name."""
    draft = _Draft(disk)
    kind, path = step[0], step[1]
    if kind == "create":
        draft.put(path, draft.new(SHORT))
    elif kind == "truncate":
        _truncate(draft, path)
    elif kind == "write":
        _write(draft, path, step[2])
    elif kind == "sync":
        file = draft.now[path]
        draft.files[file] = (draft.files[file][0], set())
    elif kind in ("link", "rename"):
        file = draft.now[path]
        assert file, path
        draft.put(step[2], file)
        if kind == "rename":
            draft.put(path, _NOTHING)
            _move_along(draft, path, step[2])
    elif kind == "mkdir":
        again = [one for one in draft.others.get(path, ()) if one]  # One directory is as good as another
        draft.put(path, again[0] if again else draft.new(FOLDER))
    elif kind == "sync_directory":
        _sync_directory(draft, path)
    elif kind == "unlink" and not draft.now.get(path):
        raise KeyError(path)
    elif kind in ("remove", "unlink") or (
        kind == "rmdir" and not any(draft.now[one] for one in draft.now if folder_of(one) == path)
    ):
        draft.put(path, _NOTHING)
    else:
        assert kind == "rmdir", step
    return draft.freeze()


def _move_along(draft: _Draft, before: str, after: str) -> None:
    for path in [one for one in draft.now if one.startswith(f"{before}/")]:
        name = after + path.removeprefix(before)
        draft.now[name], draft.others[name] = draft.now.pop(path), draft.others.pop(path, set())


def _truncate(draft: _Draft, path: str) -> None:
    file = draft.now.get(path, _NOTHING)
    if file:
        value, others = draft.files[file]  # Whatever other name the file has
        draft.files[file] = (SHORT, (others | {value}) - {SHORT})
    else:
        draft.put(path, draft.new(SHORT))


def _write(draft: _Draft, path: str, value: Content) -> None:
    before, others = draft.files[draft.now[path]]
    torn = {SHORT, ZEROS} if value[0] == "rows" else {SHORT}
    draft.files[draft.now[path]] = (value, (others | torn | {before}) - {value})


def _sync_directory(draft: _Draft, folder: str) -> None:
    for path in [path for path in draft.now if folder_of(path) == folder]:
        draft.others[path] = set()
        if not draft.now[path]:
            # What was in a directory that is gone for good is gone too.
            for below in [one for one in draft.now if one.startswith(f"{path}/")]:
                draft.now[below], draft.others[below] = _NOTHING, set()


def without_junk(disk: Disk, stopped: Collection[str] = ()) -> Disk:
    """Returns a disk with less to tell of temporary files, which nothing reads: of those in `.tmp/` that are gone but
    may come back, and of a stopped process all, one stands for all. `stopped`: "producer" or "consumer"."""
    junk = [(path, file) for path, file, _ in disk.names if is_junk(path) and not path.endswith(_LEFT)]
    folded = [path for path, file in junk if not file or _maker(path) in stopped]
    if not folded:
        return disk
    draft = _Draft(disk)
    path = next((path for path in draft.now if path.endswith(_LEFT)), "")
    there = bool(draft.now.get(path))
    maybe = bool(draft.others.get(path))
    for path in folded:
        file = draft.now[path]
        if _maker(path) == "producer":
            there |= bool(file)
            maybe |= bool(draft.others[path]) or not file
        draft.now[path], draft.others[path] = _NOTHING, set()
    if there or maybe:
        path = next(path for path in draft.now if path.endswith(_TEMPORARY)) + _LEFT
        left = draft.new(FOLDER)
        draft.now[path] = left if there else _NOTHING
        draft.others[path] = {_NOTHING if there else left} if maybe else set()
    return draft.freeze()


def _maker(path: str) -> str:
    return "producer" if f"{_TEMPORARY}/" in path else "consumer"


def settle(disk: Disk, places: Collection[str] = (_TEMPORARY,), gone: Callable[[str], bool] = lambda _: False) -> Disk:
    """Returns a disk on which all names with one of `places` in them are durable, those that are `gone` removed."""
    found = [one for one in disk.names if any(place in one[0] for place in places)]
    if not any(others or not file or gone(path) for path, file, others in found):
        return disk
    draft = _Draft(disk)
    for path, _, _ in found:
        draft.others[path] = set()
        if gone(path):
            draft.now[path] = _NOTHING
    return draft.freeze()


def as_hint(disk: Disk, *paths: str) -> Disk:
    """Returns a disk on which what may be lost of these files is lost whole: who reads an older one does less."""
    draft = _Draft(disk)
    for path in paths:
        file = draft.now.get(path, _NOTHING)
        if file and (draft.others[path] or draft.files[file][1]):
            draft.others[path] = {_NOTHING}
            draft.files[file] = (draft.files[file][0], set())
    return draft.freeze()


def power_cuts(disk: Disk) -> tuple[Disk, ...]:
    sure = [(path, file) for path, file, others in disk.names if not others]
    doubtful = [(path, (file, *others)) for path, file, others in disk.names if others]
    found: dict[Disk, None] = {}
    for chosen in itertools.product(*(files for _, files in doubtful)):
        names = dict(sure) | {path: file for (path, _), file in zip(doubtful, chosen, strict=True)}
        for left in _contents(disk, _reachable(names)):
            found[left] = None
    return tuple(found)


def _reachable(names: Mapping[str, int]) -> dict[str, int]:
    kept: dict[str, int] = {}
    for path in sorted(names):
        if names[path] and (not folder_of(path) or folder_of(path) in kept):
            kept[path] = names[path]
    return kept


def _contents(disk: Disk, names: Mapping[str, int]) -> Iterable[Disk]:
    numbers = sorted(set(names.values()))
    choices = [(value, *others) for value, others in (disk.files[number - 1] for number in numbers)]
    for chosen in itertools.product(*choices):
        draft = _Draft(Disk())
        draft.now = dict(names)
        draft.files = {number: (value, set()) for number, value in zip(numbers, chosen, strict=True)}
        yield draft.freeze()
