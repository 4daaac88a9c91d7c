"""Objects of a store (S3, or whatever fsspec has a driver for) under one URL: got, listed, put and deleted by name.

A thin shell over fsspec, which is imported when a store is first used. What this adds: a try that fails by the network
or the server is repeated with growing pauses, for a stated patience; an error says what to do, as one of ours (both in
`objects_calls`); an object is put under a condition where the store can do that, so that of two writers one knows that
it came second.

Safe under fork: each process has its own connections. Threads may share a store.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

from lazyshard.errors import redact
from lazyshard.store.objects_calls import StoreCalls, ending, patience
from lazyshard.store.objects_failures import why_failed

_MOST_BYTES: Final = 4 << 30
"""More than any object has that is read at once. Without an end, S3's driver would ask for the size first."""


class ObjectStore:
    """The objects whose names begin with one URL.

    Args:
        url: like ``s3://bucket/prefix``.
        patience_s: how many seconds to repeat what fails; None for `PATIENCE_VARIABLE`, or else `PATIENCE_S`.
        options: for fsspec's driver, beside what fsspec's own configuration says (``FSSPEC_S3_...``).

    Attributes:
        url: without the credentials that the given one may hold, for people, as is what `name_of` returns.

    Raises:
        StoreRefused: the patience is no number of seconds.

    All methods raise, beside what they say:
        StoreRefused: the store, or fsspec's driver, does not let this be done; nothing is repeated.
        StoreUnavailable: it gave no answer, or failing ones, for as long as the patience lasts.
    """

    def __init__(self, url: str, *, patience_s: float | None = None, options: Mapping[str, Any] | None = None) -> None:
        self.url = redact(url.rstrip("/"))
        self._calls = StoreCalls(url.rstrip("/"), patience() if patience_s is None else patience_s, options or {})

    @property
    def patience_s(self) -> float:
        """How many seconds what fails is repeated."""
        return self._calls.patience_s

    @property
    def is_s3(self) -> bool:
        """Whether it speaks S3."""
        return self._calls.is_s3

    @property
    def conditional(self) -> bool:
        """Whether the store itself decides which of two conditional puts comes first; else a look goes before."""
        return self.is_s3

    def name_of(self, name: str) -> str:
        """Returns the URL of an object."""
        return self._calls.name_of(name)

    def get(self, name: str, most: int = _MOST_BYTES, *, patience_s: float | None = None) -> bytes:
        """Returns an object's bytes, in one request.

        Args:
            name: of the object.
            most: how many bytes to return at the most.
            patience_s: other than the store's.

        Raises:
            FileNotFoundError: there is none; its `filename` is the URL.
        """
        return self.get_range(name, 0, most, patience_s=patience_s)

    def get_range(self, name: str, start: int, stop: int, *, patience_s: float | None = None) -> bytes:
        """Returns the bytes of [start, stop) of an object, fewer where it ends. Raises as `get` does."""

        def call(fs: Any, path: str) -> bytes:
            try:
                return bytes(ending(fs, stop - start, fs.cat_file, path, start=start, end=stop))
            except Exception as error:
                if why_failed(error).status == 416:
                    return b""
                raise

        return self._calls.do(name, "reading", call, patience_s)

    def get_tagged(self, name: str) -> tuple[bytes, str]:
        """Returns an object's bytes, and a tag that tells them from others, for `put_matching`. Raises as `get`."""

        async def read(fs: Any, path: str) -> tuple[bytes, str]:
            bucket, key, _ = fs.split_path(path)
            answer = await fs._call_s3("get_object", Bucket=bucket, Key=key)
            async with answer["Body"] as body:
                return bytes(await body.read()), str(answer["ETag"])

        def call(fs: Any, path: str) -> tuple[bytes, str]:
            if self.is_s3:
                from fsspec.asyn import sync

                found: tuple[bytes, str] = ending(fs, _MOST_BYTES, sync, fs.loop, read, fs, path)
                return found
            data = bytes(fs.cat_file(path))
            return data, _tag(data)

        return self._calls.do(name, "reading", call)

    def exists(self, name: str) -> bool:
        """Returns whether there is an object of this name."""
        try:
            self.size(name)
        except FileNotFoundError:
            return False
        return True

    def size(self, name: str) -> int:
        """Returns how many bytes an object has. Raises as `get` does."""
        return self._calls.do(name, "looking at", lambda fs, path: int(fs.info(path)["size"]))

    def modified(self, name: str) -> float | None:
        """Returns when an object was put, in seconds since 1970; None where that is not told. Raises as `get` does."""

        def call(fs: Any, path: str) -> float | None:
            found = fs.info(path)
            at = found.get("LastModified", found.get("mtime", found.get("created")))
            return None if at is None else float(at.timestamp() if hasattr(at, "timestamp") else at)

        return self._calls.do(name, "looking at", call)

    def list(self, folder: str = "") -> dict[str, int]:
        """Returns the names right under a folder, those of folders included, each with its size.

        Raises:
            FileNotFoundError: there is nothing under it.
        """

        def call(fs: Any, path: str) -> dict[str, int]:
            found = fs.ls(path, detail=True, refresh=True) if self.is_s3 else fs.ls(path, detail=True)
            names = {str(entry["name"]).rstrip("/"): int(entry["size"] or 0) for entry in found}
            # An object may have the name of the folder itself: some programs make folders so.
            names.pop(path.rstrip("/"), None)
            return {name.rpartition("/")[2]: size for name, size in names.items()}

        return self._calls.do(folder, "listing", call)

    def put(self, name: str, data: bytes, *, patience_s: float | None = None) -> None:
        """Puts an object, in place of any of its name. It appears whole; when this returns, the store has it."""
        self._calls.do(name, "writing", lambda fs, path: self._pipe(fs, path, data), patience_s)

    def put_new(self, name: str, data: bytes) -> bool:
        """Puts an object if there is none of its name, and returns whether this was done.

        True too where an earlier try of this call had done it although its answer was lost: then there are these bytes.
        Not guaranteed without `conditional`: that of two at a time one is refused.
        """
        tries = 0

        def call(fs: Any, path: str) -> bool:
            nonlocal tries
            tries += 1
            if self.is_s3:
                put = self._put_if(fs, path, data, IfNoneMatch="*")
            elif put := not fs.exists(path):
                self._pipe(fs, path, data)
            return put or (tries > 1 and bytes(fs.cat_file(path)) == data)

        return self._calls.do(name, "writing", call)

    def put_matching(self, name: str, data: bytes, tag: str) -> bool:
        """Puts an object in place of the one with a tag of `get_tagged`, and returns whether this was done.

        True too where an earlier try of this call had done it although its answer was lost. Not guaranteed without
        `conditional`: that of two at a time one is refused.
        """
        tries = 0

        def call(fs: Any, path: str) -> bool:
            nonlocal tries
            tries += 1
            try:
                if self.is_s3:
                    put = self._put_if(fs, path, data, IfMatch=tag)
                elif put := _tag(bytes(fs.cat_file(path))) == tag:
                    self._pipe(fs, path, data)
                return put or (tries > 1 and bytes(fs.cat_file(path)) == data)
            except FileNotFoundError as error:
                if why_failed(error).code == "NoSuchBucket":
                    raise
                return False

        return self._calls.do(name, "writing", call)

    def delete(self, name: str) -> None:
        """Deletes an object if it is there."""

        def call(fs: Any, path: str) -> None:
            if self.is_s3:
                bucket, key, _ = fs.split_path(path)
                ending(fs, 0, fs.call_s3, "delete_object", Bucket=bucket, Key=key)
            else:
                fs.rm_file(path)

        try:
            self._calls.do(name, "deleting", call)
        except FileNotFoundError:
            return

    def _put_if(self, fs: Any, path: str, data: bytes, **condition: str) -> bool:
        bucket, key, _ = fs.split_path(path)
        try:
            ending(fs, len(data), fs.call_s3, "put_object", Bucket=bucket, Key=key, Body=data, **condition)
        except Exception as error:
            if why_failed(error).status == 412:
                return False
            raise
        return True

    def _pipe(self, fs: Any, path: str, data: bytes) -> None:
        if not self.is_s3:
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        ending(fs, len(data), fs.pipe_file, path, data)


def _tag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
