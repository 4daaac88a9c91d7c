"""Data sets of Hugging Face `datasets` as a source: directories written by `Dataset.save_to_disk`.

`state.json` names the Arrow files in their order. Every column is given, whatever format was set: formats are views.
"""

from __future__ import annotations

import json
import os
from typing import Any, Final

from lazyshard_producer.configuration.settings import SourceSettings
from lazyshard_producer.sources.arrow import ArrowTable
from lazyshard_producer.sources.source import Context
from lazyshard_producer.sources.source_file import refuse_os_error
from lazyshard_producer.sources.table_files import refuse_table
from lazyshard_producer.sources.tables import TableSource

STATE: Final = "state.json"
INFO: Final = "dataset_info.json"
SPLITS: Final = "dataset_dict.json"

_HINT: Final = "; save it with `Dataset.save_to_disk`"


def is_hugging_face(path: str) -> bool:
    """Whether a directory holds what `datasets` writes: a data set, a dictionary of them, or a folder of its cache."""
    return any(os.path.isfile(os.path.join(path, name)) for name in (STATE, INFO, SPLITS))


def open_hugging_face(settings: SourceSettings, position: dict[str, Any] | None, context: Context) -> TableSource:
    """Opens a directory of `Dataset.save_to_disk` as a source of rows.

    Args:
        settings: of which only the path counts.
        position: where to go on, None at the start.
        context: what sources are told about the run.

    Raises:
        SourceRefused: it is a dictionary of data sets or a selection of rows, it cannot be read, or what was read of it
            is not as it was.
        ExtraMissing: pyarrow is not installed.
    """
    files = find_data_files(settings.path)
    return TableSource("huggingface", settings.path, files, ArrowTable, position, context)


def find_data_files(directory: str) -> list[str]:
    """Returns the paths of a data set's Arrow files, in its order.

    Raises:
        SourceRefused: the directory holds no single data set, or one that is a selection of other rows.
    """
    if os.path.isfile(os.path.join(directory, SPLITS)):
        splits = [os.path.join(directory, str(name)) for name in _load(directory, SPLITS).get("splits", [])]
        raise refuse_table(directory, "one data set", f"a DatasetDict; give one of its splits: {', '.join(splits)}")
    if not os.path.isfile(os.path.join(directory, STATE)):
        actual = f"no {STATE}: a folder of the cache of `datasets`?"
        raise refuse_table(directory, "a saved data set", actual, _HINT)
    state = _load(directory, STATE)
    if state.get("_indices_files"):
        hint = "; load it, call `flatten_indices()`, and save it again"
        raise refuse_table(directory, "a data set with its rows in order", "a selection of rows by indices", hint)
    entries = state.get("_data_files")
    names = [_file_name(entry) for entry in entries] if isinstance(entries, list) else []
    if not names or None in names:
        raise refuse_table(os.path.join(directory, STATE), "the names of its data files", repr(entries)[:120], _HINT)
    return [os.path.join(directory, name) for name in names if name is not None]


def _file_name(entry: Any) -> str | None:
    name = entry.get("filename") if isinstance(entry, dict) else None
    return name if isinstance(name, str) and name and name == os.path.basename(name) else None


def _load(directory: str, name: str) -> dict[str, Any]:
    path = os.path.join(directory, name)
    try:
        with open(path, "rb") as file:
            found = json.load(file)
    except OSError as cause:
        raise refuse_os_error(path, cause) from cause
    except ValueError as cause:
        raise refuse_table(path, "JSON", str(cause), _HINT) from cause
    if not isinstance(found, dict):
        raise refuse_table(path, "a JSON object", repr(found)[:120], _HINT)
    return found
