"""The web server of `lazyshard watch`: some addresses, read only, for this machine unless asked otherwise.

    GET /             the page, with all that it needs in it
    GET /now          the part of it that changes with every look
    GET /history      the part of it with pictures
    GET /status.json  what the page shows now
    GET /metrics      the same for Prometheus

What a request says is compared with these names and never becomes part of a path. Requests must name this machine as
their host: else a site whose name is made to lead here (DNS rebinding) could read what a browser here can. Nothing is
authenticated or encrypted.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import socketserver
import struct
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

MAX_REQUESTS: Final = 32
"""Requests at a time: a page has one, every five seconds at the least. More are turned away."""

_REQUEST_S: Final = 10.0
"""A connection is closed so long after it was accepted, however often it sends or takes a byte."""

_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:]+)(:[0-9]{1,5})?")

_HEADERS: Final = (
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
)


_NO_PAGE: Final = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"


@dataclass(frozen=True, slots=True)
class Answer:
    """What an address gives: its type, a function that makes it, and its Content-Security-Policy."""

    kind: str
    make: Callable[[], bytes]
    policy: str = _NO_PAGE


class WatchServer(ThreadingHTTPServer):
    """Serves the answers.

    Args:
        host: address to listen at.
        port: TCP port, 0 for any that is free.
        answers: by path.
        own_names: names of hosts, besides those of the loopback, by which a request may call this machine; None where
            only those of the loopback may.

    Raises:
        OSError: it cannot be listened at.
    """

    daemon_threads = True

    def __init__(
        self, host: str, port: int, answers: Mapping[str, Answer], own_names: Iterable[str] | None = None
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
        host = f"[{name}]" if ":" in name else name
        return f"http://{host}:{self.server_port}/"

    def takes(self, host: str) -> bool:
        """Returns whether a request may call this machine so, in its header Host."""
        found = _HOST.fullmatch(host.strip())
        if found is None:
            return False
        name = found[1].strip("[]").lower().removesuffix(".")
        if is_loopback(name):
            return True
        # An address is no name that somebody else could make lead here.
        return self._own_names is not None and (name in self._own_names or _address(name) is not None)

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
        if len(hosts) != 1 or not self.server.takes(hosts[0]):
            self._fail(HTTPStatus.MISDIRECTED_REQUEST, "use the address that `lazyshard watch` has printed")
            return
        answer = self.server.answers.get(self.path.partition("?")[0])
        if answer is None:
            self._fail(HTTPStatus.NOT_FOUND, "there are /, /status.json and /metrics")
            return
        self._send(HTTPStatus.OK, answer.kind, answer.policy, answer.make())

    def _refuse(self) -> None:
        self._fail(HTTPStatus.METHOD_NOT_ALLOWED, "this page is only for reading")

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_CONNECT = do_TRACE = _refuse

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Sends an error that the class above has found, without its words: they repeat what was asked."""
        self._fail(HTTPStatus(code), HTTPStatus(code).phrase)

    def _fail(self, status: HTTPStatus, text: str) -> None:
        self._send(status, "text/plain; charset=utf-8", _NO_PAGE, f"{status.value} {text}\n".encode())

    def _send(self, status: HTTPStatus, kind: str, policy: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Security-Policy", policy)
        for name, value in _HEADERS:
            self.send_header(name, value)
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET")
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
