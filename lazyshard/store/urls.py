"""Streams by URL: `stream_path` decides whether a directory was given or an object store.

What it returns for a URL is a path too, but whatever takes it for one of this machine's filesystem fails at once.
"""

from __future__ import annotations

import contextlib
import os
import re
from functools import cache
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, Final, NoReturn

from lazyshard.errors import StreamMissing, redact

if TYPE_CHECKING:
    from lazyshard.store.objects import ObjectStore

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.+)", re.DOTALL)

_LOCAL: Final = ("file", "local")


@cache
def _store(url: str, patience: str | None) -> ObjectStore:
    """Returns the store of a bucket: its streams share its connections."""
    from lazyshard.store.objects import ObjectStore

    return ObjectStore(url)


class UrlPath(PosixPath):
    """The URL of a stream, or of an object of it. Joined and taken apart as a path; its text leaves out credentials."""

    __slots__ = ()

    def __str__(self) -> str:
        """Returns the URL without its credentials."""
        return redact(self.url)

    @property
    def url(self) -> str:
        """The URL as it was given, credentials included: only to open it, never to be shown or kept."""
        scheme, *names = self.parts
        return f"{scheme}//{'/'.join(names)}"

    def __fspath__(self) -> NoReturn:
        raise TypeError(f"{self}: an object store's URL is no path of this machine's filesystem")

    @property
    def store(self) -> ObjectStore:
        """The store of its bucket."""
        return _store("//".join(self.parts[:2]), os.environ.get("LAZYSHARD_OBJECTS_PATIENCE_S"))

    @property
    def key(self) -> str:
        """Its name in the store."""
        return "/".join(self.parts[2:])


def is_url(directory: str | os.PathLike[str]) -> bool:
    """Returns whether this is the URL of an object store; ``file://`` leads to a directory, and is none."""
    if isinstance(directory, UrlPath):
        return True
    found = _URL.fullmatch(os.fspath(directory))
    return found is not None and found[1].lower() not in _LOCAL


def stream_path(directory: str | os.PathLike[str]) -> Path:
    """Returns the path of a stream's directory: a `UrlPath` of a URL as fsspec takes it, but of ``file://``."""
    if isinstance(directory, UrlPath):
        return directory
    text = os.fspath(directory)
    if (found := _URL.fullmatch(text)) is None:
        return Path(text)
    scheme, rest = found[1].lower(), found[2]
    return Path("/", rest) if scheme in _LOCAL else UrlPath(f"{scheme}:", rest.strip("/"))


def stream_name(directory: str | os.PathLike[str]) -> str:
    """Returns what tells one stream's place from another's, and opens it: its absolute path, or its URL as given."""
    path = stream_path(directory)
    return path.url if isinstance(path, UrlPath) else os.path.abspath(path)


def check_place(directory: str | os.PathLike[str]) -> None:
    """Raises StreamMissing for a path at which no stream will appear: there is not even the directory above.

    Those further up are listed too: a network filesystem may remember for a minute that something was not there.
    """
    path = stream_path(directory)
    if isinstance(path, UrlPath):
        return
    parent = Path(os.path.abspath(path)).parent
    try:
        os.stat(parent)
        return
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError:
        # Whoever opens the stream tells.
        return
    missing = parent
    while not os.path.isdir(missing.parent):
        missing = missing.parent
    with contextlib.suppress(OSError):
        if missing.name in os.listdir(missing.parent):
            return
    what = f"{path}: no stream is there, nor is {path.parent}, to make one in: see whether the path is right"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        what += "; the name of a data set on a hub is none: streams are directories, or URLs of object stores"
    raise StreamMissing(what, directory=str(path))


def is_folder(directory: str | os.PathLike[str]) -> bool:
    """Returns whether there is such a directory; of a URL it is not asked, True."""
    path = stream_path(directory)
    return isinstance(path, UrlPath) or os.path.isdir(path)
