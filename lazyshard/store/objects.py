"""Objects of a store (S3, or whatever fsspec has a driver for) under one URL: got, listed, put and deleted by name.

What this adds to fsspec: a try that fails by the network or the server is repeated with growing pauses, for a stated
patience; an error says what to do, as one of ours; an object is put under a condition where the store can do that, so
that of two writers one knows that it came second; and a request that moves data has an end of its own. aiohttp has none
while it sends or waits for the `100 Continue` that S3 drivers ask for, each of which stops the time-out of the answer
(`ResponseHandler.data_received`, 3.14).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import random
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar

from lazyshard.errors import AccessRefused, ConfigInvalid, StoreUnavailable, redact

PATIENCE_S: Final = 120.0
"""How long failing calls are repeated: longer than a store throttles, or an endpoint is moved to another machine."""

PATIENCE_VARIABLE: Final = "LAZYSHARD_OBJECTS_PATIENCE_S"  # variable of the environment with another number of seconds

_SLOWEST_BYTES_S: Final = 64 << 10
"""How many bytes a second a request must move at the least, beside the driver's own time-outs, or it is given up."""

_TELL_S: Final = 10.0  # A call that is repeated for longer is worth a word

_MOST_BYTES: Final = 4 << 30
"""More than any object has that is read at once. Without an end, S3's driver would ask for the size first."""

FIRST_PAUSE_S: Final = 0.1

_PASSING_STATUS: Final = (408, 409, 425, 429)
"""Of the client's faults, by their numbers: too slow, somebody else was writing it just then, too often."""

_DRIVERS: Final = ("botocore", "aiobotocore", "aiohttp", "gcsfs", "google", "azure", "adlfs", "requests", "urllib3")
"""Libraries whose errors come from a connection, unless they say otherwise."""

_NO_CREDENTIALS: Final = (
    *("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError"),
    *("ProfileNotFound", "ConfigNotFound", "DefaultCredentialsError", "ClientAuthenticationError"),
)
_OWN_MISTAKES: Final = ("ParamValidationError", "InvalidEndpointURLError", "NoRegionError", "UnknownServiceError")

_NO_PLACE: Final = (errno.ENOSPC, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOSYS)

_DRIVER_ADVICE: Final = "Install what reads such URLs: pip install 'lazyshard[objects]' for s3://, or fsspec's driver"
_REQUEST_ADVICE: Final = "Correct the URL, or the settings of the store"

_T = TypeVar("_T")
_log = logging.getLogger("lazyshard")

_Kind: TypeAlias = Literal["missing", "passing", "refused", "unknown"]


class Failure(NamedTuple):
    """Why a call has failed; "unknown": by none of the store's errors."""

    kind: _Kind
    words: str  # what the store or its driver said, on one line
    advice: str  # what to do, where it was refused
    status: int | None  # of the HTTP answer
    code: str  # the store's own word for it


