"""Programs of the machine that some faults need; where one is missing, a test skips with the reason."""

from __future__ import annotations

import os
import shutil

import pytest

__all__ = ["find_tool", "tool"]


def find_tool(name: str) -> str | None:
    """Returns the path of a program; the folders of the administrator's are looked through as well."""
    return shutil.which(
        name, path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"))
    )


def tool(name: str) -> str:
    """Returns the path of a program, or skips the test."""
    found = find_tool(name)
    if found is None:
        pytest.skip(f"needs {name}, which is not on this machine")
    return found
