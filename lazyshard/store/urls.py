"""Streams by URL: `stream_path` decides whether a directory was given or an object store.

What it returns for a URL is a path too, so that names are joined to it and messages show it as anywhere else; but
whatever takes it for one of this machine's filesystem fails at once.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, Final, NoReturn

from lazyshard.errors import StreamMissing, redact

if TYPE_CHECKING:
    from lazyshard.store.objects import ObjectStore

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://.+", re.DOTALL)

_LOCAL: Final = ("file", "local")

_stores: dict[tuple[str, str | None], ObjectStore] = {}
"""By bucket and patience: the streams of a bucket share its connections."""


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
        from lazyshard.store.objects import PATIENCE_VARIABLE, ObjectStore

        scheme, bucket = self.parts[:2]
        key = f"{scheme}//{bucket}", os.environ.get(PATIENCE_VARIABLE)
        if key not in _stores:
            _stores[key] = ObjectStore(key[0])
        return _stores[key]

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
    if is_url(text):
        scheme, rest = text.split("://", 1)
        return UrlPath(f"{scheme.lower()}:", rest.strip("/"))
    for scheme in _LOCAL:
        if text.lower().startswith(f"{scheme}://"):
            return Path("/", text[len(scheme) + 3 :])
    return Path(text)


def stream_name(directory: str | os.PathLike[str]) -> str:
    """Returns what tells one stream's place from another's, and opens it: its absolute path, or its URL as given."""
    path = stream_path(directory)
    return path.url if isinstance(path, UrlPath) else os.path.abspath(path)


def check_place(directory: str | os.PathLike[str]) -> None:
    """Raises StreamMissing for a path at which no stream will appear: there is not even the directory above.

    Only where that is missing, those further up are listed too: a network filesystem may remember for up to a minute
    that something was not there, and lists it all the same.
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