class ObjectStore:
    """The objects whose names begin with one URL. Safe under fork, in threads, and when pickled.

    Args:
        url: like ``s3://bucket/prefix``.
        patience_s: how many seconds to repeat what fails; None for `PATIENCE_VARIABLE`, or else `PATIENCE_S`.
        options: for fsspec's driver, beside what fsspec's own configuration says (``FSSPEC_S3_...``).

    Attributes:
        url: without the credentials that the given one may hold, for people, as is what `name_of` returns.
        conditional: whether the store itself decides which of two conditional puts comes first, as S3 does; else a look
            goes before.

    All methods raise, beside what they say:
        FileNotFoundError: there is no such object; its `filename` is the URL.
        AccessRefused: the store, or fsspec's driver, does not let this be done; nothing is repeated.
        StoreUnavailable: it gave no answer, or failing ones, for as long as the patience lasts.
    """

    def __init__(self, url: str, *, patience_s: float | None = None, options: Mapping[str, Any] | None = None) -> None:
        self.url = redact(url.rstrip("/"))
        self.conditional = self._is_s3 = url.partition("://")[0] in ("s3", "s3a")
        self._patience_s = _patience() if patience_s is None else patience_s
        self._url = url.rstrip("/")
        self._options = dict(options or {})
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
                if why_failed(error).status == 416:
                    return b""
                raise

        return self._do(name, "reading", call)

    def get_tagged(self, name: str) -> tuple[bytes, str]:
        """Returns an object's bytes, and a tag that tells them from others, for `put_matching`."""

        async def read(fs: Any, path: str) -> tuple[bytes, str]:
            bucket, key, _ = fs.split_path(path)
            answer = await fs._call_s3("get_object", Bucket=bucket, Key=key)
            async with answer["Body"] as body:
                return bytes(await body.read()), str(answer["ETag"])

        def call(fs: Any, path: str) -> tuple[bytes, str]:
            if self._is_s3:
                from fsspec.asyn import sync

                found: tuple[bytes, str] = _ending(fs, _MOST_BYTES, sync, fs.loop, read, fs, path)
                return found
            data = bytes(fs.cat_file(path))
            return data, _tag(data)

        return self._do(name, "reading", call)

    def exists(self, name: str) -> bool:
        """Returns whether there is an object of this name."""
        try:
            self.size(name)
        except FileNotFoundError:
            return False
        return True

    def size(self, name: str) -> int:
        """Returns how many bytes an object has."""
        return self._do(name, "looking at", lambda fs, path: int(fs.info(path)["size"]))

    def modified(self, name: str) -> float | None:
        """Returns when an object was put, in seconds since 1970; None where that is not told."""
        found = self._do(name, "looking at", lambda fs, path: dict(fs.info(path)))
        at = found.get("LastModified", found.get("mtime", found.get("created")))
        return None if at is None else float(at.timestamp() if hasattr(at, "timestamp") else at)

    def list(self, folder: str = "") -> dict[str, int]:
        """Returns the names right under a folder, those of folders included, each with its size."""

        def call(fs: Any, path: str) -> dict[str, int]:
            found = fs.ls(path, detail=True, **({"refresh": True} if self._is_s3 else {}))
            names = {str(entry["name"]).rstrip("/"): int(entry["size"] or 0) for entry in found}
            # An object may have the name of the folder itself: some programs make folders so.
            names.pop(path.rstrip("/"), None)
            return {name.rpartition("/")[2]: size for name, size in names.items()}

        return self._do(folder, "listing", call)

    def put(self, name: str, data: bytes, *, patience_s: float | None = None) -> None:
        """Puts an object, in place of any of its name. It appears whole; when this returns, the store has it."""
        self._do(name, "writing", lambda fs, path: self._pipe(fs, path, data), patience_s)

    def put_new(self, name: str, data: bytes) -> bool:
        """Puts an object if there is none of its name, and returns whether this was done.

        True too where an earlier try of this call had done it although its answer was lost: then there are these bytes.
        Not guaranteed without `conditional`: that of two at a time one is refused.
        """
        return self._put_once(name, data, lambda fs, path: not fs.exists(path), IfNoneMatch="*")

    def put_matching(self, name: str, data: bytes, tag: str) -> bool:
        """Puts an object in place of the one with a tag of `get_tagged`, and returns whether this was done.

        Else as `put_new`.
        """
        return self._put_once(name, data, lambda fs, path: _tag(bytes(fs.cat_file(path))) == tag, IfMatch=tag)

    def _put_once(self, name: str, data: bytes, may: Callable[[Any, str], bool], **condition: str) -> bool:
        tries = 0

        def call(fs: Any, path: str) -> bool:
            nonlocal tries
            tries += 1
            try:
                if self._is_s3:
                    put = self._put_if(fs, path, data, **condition)
                elif put := may(fs, path):
                    self._pipe(fs, path, data)
                return put or (tries > 1 and bytes(fs.cat_file(path)) == data)
            except FileNotFoundError as error:
                if "IfMatch" not in condition or why_failed(error).code == "NoSuchBucket":
                    raise
                return False

        return self._do(name, "writing", call)

    def _put_if(self, fs: Any, path: str, data: bytes, **condition: str) -> bool:
        bucket, key, _ = fs.split_path(path)
        try:
            _ending(fs, len(data), fs.call_s3, "put_object", Bucket=bucket, Key=key, Body=data, **condition)
        except Exception as error:
            if why_failed(error).status == 412:
                return False
            raise
        return True

    def _pipe(self, fs: Any, path: str, data: bytes) -> None:
        if not self._is_s3:
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        _ending(fs, len(data), fs.pipe_file, path, data)

    def delete(self, name: str) -> None:
        """Deletes an object if it is there."""

        def call(fs: Any, path: str) -> None:
            if self._is_s3:
                bucket, key, _ = fs.split_path(path)
                _ending(fs, 0, fs.call_s3, "delete_object", Bucket=bucket, Key=key)
            else:
                fs.rm_file(path)

        with contextlib.suppress(FileNotFoundError):
            self._do(name, "deleting", call)

    def _url_of(self, name: str) -> str:
        return f"{self._url}/{name}" if name else self._url

    def _do(self, name: str, doing: str, call: Callable[[Any, str], _T], patience_s: float | None = None) -> _T:
        """Returns what a call gives, repeated while it fails by the network or the server.

        `name` of an object, or empty for the folder; `doing` in words, like "reading"; `call` takes fsspec's driver and
        the path of the object there.
        """
        most = self._patience_s if patience_s is None else patience_s
        started, pause, told = time.monotonic(), FIRST_PAUSE_S, False
        url = self.name_of(name)
        while True:
            try:
                fs, root = self._system()
                return call(fs, f"{root}/{name}" if name else root)
            except Exception as error:
                failure = why_failed(error, self._url_of(name))
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
                way = "endpoint right (AWS_ENDPOINT_URL for S3)? When it is back, go on from the last checkpoint"
                what = f"{what} {way}; {PATIENCE_VARIABLE} says how long to try"
                raise StoreUnavailable(what, url=url, waited=waited) from cause
            if waited >= _TELL_S and not told:
                told = True
                given = (doing, url, waited, failure.words, most - waited)
                _log.warning("%s %s fails for %.0f s now (%s); trying for %.0f s more", *given)
            time.sleep(pause)
            pause = next_pause(pause)

    def _system(self) -> tuple[Any, str]:
        if (found := self._systems.get(os.getpid())) is not None:
            return found
        import fsspec
        from fsspec.config import conf

        options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False, **self._options}
        if self._is_s3:
            # Repeated here, where the patience is known, and nowhere below.
            own: dict[str, Any] = {"retries": {"total_max_attempts": 1, "mode": "standard"}}
            for settings in (conf.get("s3", {}), self._options):
                own |= dict(settings.get("config_kwargs", {}))
            options["config_kwargs"] = own
        fs, path = fsspec.core.url_to_fs(self._url, **options)
        if self._is_s3:
            fs.retries = 1
        return self._systems.setdefault(os.getpid(), (fs, str(path).rstrip("/")))


