"""The web server of `lazyshard watch`: a few read-only paths, reachable only from this machine by default.

Request paths are only looked up in the table of answers and never become part of a file path. Requests must name this
machine in their Host header: otherwise a site that uses DNS rebinding could read the page through a local browser.

All viewers share single-flight refreshes: a request starts one in its own thread if it is due, and others wait for the
same one. If a share hangs, only this thread hangs, and viewers wait at most `SILENT_S` once.

Unknown metrics have no sample. If the last refresh failed or is hanging, only the metrics that report this are present:
stale values must not suppress an alert. The consumers beyond `MAX_LABELS` with the smallest lag have no samples, nor
have the writers beyond it that publish fastest.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import secrets
import signal
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Generic, NamedTuple, NoReturn, TypeVar, get_args

import typer
from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily

from lazyshard.cli import exits, output
from lazyshard.cli.status import status_values
from lazyshard.cli.status_writers import by_urgency
from lazyshard.cli.watch_page import BEGINNING, POLICY, Part, Shown, draw, newest_sample, render
from lazyshard.errors import ConfigInvalid, LazyShardError, StreamMissing
from lazyshard.inspection.inspection import take_history
from lazyshard.inspection.outlook import Looks, Outlook
from lazyshard.inspection.survey import State, take_survey
from lazyshard.store.durable import publish_bytes, remove

MAX_REQUESTS: Final = 32  # Concurrent requests, more are rejected. A page makes one at a time, every 5 s or more often
_REQUEST_S: Final = 10.0  # A connection is closed this long after it was accepted, even if it still transfers data

_HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}

NO_PAGE: Final = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
SILENT_S: Final = 5.0  # A refresh takes milliseconds, on a busy share a second; a longer one is reported as silence
MAX_LABELS: Final = 100  # Values of a label: as many as people can read, and far below the load limit of a server

# Fields of the stream and of each consumer in `lazyshard status --json` that are metrics
_STREAM: Final = (
    "published_chunks", "published_samples", "retired_chunks", "ended", "published_samples_per_s", "used_bytes",
    "free_bytes", "growth_bytes_per_s", "full_in_s", "quarantined_rows",
)  # fmt: skip
_CONSUMER: Final = (
    "consumed_samples", "checkpoint_age_s", "lag_chunks", "lag_samples", "lag_s", "ahead_chunks",
    "read_samples_per_s", "starving_in_s",
)  # fmt: skip
_WRITER: Final = ("published_samples", "stream_samples", "waiting_pieces", "samples_per_s", "heartbeat_age_s")

T = TypeVar("T")


class PageAnswer(NamedTuple):
    """The answer at a path: its content type, a function that makes the body, and its Content-Security-Policy."""

    kind: str
    make: Callable[[], bytes]
    policy: str = NO_PAGE


class WatchServer(ThreadingHTTPServer):
    """Serves `answers` (by path) to requests whose Host is the loopback or, if `own_names` is given, a name or address.

    Raises OSError if it cannot listen on the address.
    """

    def __init__(self, host: str, port: int, answers: Mapping[str, PageAnswer], own_names: Iterable[str] = ()) -> None:
        self.answers = dict(answers)
        self._own_names = {name.lower() for name in own_names}
        self._served = set[Any]()
        self.address_family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        super().__init__((str(address[0]), port), _Handler)

    def server_bind(self) -> None:
        """Binds without asking a name server for this machine's name, as the class above does."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    @property
    def url(self) -> str:
        """The URL of the page."""
        address = _address(self.server_name)
        # 0.0.0.0 and :: cannot be opened in a browser.
        name = socket.gethostname() if address is not None and address.is_unspecified else self.server_name
        return f"http://{f'[{name}]' if ':' in name else name}:{self.server_port}/"

    def takes(self, host: str) -> bool:
        """Returns whether a request may have this Host header."""
        if (found := re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:]+)(:[0-9]{1,5})?", host.strip())) is None:
            return False
        name = found[1].strip("[]").lower().removesuffix(".")
        # DNS rebinding needs a name, so any address is safe.
        own = name in self._own_names or (self._own_names and _address(name) is not None)
        return bool(own) or is_loopback(name)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Rejects a request while too many are being served."""
        if few := len(self._served) < MAX_REQUESTS:
            self._served.add(request)
        return few

    def shutdown_request(self, request: Any) -> None:
        """Ends a request that was served or rejected."""
        super().shutdown_request(request)
        self._served.discard(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs nothing, as a client that disconnects is not an error."""


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer

    def handle(self) -> None:
        """Answers requests until the deadline of the connection."""
        deadline = threading.Timer(_REQUEST_S, self._cut_off)
        deadline.daemon = True
        deadline.start()
        try:
            super().handle()
        finally:
            deadline.cancel()

    def _cut_off(self) -> None:
        # Makes pending reads and writes of this connection fail; data that is not sent yet is dropped.
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        hosts = self.headers.get_all("Host", [])
        answer = self.server.answers.get(self.path.partition("?")[0])
        if len(hosts) != 1 or not self.server.takes(hosts[0]):
            self._fail(HTTPStatus.MISDIRECTED_REQUEST, "use the address that `lazyshard watch` has printed")
        elif answer is None:
            self._fail(HTTPStatus.NOT_FOUND, "available: /, /status.json and /metrics")
        else:
            self._send(HTTPStatus.OK, answer)

    def _refuse(self) -> None:
        self._fail(HTTPStatus.METHOD_NOT_ALLOWED, "this page is read-only", Allow="GET")

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_CONNECT = do_TRACE = _refuse

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Sends an error of the base class without its message, which repeats parts of the request."""
        self._fail(code, HTTPStatus(code).phrase)

    def _fail(self, status: int, text: str, **headers: str) -> None:
        self._send(status, PageAnswer("text/plain; charset=utf-8", f"{status:d} {text}\n".encode), **headers)

    def _send(self, status: int, answer: PageAnswer, **headers: str) -> None:
        data = answer.make()
        self.send_response(status)
        own = {"Content-Type": answer.kind, "Content-Length": str(len(data)), "Content-Security-Policy": answer.policy}
        for name, value in {**own, **_HEADERS, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def version_string(self) -> str:
        """Returns the Server header."""
        return "lazyshard"

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing, as each open page makes a request every few seconds."""


