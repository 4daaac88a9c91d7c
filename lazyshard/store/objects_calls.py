"""Calls of fsspec's drivers: one that fails by the network or the server is repeated, and none goes on for ever.

A request that moves data has an end of its own here. The time-outs of drivers are not enough: aiohttp has none while it
sends or waits for the `100 Continue` that S3 drivers ask for before they send, and each `100 Continue` that
comes stops the one that waits for the answer (`ResponseHandler.data_received`, 3.14).
"""

from __future__ import annotations

import errno
import logging
import os
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from lazyshard.errors import StoreRefused, StoreUnavailable, redact
from lazyshard.store.objects_failures import FIRST_PAUSE_S, Failure, next_pause, why_failed

PATIENCE_S: Final = 120.0
"""How long failing calls are repeated: longer than a store throttles, or an endpoint is moved to another machine."""

PATIENCE_VARIABLE: Final = "LAZYSHARD_OBJECTS_PATIENCE_S"
"""Variable of the environment with another number of seconds."""

_SLOWEST_BYTES_S: Final = 64 << 10
"""How many bytes a second a request must move at the least, beside the driver's own time-outs, or it is given up."""

_TELL_S: Final = 10.0
"""A call that is repeated for longer is worth a word."""

_S3: Final = ("s3", "s3a")

_T = TypeVar("_T")
_log = logging.getLogger("lazyshard")


class StoreCalls:
    """Calls on one store, with a patience.

    Safe under fork: each process has its own connections, which stay behind when this is pickled, too.

    Args:
        url: of the store and a folder in it, without a slash at the end.
        patience_s: how many seconds to repeat what fails.
        options: for fsspec's driver, beside what fsspec's own configuration says.

    Attributes:
        patience_s: see there.
        is_s3: whether the store speaks S3.
    """

    def __init__(self, url: str, patience_s: float, options: Mapping[str, Any]) -> None:
        self._url = url
        self.patience_s = patience_s
        self.is_s3 = url.partition("://")[0] in _S3
        self._options = dict(options)
        # By process. Those of a parent are kept: to close what a fork has inherited would wait for a thread that only
        # the parent has.
        self._systems: dict[int, tuple[Any, str]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leaves connections behind."""
        return self.__dict__ | {"_systems": {}}

    def name_of(self, name: str) -> str:
        """Returns the URL of an object, without credentials."""
        return redact(self._url_of(name))

    def _url_of(self, name: str) -> str:
        return f"{self._url}/{name}" if name else self._url

    def do(self, name: str, doing: str, call: Callable[[Any, str], _T], patience_s: float | None = None) -> _T:
        """Returns what a call gives, repeated while it fails by the network or the server.

        Args:
            name: of the object, or empty for the folder.
            doing: what the call does, for messages, like "reading".
            call: takes fsspec's driver and the path of the object there.
            patience_s: other than the store's.

        Raises:
            FileNotFoundError: there is no such object; its `filename` is the URL.
            StoreRefused: the store, or fsspec's driver, does not let this be done.
            StoreUnavailable: it gave no answer, or failing ones, for as long as the patience lasts.
        """
        most = self.patience_s if patience_s is None else patience_s
        started = time.monotonic()
        pause, told = FIRST_PAUSE_S, False
        while True:
            try:
                fs, root = self._system()
                return call(fs, f"{root}/{name}" if name else root)
            except Exception as error:
                failure = why_failed(error, self._url_of(name))
                cause = _without_credentials(error, failure, self._url_of(name))
            waited = time.monotonic() - started
            if failure.kind == "missing":
                raise FileNotFoundError(errno.ENOENT, "No such object", self.name_of(name)) from cause
            if failure.kind == "unknown":
                raise cause
            if failure.kind == "refused":
                raise self._refused(name, doing, failure) from cause
            if waited + pause > most:
                raise self._unavailable(name, doing, failure, waited) from cause
            if waited >= _TELL_S and not told:
                told = True
                _log.warning(
                    "%s %s fails for %.0f s now (%s); trying for %.0f s more",
                    *(doing, self.name_of(name), waited, failure.words, most - waited),
                )
            time.sleep(pause)
            pause = next_pause(pause)

    def _refused(self, name: str, doing: str, failure: Failure) -> StoreRefused:
        url = self.name_of(name)
        return StoreRefused(f"{url}: {doing} it was refused: {failure.words}. {failure.advice}", url=url)

    def _unavailable(self, name: str, doing: str, failure: Failure, waited: float) -> StoreUnavailable:
        url = self.name_of(name)
        return StoreUnavailable(
            f"{url}: {doing} it has failed for {waited:.0f} s: {failure.words}. Is the store reachable from this "
            f"machine, and its endpoint right (AWS_ENDPOINT_URL for S3)? When it is there again, go on from the last "
            f"checkpoint; {PATIENCE_VARIABLE} says how long to try",
            url=url,
            waited=waited,
        )

    def _system(self) -> tuple[Any, str]:
        """Returns fsspec's driver and its path of the URL, those of this process."""
        found = self._systems.get(os.getpid())
        if found is None:
            found = self._systems[os.getpid()] = self._open()
        return found

    def _open(self) -> tuple[Any, str]:
        import fsspec
        from fsspec.config import conf

        options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False, **self._options}
        if self.is_s3:
            # Repeated here, where the patience is known, and nowhere below.
            own: dict[str, Any] = {"retries": {"total_max_attempts": 1, "mode": "standard"}}
            given = (conf.get("s3", {}), self._options)
            for settings in given:
                own = own | dict(settings.get("config_kwargs", {}))
            options["config_kwargs"] = own
        fs, path = fsspec.core.url_to_fs(self._url, **options)
        if self.is_s3:
            fs.retries = 1
        return fs, str(path).rstrip("/")


def _without_credentials(error: Exception, failure: Failure, url: str) -> Exception:
    """Returns an error, or what may be shown of it where its traceback would show the credentials of a URL."""
    told = "".join(traceback.format_exception(type(error), error, None))
    if redact(told, url) == told:
        return error
    return OSError(failure.words) if isinstance(error, OSError) else RuntimeError(failure.words)


def ending(fs: Any, size: int, request: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Makes a request that moves so many bytes at the most, and gives it up where it takes too long for that.

    Raises:
        TimeoutError: it was given up. Drivers whose requests cannot be broken off see to that themselves.
    """
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


def patience() -> float:
    """Returns how many seconds to repeat what fails, by the environment. Raises StoreRefused: that is no number."""
    text = os.environ.get(PATIENCE_VARIABLE, "")
    try:
        found = float(text or PATIENCE_S)
    except ValueError:
        found = -1.0
    if not found >= 0:
        raise StoreRefused(f"{PATIENCE_VARIABLE} is a number of seconds from 0 on, got {text!r}")
    return found
