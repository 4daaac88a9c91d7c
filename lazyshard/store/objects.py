"""Objects of a store (S3, or whatever fsspec has a driver for) under one URL: got, listed, put and deleted by name.

A try that fails by the network or the server is repeated, for a stated patience; an object is put under a condition
where the store can do that; and a request that moves data has an end of its own: aiohttp has none while it sends, or
waits for the `100 Continue` that S3 drivers ask for (`ResponseHandler.data_received`, 3.14).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import random
import re
import time
import traceback
from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple, TypeVar

from lazyshard.errors import AccessRefused, ConfigInvalid, StoreUnavailable, redact

PATIENCE_S: Final = 120.0  # longer than a store throttles, or an endpoint is moved to another machine
PATIENCE_VARIABLE: Final = "LAZYSHARD_OBJECTS_PATIENCE_S"  # variable of the environment with another number of seconds

# More than any object has that is read at once. Without an end, S3's driver would ask for the size first
_MOST_BYTES: Final = 4 << 30

# Libraries whose errors come from a connection, unless they say otherwise
_DRIVERS: Final = ("botocore", "aiobotocore", "aiohttp", "gcsfs", "google", "azure", "adlfs", "requests", "urllib3")

_NO_CREDENTIALS: Final = re.compile(
    "(No|Partial|Default)CredentialsError|ClientAuthenticationError"
    "|(Credential|Token)RetrievalError|(Profile|Config)NotFound"
)
_OWN_MISTAKES: Final = ("ParamValidationError", "InvalidEndpointURLError", "NoRegionError", "UnknownServiceError")
_NO_PLACE: Final = (errno.ENOSPC, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOSYS)

_DRIVER_ADVICE: Final = "Install what reads such URLs: pip install 'lazyshard[objects]' for s3://, or fsspec's driver"
_REQUEST_ADVICE: Final = "Correct the URL, or the settings of the store"

_T = TypeVar("_T")
_log = logging.getLogger("lazyshard")


class _Failure(NamedTuple):
    """Why a call has failed; "unknown": by none of the store's errors."""

    kind: Literal["missing", "passing", "refused", "unknown"]
    words: str  # what the store or its driver said, on one line
    advice: str  # what to do, where it was refused
    status: int | None  # of the HTTP answer


