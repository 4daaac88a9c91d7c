"""pyarrow, imported when the first source needs it: the extra `arrow`, which other runs do without."""

from __future__ import annotations

import importlib
from typing import Any

from lazyshard_producer.errors import ExtraMissing


def load_pyarrow(path: str, module: str = "pyarrow") -> Any:
    """Returns pyarrow, or one of its modules.

    Args:
        path: the source that needs it, for the message.
        module: the module's whole name.

    Raises:
        ExtraMissing: it is not installed, or cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as cause:
        missing = isinstance(cause, ModuleNotFoundError) and (cause.name or "").partition(".")[0] == "pyarrow"
        found = "it is not installed" if missing else f"importing it failed: {cause}"
        raise ExtraMissing(
            f"{path}: reading it needs pyarrow, and {found}: pip install 'lazyshard[arrow]'",
            package="pyarrow",
            extra="arrow",
        ) from cause
