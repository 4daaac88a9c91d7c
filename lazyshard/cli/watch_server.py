"""The web server of `lazyshard watch`: some addresses, read only, for this machine unless asked otherwise.

What a request says is compared with the names of the answers and never becomes part of a path. Requests must name this
machine as their host: else a site whose name is made to lead here (DNS rebinding) could read what a browser here can.

All viewers share the looks at the stream: one at a time, in a thread of its own, begun by whoever asks. A share that
hangs holds up the thread that looks, and viewers for `SILENT_S` once.

Of a metric that is not known there is no sample. Where the last look has failed or has no answer, there is none at all
but those that say so: what was true a while ago must not keep an alarm from ringing. Consumers beyond `MAX_LABELS`,
those that lag least, have none of their own.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from lazyshard.cli.watch_page import BEGINNING, POLICY, Part, Shown, draw, render
from lazyshard.errors import ConfigInvalid, LazyShardError, StreamMissing
from lazyshard.inspection.inspection import take_history
from lazyshard.inspection.outlook import Looks, Outlook, State
from lazyshard.inspection.survey import LostChunks, take_survey
from lazyshard.store.durable import publish_bytes, remove

MAX_REQUESTS: Final = 32  # Requests at a time: a page has one, every five seconds at the least. More are turned away.
_REQUEST_S: Final = 10.0  # A connection is closed so long after it was accepted, however often it sends or takes a byte

_HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}

NO_PAGE: Final = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
SILENT_S: Final = 5.0  # A look takes milliseconds, on a busy share a second: who has heard nothing longer is told so
MAX_LABELS: Final = 100  # Values of a label: as many as people look at, and far below what burdens a server

# Fields of `lazyshard status --json`, of the stream and of each consumer, that are metrics
_STREAM: Final = (
    "published_chunks", "published_samples", "retired_chunks", "ended", "published_samples_per_s", "used_bytes",
    "free_bytes", "growth_bytes_per_s", "full_in_s", "quarantined_rows",
)  # fmt: skip
_CONSUMER: Final = (
    "consumed_samples", "checkpoint_age_s", "lag_chunks", "lag_samples", "lag_s", "ahead_chunks",
    "read_samples_per_s", "starving_in_s",
)  # fmt: skip

T = TypeVar("T")


class PageAnswer(NamedTuple):
    """What an address gives: its type, a function that makes it, and its Content-Security-Policy."""

    kind: str
    make: Callable[[], bytes]
    policy: str = NO_PAGE


class WatchServer(ThreadingHTTPServer):
    """Serves the answers, which are by path, to requests that name the loopback, or `own_names` and addresses if given.

    Raises OSError where it cannot be listened at.
    """

    def __init__(
        self, host: str, port: int, answers: Mapping[str, PageAnswer], own_names: Iterable[str] | None = None
    ) -> None:
        self.answers = dict(answers)
        self._own_names = None if own_names is None else {name.lower() for name in own_names}
        self._served = set[Any]()
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
        if (found := re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:]+)(:[0-9]{1,5})?", host.strip())) is None:
            return False
        name = found[1].strip("[]").lower().removesuffix(".")
        # An address is no name that somebody else could make lead here.
        own = self._own_names is not None and (name in self._own_names or _address(name) is not None)
        return own or is_loopback(name)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Turns a request away while too many are served."""
        if few := len(self._served) < MAX_REQUESTS:
            self._served.add(request)
        return few

    def shutdown_request(self, request: Any) -> None:
        """Ends a request, served or turned away."""
        super().shutdown_request(request)
        self._served.discard(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: whoever went away in the middle is no error of ours."""


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer

    def handle(self) -> None:
        """Answers, until the deadline of the connection."""
        deadline = threading.Timer(_REQUEST_S, self._cut_off)
        deadline.daemon = True
        deadline.start()
        try:
            super().handle()
        finally:
            deadline.cancel()

    def _cut_off(self) -> None:
        # Whoever reads from it, or writes to it, finds the end of the connection; what is not sent yet is dropped.
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        hosts = self.headers.get_all("Host", [])
        answer = self.server.answers.get(self.path.partition("?")[0])
        if len(hosts) != 1 or not self.server.takes(hosts[0]):
            self._fail(HTTPStatus.MISDIRECTED_REQUEST, "use the address that `lazyshard watch` has printed")
        elif answer is None:
            self._fail(HTTPStatus.NOT_FOUND, "there are /, /status.json and /metrics")
        else:
            self._send(HTTPStatus.OK, answer)

    def _refuse(self) -> None:
        self._fail(HTTPStatus.METHOD_NOT_ALLOWED, "this page is only for reading", Allow="GET")

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_CONNECT = do_TRACE = _refuse

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Sends an error that the class above has found, without its words: they repeat what was asked."""
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
        """Returns who serves."""
        return "lazyshard"

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: a line every other second would tell nobody anything."""


def is_loopback(host: str) -> bool:
    """Returns whether this is the name or an address by which only this machine can be reached."""
    address = _address(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name)
    return None


@dataclass(frozen=True, slots=True)
class LastLook(Generic[T]):
    """What is known of what is looked at. Times are seconds since 1970."""

    last: T | None = None  # what the last look has found that has succeeded
    error: str | None = None  # why the last look has failed
    answered_at: float | None = None  # when the last look was over, failed or not
    silent_since: float | None = None  # when the look began that has had no answer for `SILENT_S` and more
    missing: bool = False  # the last look has found no stream: none has been begun yet, or it is gone

    @property
    def current(self) -> T | None:
        """What was found, None where it is not of now: the last look has failed, or has no answer."""
        return self.last if self.error is None and self.silent_since is None else None


class SharedLooks(Generic[T]):
    """Looks for whoever asks, every `interval` seconds at the most; `clock` returns seconds since 1970.

    `look` is given what was found last.
    """

    def __init__(self, look: Callable[[T | None], T], interval: float, clock: Callable[[], float] = time.time) -> None:
        self._look, self._interval, self._clock = look, interval, clock
        self._lock = threading.Lock()
        self._known: LastLook[T] = LastLook()
        # The look that is under way, and when the last one began, by the clock and by the monotonic one.
        self._thread: threading.Thread | None = None
        self._began = 0.0, float("-inf")
        self.due = float("-inf")

    def facts(self, *, wait: bool = True) -> LastLook[T]:
        """Returns what is known, after a look where one is due; with `wait` that is waited for until it is silent."""
        with self._lock:
            now = time.monotonic()
            if self._thread is None and now >= self.due:
                self._began = self._clock(), now
                # A daemon: a look that hangs must not keep the command from ending.
                begun = threading.Thread(target=self._run, name="lazyshard-watch", daemon=True)
                begun.start()
                # Not before: where no thread can be had now, the next one who asks tries again.
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
            # Else the page would say for ever that the share gives no answer.
            unexpected = f"unexpected {type(failure).__name__}: {failure}; this should not happen, report it"
            error = str(failure) if isinstance(failure, (LazyShardError, OSError)) else unexpected
            missing = isinstance(failure, StreamMissing)
        with self._lock:
            began, ended = self._began[1], time.monotonic()
            # A tenth of the time is spent on looks at the most: one that has to list the chunks may take 1 s.
            self.due = max(began + self._interval, ended + 10 * (ended - began))
            self._known = LastLook(self._known.last if found is None else found, error, self._clock(), None, missing)
            self._thread = None


def stream_looks(stream: Path, interval: float) -> SharedLooks[Outlook]:
    """Returns looks at how a stream is."""
    looks, lost = Looks(), LostChunks()
    return SharedLooks(lambda last: looks.add(take_survey(stream, time.time(), lost)), interval)


def history_looks(stream: Path, interval: float) -> SharedLooks[Shown]:
    """Returns looks at how a stream came to be, with pictures."""

    def look(last: Shown | None) -> Shown:
        history = take_history(stream, None if last is None else last.history)
        if last is not None and history == last.history:
            return last
        return Shown(history, draw(history), 1 if last is None else last.version + 1)

    # It is read once in so many looks at the most: it takes some 200 seals.
    return SharedLooks(look, max(20.0, 10 * interval))


def watch_values(stream: Path, interval: float, facts: LastLook[Outlook], now: float) -> dict[str, Any]:
    """Returns the values of `/status.json`; its fields are described in `docs/watch.md`."""
    asked = {"schema": 1, "directory": str(stream), "now_s": now, "interval_s": interval}
    answer = {"answered_at_s": facts.answered_at, "silent_since_s": facts.silent_since, "error": facts.error}
    status = None if facts.last is None else status_values(facts.last)
    return asked | answer | {"missing": facts.missing, "status": status}


def page_answers(
    told: Callable[[], tuple[dict[str, Any], Outlook | None]], shown: Callable[[], Shown | None]
) -> dict[str, PageAnswer]:
    """Returns the answers of the page, by path; `told` gives the values of `/status.json`, and the look they are of."""

    def part(name: Part, policy: str = NO_PAGE) -> PageAnswer:
        return PageAnswer("text/html; charset=utf-8", lambda: render(name, *told(), shown()), policy)

    status = PageAnswer("application/json", lambda: json.dumps(told()[0]).encode())
    return {"/": part("whole", POLICY), "/now": part("now"), "/history": part("history"), "/status.json": status}


def save_page(stream: Path, save: str) -> int:
    """Writes the page; it appears whole or not at all. Raises ConfigInvalid where something else is there."""
    # Where a link leads to, not the link.
    target, beginning = Path(os.path.realpath(save)), BEGINNING.encode()
    with contextlib.suppress(FileNotFoundError), open(target, "rb") as file:
        if file.read(len(beginning)) not in (b"", beginning):
            raise ConfigInvalid(f"{target}: is there, and no page of watch; choose another name", file=str(target))
    now = time.time()
    outlook, history = Looks().add(take_survey(stream, now)), take_history(stream)
    values = watch_values(stream, 0.0, LastLook(outlook, answered_at=now), now)
    made = render("whole", values, outlook, Shown(history, draw(history), 1), live=False)
    temporary = target.with_name(f".{target.name[:200]}.{secrets.token_hex(8)}")
    try:
        publish_bytes(made, target, temporary)
    finally:
        remove(temporary)
    output.say(f"{save}: {output.size(len(made))}")
    return exits.DONE


def serve_page(stream: Path, interval: float, host: str, port: int) -> NoReturn:
    """Serves page and metrics until Ctrl-C, which ends the process. Raises BadParameter where that is not possible."""
    looks, past, outside = stream_looks(stream, interval), history_looks(stream, interval), not is_loopback(host)

    def told() -> tuple[dict[str, Any], Outlook | None]:
        facts = looks.facts()
        return watch_values(stream, interval, facts, time.time()), facts.last

    answers = page_answers(told, lambda: past.facts(wait=False).last)
    kind = "text/plain; version=0.0.4; charset=utf-8"
    answers["/metrics"] = PageAnswer(kind, lambda: metrics_page(looks.facts(), time.time()))
    try:
        server = WatchServer(host, port, answers, {host, socket.gethostname()} if outside else None)
    except OSError as error:
        reason, wrong = (error.strerror or str(error)).lower(), "--port"
        text = f"{host}:{port} cannot be listened at ({reason}); choose another one, or 0 for any that is free"
        if isinstance(error, socket.gaierror):
            text, wrong = f"{host} is no name or address of a machine that is known here ({reason})", "--host"
        raise typer.BadParameter(text, param_hint=wrong) from None
    with server:
        # In all threads. Raised as an exception it may come in the middle of a lock's own code, which turns it into
        # another error, and the server takes any error for one of a request, and continues.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        threading.Thread(target=server.serve_forever, name="lazyshard-watch-server", daemon=True).start()
        output.say(f"{server.url} shows {stream}; Ctrl-C ends")
        if outside:
            names = "why rows were refused, the names of consumers, sources and machines"
            output.explain(f"whoever reaches {host} can read it: {names}. Nothing is authenticated or encrypted")
        # What a script starts in its background ignores it, and is to outlive it.
        while signal.getsignal(signal.sigwait({signal.SIGINT})) is signal.SIG_IGN:
            pass
        server.shutdown()
        # A look that is under way may be in C++ code, such as matplotlib's. CPython before 3.14 ends a daemon thread at
        # its next use of the interpreter, which there is a call of std::terminate.
        output.drop_what_nobody_reads()
        os._exit(exits.INTERRUPTED)


def metrics_page(facts: LastLook[Outlook], now: float) -> bytes:
    """Returns what Prometheus reads; `now` is in seconds since 1970."""
    families = list[GaugeMetricFamily]()
    for name, text, labels, values in _metrics(facts, now):
        # Two sources may be shown alike once what cannot be shown is escaped.
        known = {tuple(map(output.one_line, names)): value for names, value in values if value is not None}
        family = GaugeMetricFamily(f"lazyshard_{name}", text, labels=labels)
        for names, value in known.items():
            family.add_metric(names, float(value))
        families += [family] if known else []
    # Of this page alone, and not what others in this process register.
    page: Any = SimpleNamespace(collect=lambda: families)
    return generate_latest(page)


_Metric = tuple[str, str, Sequence[str], Iterable[tuple[tuple[str, ...], float | None]]]
"""Name, text, names of labels, and values by those of the labels."""


def _metrics(facts: LastLook[Outlook], now: float) -> Iterator[_Metric]:
    def plain(name: str, text: str, value: float | None) -> _Metric:
        return name, text, (), [((), value)]

    def named(field: str, of: str) -> tuple[str, str]:
        # With whole units, as Prometheus has them.
        whole = re.sub(r"(?<=_)s$", "seconds", field.replace("per_s", "per_second"))
        return f"{of}_{whole}", f"{field} of `lazyshard status --json`"

    yield plain("stream_up", "Whether the last look at the stream has succeeded", facts.current is not None)
    yield plain("stream_last_look_seconds", "Time of the last answer, since 1970", facts.answered_at)
    silent = 0.0 if facts.silent_since is None else max(0.0, now - facts.silent_since)
    yield plain("stream_silent_seconds", "How long the look under way has had no answer", silent)
    if facts.current is None:
        return
    status = status_values(facts.current)
    yield from (plain(*named(field, "stream"), status[field]) for field in _STREAM)
    yield plain("stream_problems", "What is wrong with its files", len(status["problems"]))
    yield plain("stream_consumers", "Consumers that have registered", len(status["consumers"]))
    if (producer := status["producer"]) is not None:
        yield plain(*named("heartbeat_age_s", "stream"), producer["heartbeat_age_s"])
        states = [((state,), state == producer["state"]) for state in get_args(State)]
        yield "stream_producer_state", "What the producer does", ["state"], states
    shown = sorted(status["consumers"], key=lambda one: (-(one["lag_chunks"] or 0), one["name"]))[:MAX_LABELS]
    for field in _CONSUMER:
        yield *named(field, "consumer"), ["consumer"], [((one["name"],), one[field]) for one in shown]
    waiting = [((one["name"],), one["supply"] == "dry") for one in shown]
    yield "consumer_waiting", "Whether it waits for chunks", ["consumer"], waiting
    wrong = [((one["name"],), one["problem"] is not None) for one in shown]
    yield "consumer_problem", "Whether its cursor does not count", ["consumer"], wrong
    for field, source, stream in (
        ("weight", "the rows to come", "its samples to come"),
        ("share", "the rows drawn so far", "its samples trained so far"),
    ):
        drawn = [((one["name"],), one[field]) for one in status["mixture"]]
        trained = [((one["name"], part["stream"]), part[field]) for one in shown for part in one["blend"]]
        yield f"stream_source_{field}", f"Share of {source}", ["source"], drawn
        yield f"consumer_blend_{field}", f"Share of {stream}", ["consumer", "stream"], trained