class ObjectStore:
    """The objects whose names begin with one URL. Safe under fork, in threads, and when pickled.

    Args:
        url: like ``s3://bucket/prefix``.
        patience_s: how many seconds to repeat what fails; None for `PATIENCE_VARIABLE`, or else `PATIENCE_S`.

    Attributes:
        url: without the credentials that the given one may hold, for people, as is what `name_of` returns.
        conditional: whether the store itself decides which of two conditional puts comes first, as S3 does; else a look
            goes before.

    All methods raise, beside what they say:
        FileNotFoundError: there is no such object; its `filename` is the URL.
        AccessRefused: the store, or fsspec's driver, does not let this be done; nothing is repeated.
        StoreUnavailable: it gave no answer, or failing ones, for as long as the patience lasts.
    """

    _advice = f"When it is back, continue from the last checkpoint; {PATIENCE_VARIABLE} says how long to try"

    def __init__(self, url: str, *, patience_s: float | None = None) -> None:
        self.url = redact(url.rstrip("/"))
        self.conditional = url.partition("://")[0] in ("s3", "s3a")
        self._patience_s = _patience() if patience_s is None else patience_s
        self._url = url.rstrip("/")
        self._told = 0.0  # when the last call began of which was said that it fails; threads share this
        # By process. Those of a parent are kept: to close what a fork has inherited would wait for a thread that only
        # the parent has.
        self._systems: dict[int, tuple[Any, str]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_systems": {}}

    def name_of(self, name: str) -> str:
        """Returns the URL of an object, or of the folder, without credentials."""
        return redact(self._url_of(name))

    def get(self, name: str, most: int = _MOST_BYTES) -> bytes:
        """Returns an object's bytes, `most` of them, in one request."""
        return self.get_range(name, 0, most)

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        """Returns the bytes of [start, stop) of an object, fewer where it ends."""

        def call(fs: Any, path: str) -> bytes:
            try:
                return bytes(_ending(fs, stop - start, fs.cat_file, path, start=start, end=stop))
            except Exception as error:
                if _why_failed(error).status == 416:
                    return b""
                raise

        return self.request(name, "reading", call)

    def get_tagged(self, name: str) -> tuple[bytes, str]:
        """Returns an object's bytes, and a tag that tells them from others, for `put_matching`."""

        def call(fs: Any, path: str) -> tuple[bytes, str]:
            if self.conditional:
                from fsspec.asyn import sync

                bucket, key, _ = fs.split_path(path)
                answer = _ending(fs, 0, fs.call_s3, "get_object", Bucket=bucket, Key=key)
                return bytes(_ending(fs, _MOST_BYTES, sync, fs.loop, answer["Body"].read)), str(answer["ETag"])
            data = bytes(fs.cat_file(path))
            return data, _tag(data)

        return self.request(name, "reading", call)

    def exists(self, name: str) -> bool:
        """Returns whether there is an object of this name."""
        with contextlib.suppress(FileNotFoundError):
            return self.size(name) >= 0
        return False

    def size(self, name: str) -> int:
        """Returns how many bytes an object has."""
        return self.request(name, "looking at", lambda fs, path: int(fs.info(path)["size"]))

    def modified(self, name: str) -> float:
        """Returns when an object was put, in seconds since 1970; raises OSError where the store does not tell."""
        found = self.request(name, "looking at", lambda fs, path: dict(fs.info(path)))
        at = found.get("LastModified", found.get("mtime", found.get("created")))
        if at is None:
            raise OSError(errno.ENOTSUP, "The store does not tell when it was put", self.name_of(name))
        return float(at.timestamp() if hasattr(at, "timestamp") else at)

    def list(self, folder: str = "") -> dict[str, int]:
        """Returns the names right under a folder, those of folders included, each with its size."""

        def call(fs: Any, path: str) -> dict[str, int]:
            found = fs.ls(path, detail=True, **({"refresh": True} if self.conditional else {}))
            names = {str(entry["name"]).rstrip("/"): int(entry["size"] or 0) for entry in found}
            # An object may have the name of the folder itself: some programs make folders so.
            names.pop(path.rstrip("/"), None)
            return {name.rpartition("/")[2]: size for name, size in names.items()}

        return self.request(folder, "listing", call)

    def put(self, name: str, data: bytes, *, patience_s: float | None = None) -> None:
        """Puts an object, in place of any of its name. It appears whole; when this returns, the store has it."""
        self._put(name, data, lambda fs, path: True, patience_s)

    def put_new(self, name: str, data: bytes) -> bool:
        """Puts an object if there is none of its name; returns whether this was done, maybe by an earlier try.

        Not guaranteed without `conditional`: that of two at a time one is refused.
        """
        return self._put(name, data, lambda fs, path: not fs.exists(path), IfNoneMatch="*")

    def put_matching(self, name: str, data: bytes, tag: str) -> bool:
        """Puts an object in place of the one with a tag of `get_tagged`; else as `put_new`."""
        return self._put(name, data, lambda fs, path: _tag(bytes(fs.cat_file(path))) == tag, IfMatch=tag)

    def _put(
        self, name: str, data: bytes, may: Callable[[Any, str], bool], patience_s: float | None = None, **condition: str
    ) -> bool:
        tries = 0

        def call(fs: Any, path: str) -> bool:
            nonlocal tries
            tries += 1
            try:
                if self.conditional:
                    bucket, key, _ = fs.split_path(path)
                    _ending(fs, len(data), fs.call_s3, "put_object", Bucket=bucket, Key=key, Body=data, **condition)
                    return True
                if may(fs, path):
                    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
                    _ending(fs, len(data), fs.pipe_file, path, data)
                    return True
            except Exception as error:
                failure = _why_failed(error)
                if failure.kind == "missing" and "IfMatch" in condition:
                    return False
                if failure.status != 412:
                    raise
            return tries > 1 and bytes(fs.cat_file(path)) == data

        return self.request(name, "writing", call, patience_s)

    def delete(self, name: str) -> None:
        """Deletes an object if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self.request(name, "deleting", lambda fs, path: _ending(fs, 0, fs.rm_file, path))

    def _url_of(self, name: str) -> str:
        return f"{self._url}/{name}" if name else self._url

    def request(self, name: str, doing: str, call: Callable[[Any, str], _T], patience_s: float | None = None) -> _T:
        """Returns what a call gives, repeated while it fails by the network or the server.

        `doing` in words, like "reading"; `call` takes fsspec's driver and the path of the object there.
        """
        most = self._patience_s if patience_s is None else patience_s
        started, pause = time.monotonic(), 0.1
        url = self.name_of(name)
        while True:
            try:
                fs, root = self._system()
                return call(fs, f"{root}/{name}" if name else root)
            except Exception as error:
                failure = _why_failed(error, self._url_of(name))
                cause = _without_credentials(error, failure, self._url_of(name))
            waited = time.monotonic() - started
            if failure.kind == "missing":
                raise FileNotFoundError(errno.ENOENT, "No such object", url) from cause
            if failure.kind == "unknown":
                raise cause
            if failure.kind == "refused":
                what = f"{url}: {doing} it was refused: {failure.words}. {failure.advice}"
                raise AccessRefused(what, url=url) from cause
            if waited + pause > most:
                what = f"{url}: {doing} it has failed for {waited:.0f} s: {failure.words}. Is it reachable, and its"
                what = f"{what} endpoint right (AWS_ENDPOINT_URL for S3)? {self._advice}"
                raise StoreUnavailable(what, url=url, waited=waited) from cause
            self._wait(pause, started, most, f"{doing} {url}", failure.words)
            # Twice as long, and not the same for all who were refused.
            pause = min(5.0, 2 * pause) * random.uniform(0.75, 1.0)  # noqa: S311

    def _wait(self, pause: float, started: float, most: float, doing: str, words: str) -> None:
        """Waits before the next try of a call that fails since `started`, and is given up after `most` seconds."""
        waited = time.monotonic() - started
        if waited >= 10.0 and self._told < started:
            self._told = started
            _log.warning("%s fails for %.0f s now (%s); trying for %.0f s more", doing, waited, words, most - waited)
        time.sleep(pause)

    def _system(self) -> tuple[Any, str]:
        if (found := self._systems.get(os.getpid())) is not None:
            return found
        import fsspec
        from fsspec.config import conf

        options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
        if self.conditional:
            # Repeated here, where the patience is known, and nowhere below.
            own = {"retries": {"total_max_attempts": 1, "mode": "standard"}}
            options["config_kwargs"] = own | dict(conf.get("s3", {}).get("config_kwargs", {}))
        fs, path = fsspec.core.url_to_fs(self._url, **options)
        if self.conditional:
            fs.retries = 1
        return self._systems.setdefault(os.getpid(), (fs, str(path).rstrip("/")))


def _without_credentials(error: Exception, failure: _Failure, url: str) -> Exception:
    """Returns an error, or what may be shown of it where its traceback would show the credentials of a URL."""
    told = "".join(traceback.format_exception(type(error), error, None))
    if redact(told, url) == told:
        return error
    return OSError(failure.words) if isinstance(error, OSError) else RuntimeError(failure.words)


def _ending(fs: Any, size: int, request: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Makes a request that moves so many bytes at the most, and gives it up (TimeoutError) where it takes too long."""
    if not fs.async_impl:
        return request(*arguments, **named)
    settings = getattr(fs, "config_kwargs", {})
    idle = (settings.get(name) or getattr(fs, name, None) or 60.0 for name in ("connect_timeout", "read_timeout"))
    # Beside the driver's own time-outs so many bytes a second must be moved at the least.
    most = float(sum(idle)) + size / (64 << 10)
    try:
        return request(*arguments, **named, timeout=most)
    except Exception as error:
        # Of a time-out of the driver's own fsspec makes one too, with that for its cause.
        if type(error).__name__ == "FSTimeoutError" and not str(error.__cause__ or ""):
            raise TimeoutError(f"no end of the request after {most:.1f} s") from error
        raise


def _patience() -> float:
    text = os.environ.get(PATIENCE_VARIABLE, "")
    with contextlib.suppress(ValueError):
        if (found := float(text or PATIENCE_S)) >= 0:
            return found
    raise ConfigInvalid(f"{PATIENCE_VARIABLE} is a number of seconds from 0 on, got {text!r}")


def _tag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _why_failed(error: BaseException, url: str = "") -> _Failure:
    """Returns what an error of a driver means; credentials of this URL or any other are left out of its words."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    status, code = _answer(chain)
    text = " ".join(str(error).split()) or type(error).__name__
    words = redact(text if not code or code in text else f"{code}: {text}", url)
    names, of_value = {type(one).__name__ for one in chain}, isinstance(error, ValueError)
    missing = isinstance(error, (FileNotFoundError, NotADirectoryError)) or status == 404
    rules: tuple[tuple[object, str], ...] = (
        (code == "NoSuchBucket", "Make the bucket, or correct the URL or the endpoint (AWS_ENDPOINT_URL for S3)"),
        (isinstance(error, ImportError) or (of_value and "Protocol not known" in words), _DRIVER_ADVICE),
        (
            any(map(_NO_CREDENTIALS.fullmatch, names)),
            "Give this process credentials of the store: for S3, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "AWS_PROFILE, or a role of the machine",
        ),
        (of_value and "Invalid endpoint" in words, "Make AWS_ENDPOINT_URL a URL, like http://host:9000"),
        (names.intersection(_OWN_MISTAKES), _DRIVER_ADVICE if of_value else _REQUEST_ADVICE),
        (missing, ""),
        (
            isinstance(error, PermissionError) or status in (401, 403),
            "See to the credentials and their rights: reading takes s3:GetObject and s3:ListBucket (without the "
            "latter S3 says 403 of what is only not there yet), cursors and a producer take s3:PutObject",
        ),
        # Of the client's faults too slow, somebody else was writing it just then, and too often will pass.
        (status and 300 <= status < 500 and status not in (408, 409, 425, 429), _REQUEST_ADVICE),
        (isinstance(error, OSError) and error.errno in _NO_PLACE, _REQUEST_ADVICE),
    )
    if advice := next((advice for holds, advice in rules if holds), ""):
        return _Failure("refused", words, advice, status)
    # An answer of success was read only in part.
    known = isinstance(error, (OSError, EOFError)) or (status or 500) < 300 or any("Timeout" in name for name in names)
    known = known or any(type(one).__module__.partition(".")[0] in _DRIVERS for one in chain)
    return _Failure("missing" if missing else "passing" if known else "unknown", words, "", status)


def _answer(chain: list[BaseException]) -> tuple[int | None, str]:
    """Returns the status and the code of the store's answer, as far as the errors have kept them."""
    for one in chain:
        answer: Any = getattr(one, "response", None)
        if isinstance(answer, dict):
            code = str(answer.get("Error", {}).get("Code", ""))
            status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return (int(code) if status is None and code.isdigit() else status), code
        status = getattr(one, "status", None)
        # What aiohttp calls a code is its own verdict on an answer that was cut, and no server's.
        if status is None and not type(one).__module__.startswith("aiohttp."):
            status = getattr(one, "code", None)
        if isinstance(status, int):
            return status, ""
    return None, ""
