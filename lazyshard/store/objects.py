"""Objects under one URL of a store (S3, or any store with an fsspec driver): read, listed, put and deleted by name.

Requests that fail because of the network or the server are retried until a time limit. Objects are put conditionally if
the store supports it. Requests that move data have their own time-out: aiohttp has none while it sends, or while it
waits for the `100 Continue` that S3 drivers request (`ResponseHandler.data_received`, 3.14).
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

PATIENCE_S: Final = 120.0  # longer than stores throttle, or than moving an endpoint to another machine takes
PATIENCE_VARIABLE: Final = "LAZYSHARD_OBJECTS_PATIENCE_S"  # environment variable with another number of seconds

# More than any object that is read at once. Without an end, S3's driver would request the size first
_MOST_BYTES: Final = 4 << 30

# A copy may take as long as moving so many bytes: four minutes. S3 copies at most 5 GB at once, in less than one
_COPY_BYTES: Final = 16 << 20

# Libraries whose errors are connection errors, unless they say otherwise
_DRIVERS: Final = ("botocore", "aiobotocore", "aiohttp", "gcsfs", "google", "azure", "adlfs", "requests", "urllib3")

_NO_CREDENTIALS: Final = re.compile(
    "(No|Partial|Default)CredentialsError|ClientAuthenticationError"
    "|(Credential|Token)RetrievalError|(Profile|Config)NotFound"
)
_OWN_MISTAKES: Final = ("ParamValidationError", "InvalidEndpointURLError", "NoRegionError", "UnknownServiceError")
_NO_PLACE: Final = (errno.ENOSPC, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOSYS)

_DRIVER_ADVICE: Final = "Install a driver for such URLs: pip install 'lazyshard[objects]' for s3://, or fsspec's driver"
_REQUEST_ADVICE: Final = "Correct the URL or the settings of the store"

_Number = TypeVar("_Number", int, float)
_T = TypeVar("_T")
_log = logging.getLogger("lazyshard")


class _Failure(NamedTuple):
    """Why a call failed; "unknown": the error is not one of the store."""

    kind: Literal["missing", "passing", "refused", "unknown"]
    words: str  # the message of the store or its driver, on one line
    advice: str  # what to do, if it was refused
    status: int | None  # of the HTTP response


class ObjectStore:
    """The objects whose names begin with one URL. Fork-safe, thread-safe and picklable.

    Args:
        url: like ``s3://bucket/prefix``.
        patience_s: how many seconds to retry failed requests; None for `PATIENCE_VARIABLE`, or else `PATIENCE_S`.

    Attributes:
        url: the given URL without credentials, for messages, like the results of `name_of`.
        conditional: whether the store itself decides which of two conditional puts comes first, as S3 does; otherwise
            the condition is checked before the put.

    All methods may also raise:
        FileNotFoundError: there is no such object; its `filename` is the URL.
        AccessRefused: the store, or fsspec's driver, refuses the request; it is not retried.
        StoreUnavailable: the store did not respond, or requests failed, until the time limit.
    """

    _advice = f"When it is back, continue from the last checkpoint; {PATIENCE_VARIABLE} sets how long to retry"

    def __init__(self, url: str, *, patience_s: float | None = None) -> None:
        self.url = redact(url.rstrip("/"))
        self.conditional = url.partition("://")[0] in ("s3", "s3a")
        self._patience_s = number_of(PATIENCE_VARIABLE, PATIENCE_S) if patience_s is None else patience_s
        self._url = url.rstrip("/")
        self._logged_call = 0.0  # start of the last call whose failures were logged; shared by threads
        # Drivers by process. A fork keeps those of its parent: closing them would wait for a thread that exists only in
        # the parent.
        self._systems: dict[int, tuple[Any, str]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_systems": {}}

    def name_of(self, name: str) -> str:
        """Returns the URL of an object, or of the folder, without credentials."""
        return redact(self._url_of(name))

    def get(self, name: str, most: int = _MOST_BYTES) -> bytes:
        """Returns the first `most` bytes of an object, in one request."""
        return self.get_range(name, 0, most)

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        """Returns the bytes [start, stop) of an object, fewer at its end."""

        def call(fs: Any, path: str) -> bytes:
            try:
                return bytes(_with_time_limit(fs, stop - start, fs.cat_file, path, start=start, end=stop))
            except Exception as error:
                if _why_failed(error).status == 416:
                    return b""
                raise

        return self.request(name, "reading", call)

    def get_tagged(self, name: str) -> tuple[bytes, str]:
        """Returns an object's bytes, and a tag of this version for `swap`."""
        return self.request(name, "reading", self._get_tagged)

    def _get_tagged(self, fs: Any, path: str) -> tuple[bytes, str]:
        if self.conditional:
            from fsspec.asyn import sync

            bucket, key, _ = fs.split_path(path)
            answer = _with_time_limit(fs, 0, fs.call_s3, "get_object", Bucket=bucket, Key=key)
            return bytes(_with_time_limit(fs, _MOST_BYTES, sync, fs.loop, answer["Body"].read)), str(answer["ETag"])
        data = bytes(fs.cat_file(path))
        return data, _tag(data)

    def exists(self, name: str) -> bool:
        """Returns whether there is an object of this name."""
        with contextlib.suppress(FileNotFoundError):
            return self.size(name) >= 0
        return False

    def size(self, name: str) -> int:
        """Returns the size of an object in bytes."""
        return self.request(name, "looking at", lambda fs, path: int(fs.info(path)["size"]))

    def modified(self, name: str) -> float:
        """Returns when an object was put, in seconds since 1970; raises OSError if the store does not report it."""
        found = self.request(name, "looking at", lambda fs, path: dict(fs.info(path)))
        at = found.get("LastModified", found.get("mtime", found.get("created")))
        if at is None:
            raise OSError(errno.ENOTSUP, "The store does not report when the object was put", self.name_of(name))
        return float(at.timestamp() if hasattr(at, "timestamp") else at)

    def list(self, folder: str = "", *, below: bool = False) -> dict[str, int]:
        """Returns the names directly in a folder, including folders, each with its size.

        `below`: returns the objects at any depth instead, by their names relative to the folder.
        """

        def call(fs: Any, path: str) -> dict[str, int]:
            fresh = {"refresh": True} if self.conditional else {}
            found = fs.find(path, detail=True).values() if below else fs.ls(path, detail=True, **fresh)
            names = {str(entry["name"]).rstrip("/"): int(entry["size"] or 0) for entry in found}
            # An object may have the name of the folder itself: some programs create folders this way.
            names.pop(whole := path.rstrip("/"), None)
            return {name[len(whole) + 1 :] if below else name.rpartition("/")[2]: names[name] for name in names}

        return self.request(folder, "listing", call)

    def copy(self, name: str, target: str) -> None:
        """Copies an object in S3, replacing any of the target's name. The store moves the bytes."""

        def call(fs: Any, path: str) -> None:
            (bucket, key, _), (_, copied, _) = fs.split_path(path), fs.split_path(f"{path.removesuffix(name)}{target}")
            given = {"Bucket": bucket, "Key": copied, "CopySource": {"Bucket": bucket, "Key": key}}
            _with_time_limit(fs, _COPY_BYTES, fs.call_s3, "copy_object", **given)

        self.request(name, "copying", call)

    def put(self, name: str, data: bytes, *, patience_s: float | None = None) -> None:
        """Puts an object, replacing any of its name. It appears whole; on return the store has it durably."""
        self._put(name, data, lambda fs, path: True, patience_s)

    def put_new(self, name: str, data: bytes) -> bool:
        """Puts an object if its name is free; returns whether this was done, possibly by an earlier attempt.

        Not guaranteed unless `conditional`: that one of two simultaneous puts is refused.
        """
        return bool(self.swap(name, data, None))

    def swap(self, name: str, data: bytes, tag: str | None) -> str:
        """Puts an object in place of the version with a tag of `get_tagged`; as `put_new` if the tag is None.

        Returns the tag of what was put, "" if it was refused.
        """
        if tag is None:
            return self._put(name, data, lambda fs, path: not fs.exists(path), IfNoneMatch="*")
        return self._put(name, data, lambda fs, path: _tag(bytes(fs.cat_file(path))) == tag, IfMatch=tag)

    def _put(
        self, name: str, data: bytes, may: Callable[[Any, str], bool], patience_s: float | None = None, **condition: str
    ) -> str:
        tries = 0

        def call(fs: Any, path: str) -> str:
            nonlocal tries
            tries += 1
            try:
                if self.conditional:
                    bucket, key, _ = fs.split_path(path)
                    put = {"Bucket": bucket, "Key": key, "Body": data} | condition
                    return str(_with_time_limit(fs, len(data), fs.call_s3, "put_object", **put)["ETag"])
                if may(fs, path):
                    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
                    _with_time_limit(fs, len(data), fs.pipe_file, path, data)
                    return _tag(data)
            except Exception as error:
                failure = _why_failed(error)
                if failure.kind == "missing" and "IfMatch" in condition:
                    return ""
                if failure.status != 412:
                    raise
            if tries == 1:
                return ""
            found, tag = self._get_tagged(fs, path)
            return tag if found == data else ""

        return self.request(name, "writing", call, patience_s)

    def delete(self, name: str) -> None:
        """Deletes an object if it exists."""
        with contextlib.suppress(FileNotFoundError):
            self.request(name, "deleting", lambda fs, path: _with_time_limit(fs, 0, fs.rm_file, path))

    def _url_of(self, name: str) -> str:
        return f"{self._url}/{name}" if name else self._url

    def request(self, name: str, doing: str, call: Callable[[Any, str], _T], patience_s: float | None = None) -> _T:
        """Returns the result of a call, which is retried while the network or the server fails.

        `doing` names it in messages, such as "reading"; `call` takes fsspec's driver and the object's path in it.
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
                what = f"{url}: {doing} it has failed for {waited:.0f} s: {failure.words}. Is the store reachable, and"
                what = f"{what} its endpoint right (AWS_ENDPOINT_URL for S3)? {self._advice}"
                raise StoreUnavailable(what, url=url, waited=waited) from cause
            self._wait(pause, started, most, f"{doing} {url}", failure.words)
            # Exponential back-off with jitter.
            pause = min(5.0, 2 * pause) * random.uniform(0.75, 1.0)  # noqa: S311

    def _wait(self, pause: float, started: float, most: float, doing: str, words: str) -> None:
        """Waits before the next attempt of a call that has failed since `started`; it is given up after `most` s."""
        waited = time.monotonic() - started
        if waited >= 10.0 and self._logged_call < started:
            self._logged_call = started
            _log.warning("%s has failed for %.0f s (%s); retrying for %.0f s", doing, waited, words, most - waited)
        time.sleep(pause)

    def _system(self) -> tuple[Any, str]:
        if (found := self._systems.get(os.getpid())) is not None:
            return found
        import fsspec
        from fsspec.config import conf

        options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
        if self.conditional:
            # Retries are done here, where the time limit is known, and not in the driver.
            own = {"retries": {"total_max_attempts": 1, "mode": "standard"}}
            options["config_kwargs"] = own | dict(conf.get("s3", {}).get("config_kwargs", {}))
        fs, path = fsspec.core.url_to_fs(self._url, **options)
        if self.conditional:
            fs.retries = 1
        return self._systems.setdefault(os.getpid(), (fs, str(path).rstrip("/")))


def _without_credentials(error: Exception, failure: _Failure, url: str) -> Exception:
    """Returns an error, replaced by one with a redacted message if its traceback would show credentials of a URL."""
    text = "".join(traceback.format_exception(type(error), error, None))
    if redact(text, url) == text:
        return error
    return OSError(failure.words) if isinstance(error, OSError) else RuntimeError(failure.words)


def _with_time_limit(fs: Any, size: int, request: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Makes a request that moves at most `size` bytes; raises TimeoutError if it takes too long."""
    if not fs.async_impl:
        return request(*arguments, **named)
    settings = getattr(fs, "config_kwargs", {})
    idle = (settings.get(name) or getattr(fs, name, None) or 60.0 for name in ("connect_timeout", "read_timeout"))
    # In addition to the driver's own time-outs, a minimum number of bytes per second is required.
    most = float(sum(idle)) + size / (64 << 10)
    try:
        return request(*arguments, **named, timeout=most)
    except Exception as error:
        # fsspec also converts the driver's own time-outs, which are then its cause.
        if type(error).__name__ == "FSTimeoutError" and not str(error.__cause__ or ""):
            raise TimeoutError(f"no end of the request after {most:.1f} s") from error
        raise