def is_loopback(host: str) -> bool:
    """Returns whether this is `localhost` or a loopback address."""
    address = _address(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name)
    return None


@dataclass(frozen=True, slots=True)
class LastLook(Generic[T]):
    """The results of the last refreshes. Times are seconds since 1970."""

    last: T | None = None  # result of the last successful refresh
    error: str | None = None  # why the last refresh failed
    answered_at: float | None = None  # when the last refresh ended, failed or not
    silent_since: float | None = None  # start of a refresh that has been running for at least `SILENT_S`
    missing: bool = False  # the last refresh found no stream: it does not exist yet, or was removed

    @property
    def current(self) -> T | None:
        """The last result, or None if it is stale because the last refresh failed or hangs."""
        return self.last if self.error is None and self.silent_since is None else None


class SharedLooks(Generic[T]):
    """Single-flight refreshes, at most one per `interval` seconds. `clock` returns seconds since 1970.

    `look` is called with the last successful result.
    """

    def __init__(self, look: Callable[[T | None], T], interval: float, clock: Callable[[], float] = time.time) -> None:
        self._look, self._interval, self._clock = look, interval, clock
        self._lock = threading.Lock()
        self._known: LastLook[T] = LastLook()
        # The running refresh, and the start of the last one by `clock` and by the monotonic clock.
        self._thread: threading.Thread | None = None
        self._began = 0.0, float("-inf")
        self.due = float("-inf")

    def facts(self, *, wait: bool = True) -> LastLook[T]:
        """Starts a refresh if one is due and returns the results; with `wait`, waits for it for up to `SILENT_S`."""
        with self._lock:
            now = time.monotonic()
            if self._thread is None and now >= self.due:
                self._began = self._clock(), now
                # A daemon thread, as a hanging refresh must not keep the command from ending
                begun = threading.Thread(target=self._run, name="lazyshard-watch", daemon=True)
                begun.start()
                # Set after `start`, so that the next request retries if no thread can be started.
                self._thread = begun
            thread = self._thread
        if wait and thread is not None:
            thread.join(max(0.0, self._began[1] + SILENT_S - now))
        with self._lock:
            silent = self._thread is not None and time.monotonic() - self._began[1] >= SILENT_S
            return replace(self._known, silent_since=self._began[0] if silent else None)

    def _run(self) -> None:
        found, error, missing = None, None, False
        try:
            found = self._look(self._known.last)
        except Exception as failure:
            # Any error ends the refresh: otherwise the page would report a hanging share forever.
            unexpected = f"unexpected {type(failure).__name__}: {failure}; this is a bug, report it"
            error = str(failure) if isinstance(failure, (LazyShardError, OSError)) else unexpected
            missing = isinstance(failure, StreamMissing)
        with self._lock:
            began, ended = self._began[1], time.monotonic()
            # Spend at most a tenth of the time on refreshes: one that has to list the chunks may take 1 s.
            self.due = max(began + self._interval, ended + 10 * (ended - began))
            self._known = LastLook(self._known.last if found is None else found, error, self._clock(), None, missing)
            self._thread = None