def _without_credentials(error: Exception, failure: Failure, url: str) -> Exception:
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
    most = float(sum(idle)) + size / _SLOWEST_BYTES_S
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


def next_pause(pause: float) -> float:
    """Returns the pause in seconds after one of so many: twice as long, and not the same for all who were refused."""
    return min(5.0, 2 * pause) * random.uniform(0.75, 1.0)  # noqa: S311


def why_failed(error: BaseException, url: str = "") -> Failure:
    """Returns what an error of a driver means; credentials of this URL or any other are left out of its words."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    status, code = _answer(chain)
    text = " ".join(str(error).split()) or type(error).__name__
    words = redact(text if not code or code in text else f"{code}: {text}", url)
    return Failure(*_verdict(chain, status, code, words), status, code)


def _verdict(chain: list[BaseException], status: int | None, code: str, words: str) -> tuple[_Kind, str, str]:
    """Returns the first fields of a failure."""
    error, names = chain[0], {type(one).__name__ for one in chain}
    kind: _Kind = "refused"
    advice = _REQUEST_ADVICE
    if code == "NoSuchBucket":
        advice = "Make the bucket, or correct the URL or the endpoint (AWS_ENDPOINT_URL for S3)"
    elif isinstance(error, ImportError):
        advice = _DRIVER_ADVICE
    elif not names.isdisjoint(_NO_CREDENTIALS):
        advice = "Give this process credentials of the store: for S3, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
        advice += "AWS_PROFILE, or a role of the machine"
    elif isinstance(error, ValueError) and "Invalid endpoint" in words:
        advice = "An endpoint is a URL, like http://host:9000: correct AWS_ENDPOINT_URL"
    elif not names.isdisjoint(_OWN_MISTAKES) or (isinstance(error, ValueError) and "Protocol not known" in words):
        advice = _DRIVER_ADVICE if isinstance(error, ValueError) else _REQUEST_ADVICE
    elif isinstance(error, (FileNotFoundError, NotADirectoryError)) or status == 404:
        kind, advice = "missing", ""
    elif isinstance(error, PermissionError) or status in (401, 403):
        advice = "See to the credentials and their rights: reading takes s3:GetObject and s3:ListBucket (without the "
        advice += "latter S3 says 403 of what is only not there yet), cursors and a producer take s3:PutObject"
    elif status is not None and status < 500 and status not in _PASSING_STATUS:
        if status < 300:  # that of success, of an answer that was read only in part
            kind, advice = "passing", ""
    elif not isinstance(error, OSError) or error.errno not in _NO_PLACE:
        known = isinstance(error, (OSError, EOFError)) or any(
            type(one).__module__.partition(".")[0] in _DRIVERS or "Timeout" in type(one).__name__ for one in chain
        )
        kind, advice = "passing" if known else "unknown", ""
    return kind, words, advice


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
