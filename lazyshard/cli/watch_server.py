"""The web server of `lazyshard watch`: some addresses, read only, for this machine unless asked otherwise.

What a request says is compared with the names of the answers and never becomes part of a path. Requests must name this
machine as their host: else a site whose name is made to lead here (DNS rebinding) could read what a browser here can.
Nothing is authenticated or encrypted.

All viewers share the looks at the stream: one at a time, in a thread of its own, while somebody asks. Whoever asks is
answered at once, with what the last look has found: a share that hangs holds up the thread that looks, and no viewer.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Generic, TypeVar

from lazyshard.errors import LazyShardError, StreamMissing

MAX_REQUESTS: Final = 32  # Requests at a time: a page has one, every five seconds at the least. More are turned away.
_REQUEST_S: Final = 10.0  # A connection is closed so long after it was accepted, however often it sends or takes a byte
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:]+)(:[0-9]{1,5})?")

_HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}

NO_PAGE: Final = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
IDLE_S: Final = 60.0
"""So long after somebody has asked last, looking goes on: a page that is open asks every few seconds, Prometheus every
15 or 60 s, and a page that nobody sees any more shall cost no requests to an object store."""

SILENT_S: Final = 5.0  # A look takes milliseconds, on a busy share a second: who has heard nothing longer is told so
_PATIENCE_S: Final = 1.0  # So long who asks waits for a look where there is none yet, or only an old one
_LOAD: Final = 0.1  # Of the time it looks so much at the most: where the chunks have to be listed, that may take 1 s

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PageAnswer:
    """What an address gives: its type, a function that makes it, and its Content-Security-Policy."""

    kind: str
    make: Callable[[], bytes]
    policy: str = NO_PAGE


class WatchServer(ThreadingHTTPServer):
    """Serves the answers, which are by path. Raises OSError where it cannot be listened at.

    Requests may call this machine by the names of the loopback, and by `own_names` and addresses where those are given.
    """

    daemon_threads = True

    def __init__(
        self, host: str, port: int, answers: Mapping[str, PageAnswer], own_names: Iterable[str] | None = None
    ) -> None:
        self.answers = dict(answers)
        self._own_names = None if own_names is None else frozenset(name.lower() for name in own_names)
        self._free = threading.BoundedSemaphore(MAX_REQUESTS)
        self.address_family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        super().__init__((str(address[0]), port), _Handler)

    def server_bind(self) -> None:
        """Binds without asking a name server for this machine's name, as the class above does."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    @property
    def url(self) -> str:
        """Where the page is."""
        address = _address(self.server_name)
        # All addresses of the machine are none to open.
        name = socket.gethostname() if address is not None and address.is_unspecified else self.server_name
        return f"http://{f'[{name}]' if ':' in name else name}:{self.server_port}/"

    def takes(self, host: str) -> bool:
        """Returns whether a request may call this machine so, in its header Host."""
        found = _HOST.fullmatch(host.strip())
        if found is None:
            return False
        name = found[1].strip("[]").lower().removesuffix(".")
        # An address is no name that somebody else could make lead here.
        own = self._own_names is not None and (name in self._own_names or _address(name) is not None)
        return own or is_loopback(name)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serves it in a thread, unless too many are served."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serves it, until its deadline."""
        deadline = threading.Timer(_REQUEST_S, _cut_off, (request,))
        deadline.daemon = True
        try:
            deadline.start()
            super().process_request_thread(request, client_address)
        finally:
            deadline.cancel()
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: whoever went away in the middle is no error of ours."""


def _cut_off(request: socket.socket) -> None:
    """Has whoever reads from it, or writes to it, find the end of the connection; what is not sent yet is dropped."""
    with contextlib.suppress(OSError):
        request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer

    def do_GET(self) -> None:
        hosts = self.headers.get_all("Host", [])
        answer = self.server.answers.get(self.path.partition("?")[0])
        if len(hosts) != 1 or not self.server.takes(hosts[0]):
            self._fail(HTTPStatus.MISDIRECTED_REQUEST, "use the address that `lazyshard watch` has printed")
        elif answer is None:
            self._fail(HTTPStatus.NOT_FOUND, "there are /, /status.json and /metrics")
        else:
            self._send(HTTPStatus.OK, answer.kind, answer.policy, answer.make())

    def _refuse(self) -> None:
        self._fail(HTTPStatus.METHOD_NOT_ALLOWED, "this page is only for reading")

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_CONNECT = do_TRACE = _refuse

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Sends an error that the class above has found, without its words: they repeat what was asked."""
        self._fail(HTTPStatus(code), HTTPStatus(code).phrase)

    def _fail(self, status: HTTPStatus, text: str) -> None:
        self._send(status, "text/plain; charset=utf-8", NO_PAGE, f"{status.value} {text}\n".encode())

    def _send(self, status: HTTPStatus, kind: str, policy: str, data: bytes) -> None:
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(len(data)), "Content-Security-Policy": policy}
        allow = {"Allow": "GET"} if status == HTTPStatus.METHOD_NOT_ALLOWED else {}
        for name, value in (headers | _HEADERS | allow).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def version_string(self) -> str:
        """Returns who serves, without the version of Python."""
        return "lazyshard"

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: a line every other second would tell nobody anything."""


def is_loopback(host: str) -> bool:
    """Returns whether this is the name or an address by which only this machine can be reached."""
    address = _address(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class LastLook(Generic[T]):
    """What is known of what is looked at. Times are seconds since 1970."""

    last: T | None  # what the last look has found that has succeeded
    error: str | None  # why the last look has failed
    answered_at: float | None  # when the last look was over, failed or not
    silent_since: float | None  # when the look began that has had no answer for `SILENT_S` and more
    missing: bool = False  # the last look has found no stream: none has been begun yet, or it is gone

    @property
    def current(self) -> T | None:
        """What was found, None where it is not of now: the last look has failed, or has no answer."""
        return self.last if self.error is None and self.silent_since is None else None


class SharedLooks(Generic[T]):
    """Looks every `interval` seconds, from `start` to `close`; `clock` returns seconds since 1970."""

    def __init__(self, look: Callable[[], T], interval: float, *, clock: Callable[[], float] = time.time) -> None:
        self.interval = interval
        self._look = look
        self._clock = clock
        self._changed = threading.Condition()
        self._closed = False
        self._asked_at = self._ended_at = float("-inf")
        # Of the look that is under way: when it began, by the clock and by the monotonic one.
        self._began: tuple[float, float] | None = None
        self._took = 0.0
        self._known: LastLook[T] = LastLook(None, None, None, None)
        # A daemon: a look that hangs must not keep the command from ending.
        self._thread = threading.Thread(target=self._run, name="lazyshard-watch", daemon=True)

    def start(self) -> None:
        """Begins to look as soon as somebody asks."""
        self._thread.start()

    def close(self) -> None:
        """Looks no more. Does not wait for a look that is under way."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def facts(self, patience: float | None = None) -> LastLook[T]:
        """Returns what is known; waits `patience` seconds (None: 1) where there is nothing yet, or something old."""
        patience = _PATIENCE_S if patience is None else patience
        with self._changed:
            self._asked_at = now = time.monotonic()
            self._changed.notify_all()
            if patience and now - self._ended_at > self.interval + _PATIENCE_S and self._silent_since(now) is None:
                before = self._ended_at
                self._changed.wait_for(lambda: self._ended_at > before or self._closed, patience)
            return replace(self._known, silent_since=self._silent_since(time.monotonic()))

    def _silent_since(self, now: float) -> float | None:
        return self._began[0] if self._began is not None and now - self._began[1] >= SILENT_S else None

    def _run(self) -> None:
        while self._wait_until_asked():
            found, error, missing = None, None, False
            try:
                found = self._look()
            except (LazyShardError, OSError) as failure:
                error, missing = str(failure), isinstance(failure, StreamMissing)
            except Exception as failure:
                # Else the thread would end, and the page would say for ever that the share gives no answer.
                error = f"unexpected {type(failure).__name__}: {failure}; this should not happen, report it"
            self._tell(found, error, missing)

    def _wait_until_asked(self) -> bool:
        """Waits for the pause, and for somebody who asks; then notes that a look begins. Returns False once closed."""
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                seconds = seconds_to_next(now, self._asked_at, self._ended_at + self._pause)
                if seconds == 0.0:
                    self._began = self._clock(), now
                    return True
                self._changed.wait(seconds)
        return False

    @property
    def _pause(self) -> float:
        return max(self.interval, self._took / _LOAD)

    def _tell(self, found: T | None, error: str | None, missing: bool = False) -> None:
        with self._changed:
            assert self._began is not None
            self._ended_at = time.monotonic()
            self._took, self._began = self._ended_at - self._began[1], None
            last = self._known.last if found is None else found
            self._known = LastLook(last, error, self._clock(), None, missing)
            self._changed.notify_all()


def seconds_to_next(now: float, asked_at: float, due: float) -> float | None:
    """Returns in how many seconds the next look is to be made, which is not before `due`; None: not before one asks."""
    return None if now - asked_at > IDLE_S else max(0.0, due - now)