def stream_looks(stream: Path, interval: float) -> SharedLooks[Outlook]:
    """Returns shared refreshes of the state of a stream."""
    looks = Looks()
    return SharedLooks(lambda last: looks.add(take_survey(stream, time.time(), looks.lost)), interval)


def history_looks(stream: Path, interval: float, sample: bool = False) -> SharedLooks[Shown]:
    """Returns shared refreshes of a stream's history, with charts, and of its newest sample if `sample`."""

    def look(last: Shown | None) -> Shown:
        history = take_history(stream, None if last is None else last.history)
        if last is not None and history == last.history:
            return last
        newest = newest_sample(history.found if sample else None)
        return Shown(history, draw(history), 1 if last is None else last.version + 1, newest)

    # Less often than the state, as it reads about 200 seals
    return SharedLooks(look, max(20.0, 10 * interval))


def watch_values(stream: Path, interval: float, facts: LastLook[Outlook], now: float) -> dict[str, Any]:
    """Returns the values of `/status.json`, whose fields are described in `docs/watch.md`."""
    asked = {"schema": 1, "directory": str(stream), "now_s": now, "interval_s": interval}
    answer = {"answered_at_s": facts.answered_at, "silent_since_s": facts.silent_since, "error": facts.error}
    status = None if facts.last is None else status_values(facts.last)
    return asked | answer | {"missing": facts.missing, "status": status}


def page_answers(
    told: Callable[[], tuple[dict[str, Any], Outlook | None]], shown: Callable[[], Shown | None]
) -> dict[str, PageAnswer]:
    """Returns the answers by path. `told` returns the values of `/status.json` and the outlook they are made of."""

    def part(name: Part, policy: str = NO_PAGE) -> PageAnswer:
        return PageAnswer("text/html; charset=utf-8", lambda: render(name, *told(), shown()), policy)

    status = PageAnswer("application/json", lambda: json.dumps(told()[0]).encode())
    return {"/": part("whole", POLICY), "/now": part("now"), "/history": part("history"), "/status.json": status}


def save_page(stream: Path, save: str, sample: bool) -> int:
    """Writes the page atomically. Raises ConfigInvalid if the file exists and is not such a page."""
    # Replaces the target of a symbolic link, not the link.
    target, beginning = Path(os.path.realpath(save)), BEGINNING.encode()
    with contextlib.suppress(FileNotFoundError), open(target, "rb") as file:
        if file.read(len(beginning)) not in (b"", beginning):
            raise ConfigInvalid(f"{target}: exists and is not a page of watch; choose another name", file=str(target))
    now = time.time()
    outlook, history = Looks().add(take_survey(stream, now)), take_history(stream)
    values = watch_values(stream, 0.0, LastLook(outlook, answered_at=now), now)
    shown = Shown(history, draw(history), 1, newest_sample(history.found) if sample else None)
    made = render("whole", values, outlook, shown, live=False)
    temporary = target.with_name(f".{target.name[:200]}.{secrets.token_hex(8)}")
    try:
        publish_bytes(made, target, temporary)
    finally:
        remove(temporary)
    output.say(f"{save}: {output.size(len(made))}")
    return exits.DONE


def serve_page(stream: Path, interval: float, host: str, port: int, sample: bool) -> NoReturn:
    """Serves page and metrics until Ctrl-C, which ends the process. Raises BadParameter if it cannot listen."""
    looks, past = stream_looks(stream, interval), history_looks(stream, interval, sample)
    outside = not is_loopback(host)

    def told() -> tuple[dict[str, Any], Outlook | None]:
        facts = looks.facts()
        return watch_values(stream, interval, facts, time.time()), facts.last

    answers = page_answers(told, lambda: past.facts(wait=False).last)
    kind = "text/plain; version=0.0.4; charset=utf-8"
    answers["/metrics"] = PageAnswer(kind, lambda: metrics_page(looks.facts(), time.time()))
    try:
        server = WatchServer(host, port, answers, {host, socket.gethostname()} if outside else ())
    except OSError as error:
        reason, wrong = (error.strerror or str(error)).lower(), "--port"
        text = f"cannot listen on {host}:{port} ({reason}); choose another port, or 0 for any free one"
        if isinstance(error, socket.gaierror):
            text, wrong = f"cannot resolve {host} ({reason})", "--host"
        raise typer.BadParameter(text, param_hint=wrong) from None
    with server:
        # In all threads: KeyboardInterrupt could be raised inside a lock's code, which turns it into another error, and
        # the server would take it for an error of a request and continue.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        threading.Thread(target=server.serve_forever, name="lazyshard-watch-server", daemon=True).start()
        output.say(f"{server.url} shows {stream}; Ctrl-C to quit")
        if outside:
            names = "why rows were refused, names of consumers, sources and machines, with --sample the newest sample"
            output.explain(f"everyone who can reach {host} can read {names}. Nothing is authenticated or encrypted")
        # Background jobs of a script ignore SIGINT and must outlive the script.
        while signal.getsignal(signal.sigwait({signal.SIGINT})) is signal.SIG_IGN:
            pass
        server.shutdown()
        # A running refresh may be in C++ code, such as matplotlib's. CPython before 3.14 ends a daemon thread at its
        # next use of the interpreter, which calls std::terminate in such code.
        output.detach_broken_streams()
        os._exit(exits.INTERRUPTED)