def number_of(variable: str, default: _Number) -> _Number:
    """Returns the number in an environment variable, of the type of the default. Raises ConfigInvalid: it is none."""
    text = os.environ.get(variable) or str(default)
    with contextlib.suppress(ValueError):
        if (found := type(default)(text)) >= 0:
            return found
    raise ConfigInvalid(f"{variable} must be a number of at least 0, got {text!r}")


def _tag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _why_failed(error: BaseException, url: str = "") -> _Failure:
    """Classifies an error of a driver; its words do not contain credentials of this or any other URL."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    status, code = _response_of(chain)
    text = " ".join(str(error).split()) or type(error).__name__
    words = redact(text if not code or code in text else f"{code}: {text}", url)
    names, of_value = {type(one).__name__ for one in chain}, isinstance(error, ValueError)
    missing = isinstance(error, (FileNotFoundError, NotADirectoryError)) or status == 404
    rules: tuple[tuple[object, str], ...] = (
        (code == "NoSuchBucket", "Create the bucket, or correct the URL or the endpoint (AWS_ENDPOINT_URL for S3)"),
        (isinstance(error, ImportError) or (of_value and "Protocol not known" in words), _DRIVER_ADVICE),
        (
            any(map(_NO_CREDENTIALS.fullmatch, names)),
            "Give this process credentials of the store: for S3, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "AWS_PROFILE, or a role of the machine",
        ),
        (of_value and "Invalid endpoint" in words, "Set AWS_ENDPOINT_URL to a URL such as http://host:9000"),
        (names.intersection(_OWN_MISTAKES), _DRIVER_ADVICE if of_value else _REQUEST_ADVICE),
        (missing, ""),
        (
            isinstance(error, PermissionError) or status in (401, 403),
            "Check the credentials and their permissions: reading needs s3:GetObject and s3:ListBucket (without the "
            "latter, S3 reports 403 for an object that does not exist yet), cursors and a producer need s3:PutObject",
        ),
        # Temporary among client errors: 408 timeout, 409 conflict, 425 too early, 429 too many requests.
        (status and 300 <= status < 500 and status not in (408, 409, 425, 429), _REQUEST_ADVICE),
        (isinstance(error, OSError) and error.errno in _NO_PLACE, _REQUEST_ADVICE),
    )
    if advice := next((advice for holds, advice in rules if holds), ""):
        return _Failure("refused", words, advice, status)
    # A status of success here means that the response was only read in part.
    known = isinstance(error, (OSError, EOFError)) or (status or 500) < 300 or any("Timeout" in name for name in names)
    known = known or any(type(one).__module__.partition(".")[0] in _DRIVERS for one in chain)
    return _Failure("missing" if missing else "passing" if known else "unknown", words, "", status)


def _response_of(chain: list[BaseException]) -> tuple[int | None, str]:
    """Returns the status and the code of the store's response, as far as the errors contain them."""
    for one in chain:
        answer: Any = getattr(one, "response", None)
        if isinstance(answer, dict):
            code = str(answer.get("Error", {}).get("Code", ""))
            status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return (int(code) if status is None and code.isdigit() else status), code
        status = getattr(one, "status", None)
        # The code of an aiohttp error is its own verdict on a truncated response, not the server's.
        if status is None and not type(one).__module__.startswith("aiohttp."):
            status = getattr(one, "code", None)
        if isinstance(status, int):
            return status, ""
    return None, ""
