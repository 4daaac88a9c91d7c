"""Version 0 of the configuration: flat, as torchtune's recipes have it; read into the entries of version 1.

::

    tokenizer: {path: models/tokenizer}
    dataset:                              one, or a list of them
      - source: /shared/chat
        weight: 0.8
        filter_fn: my_rows:is_long        applied first
        message_transform: my_rows:to_messages
    batch_size: 8
    num_workers: 4
    drop_last: true                       false is at_end: loop
    seed: 0

Each value keeps the path and line where it stands in the file.
"""

from __future__ import annotations

from typing import Final

from lazyshard.config.entries import Entry
from lazyshard.config.mistakes import Mistake, nearest

__all__ = ["NOTICE", "is_version_0", "upgraded"]

NOTICE: Final = (
    "this is the flat form of version 0, which later releases will not read any more. In version 1 `version: 1` stands "
    "at the top; `dataset:` is a list `datasets:`; its `source:` is `path:`; its `filter_fn:` and `message_transform:` "
    "are entries of a list `steps:`; batch_size, num_workers, collate_fn and pin_memory stand under `dataloader:`, "
    "and drop_last is `at_end:` there"
)

_SAME: Final = ("tokenizer", "num_samples", "stopping", "micro_batches_per_step", "seed", "max_wait", "consumer")
_LOADER: Final = ("batch_size", "num_workers", "collate_fn", "pin_memory")
_ENDS: Final = {True: "drop", False: "loop"}


def is_version_0(entries: dict[str, Entry]) -> bool:
    """Returns whether a configuration is of version 0: it says so, or says none and has a ``dataset``."""
    version = entries.get("version")
    return "dataset" in entries if version is None else type(version.value) is int and version.value == 0


def upgraded(whole: Entry, mistakes: list[Mistake]) -> Entry:
    """Returns the entries of version 1. Takes note of keys that version 0 does not know."""
    entries: dict[str, Entry] = whole.value
    known = ("version", "dataset", *_SAME, *_LOADER, "drop_last")
    for name, entry in entries.items():
        if name not in known:
            mistakes.append(Mistake(entry.path, entry.line, f"unknown key; {nearest(name, known)}"))
    found: dict[str, Entry] = {name: entries[name] for name in _SAME if name in entries}
    found["version"] = Entry(1, "version", whole.line)
    if "dataset" in entries:
        given = entries["dataset"]
        one_by_one = given.value if isinstance(given.value, list) else [given]
        found["datasets"] = Entry([_dataset(entry) for entry in one_by_one], given.path, given.line)
    loader: dict[str, Entry] = {name: entries[name] for name in _LOADER if name in entries}
    if "drop_last" in entries:
        drop = entries["drop_last"]
        if type(drop.value) is bool:
            loader["at_end"] = Entry(_ENDS[drop.value], drop.path, drop.line)
        else:
            mistakes.append(Mistake(drop.path, drop.line, f"expected true or false, found {drop.value!r:.100}"))
    found["dataloader"] = Entry(loader, "", whole.line)
    return Entry(found, "", whole.line)


def _dataset(entry: Entry) -> Entry:
    if not isinstance(entry.value, dict):
        return entry
    found = {name: value for name, value in entry.value.items() if name != "source"}
    if "source" in entry.value:
        found["path"] = entry.value["source"]
    # torchtune filters what it has read, and transforms what is left.
    steps = [Entry({name: found.pop(name)}, entry.path, entry.line) for name in _STEPS if name in found]
    if steps and "steps" not in found:
        found["steps"] = Entry(steps, entry.path, entry.line)
    return Entry(found, entry.path, entry.line)


_STEPS: Final = ("filter_fn", "message_transform")