_Sample = tuple[str, str, dict[str, str], float | None]
"""Name and help text of a metric, labels, and value."""


def metrics_page(facts: LastLook[Outlook], now: float) -> bytes:
    """Returns the metrics in Prometheus' text format; `now` is in seconds since 1970."""
    families, known = dict[str, GaugeMetricFamily](), dict[tuple[str, ...], _Sample]()
    for sample in _samples(facts, now):
        if sample[3] is not None:
            # Names of two sources may become equal when they are escaped.
            known[(sample[0], *map(output.one_line, sample[2].values()))] = sample
    for (name, *values), (_, text, labels, value) in known.items():
        family = families.setdefault(name, GaugeMetricFamily(f"lazyshard_{name}", text, labels=[*labels]))
        family.add_metric(values, float(value or 0))
    # Only these metrics, not those of the global registry of this process
    page: Any = SimpleNamespace(collect=families.values)
    return generate_latest(page)


def _samples(facts: LastLook[Outlook], now: float) -> Iterator[_Sample]:
    def named(field: str, of: str) -> tuple[str, str]:
        # Prometheus spells out units.
        whole = re.sub(r"(?<=_)s$", "seconds", field.replace("per_s", "per_second"))
        return f"{of}_{whole}", f"{field} of `lazyshard status --json`"

    yield "stream_up", "Whether the last refresh succeeded", {}, facts.current is not None
    yield "stream_last_look_seconds", "Time of the last refresh, since 1970", {}, facts.answered_at
    silent = 0.0 if facts.silent_since is None else max(0.0, now - facts.silent_since)
    yield "stream_silent_seconds", "How long the running refresh has had no answer", {}, silent
    if facts.current is None:
        return
    status = status_values(facts.current)
    for field in _STREAM:
        yield *named(field, "stream"), {}, status[field]
    yield "stream_problems", "Number of problems", {}, len(status["problems"])
    yield "stream_consumers", "Number of registered consumers", {}, len(status["consumers"])
    if (producer := status["producer"]) is not None:
        yield *named("heartbeat_age_s", "stream"), {}, producer["heartbeat_age_s"]
        for state in get_args(State):
            yield "stream_producer_state", "State of the producer", {"state": state}, state == producer["state"]
    for one in status["mixture"]:
        yield "stream_source_weight", "Share of the rows to come", {"source": one["name"]}, one["weight"]
        yield "stream_source_share", "Share of the rows drawn so far", {"source": one["name"]}, one["share"]
    for writer in by_urgency(facts.current)[:MAX_LABELS] if not status["ended"] else ():
        label = {"writer": writer.name}
        for field in _WRITER:
            yield *named(field, "writer"), label, getattr(writer, field)
        yield "writer_trouble", "Whether it is refused, failed, dead or unknown", label, writer.in_trouble
    for one in sorted(status["consumers"], key=lambda one: (-(one["lag_chunks"] or 0), one["name"]))[:MAX_LABELS]:
        label = {"consumer": one["name"]}
        for field in _CONSUMER:
            yield *named(field, "consumer"), label, one[field]
        yield "consumer_waiting", "Whether it waits for chunks", label, one["supply"] == "dry"
        yield "consumer_problem", "Whether its cursor cannot be used", label, one["problem"] is not None
        for part in one["blend"]:
            both = label | {"stream": part["stream"]}
            yield "consumer_blend_weight", "Share of its samples to come", both, part["weight"]
            yield "consumer_blend_share", "Share of its samples trained so far", both, part["share"]
