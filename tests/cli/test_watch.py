"""`lazyshard watch` as a process: what it serves, to whom, how it ends; and the looks that all its viewers share."""

import contextlib
import http.client
import json
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from lazyshard.cli import watch_server
from lazyshard.cli.status import status_values
from lazyshard.cli.watch_server import MAX_REQUESTS, PageAnswer, SharedLooks, WatchServer, history_looks
from lazyshard.errors import StreamMissing
from lazyshard.inspection.outlook import Looks
from lazyshard.inspection.survey import Survey, take_survey
from tests.cli.commands import DEADLINE_S, NOW, lazyshard, started, survey
from tests.stream.damage import checkpoint, reads
from tests.stream.streams import produce, wait_until
from tests.tiers import full


class Answered(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class Watch(NamedTuple):
    process: "subprocess.Popen[str]"
    first_line: str

    @property
    def port(self) -> int:
        port = urllib.parse.urlsplit(self.first_line.split()[0]).port
        assert port is not None
        return port

    def stop(self, by: signal.Signals = signal.SIGINT) -> tuple[int, str, str]:
        self.process.send_signal(by)
        out, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, out, err


@contextlib.contextmanager
def watch(stream: Path, *arguments: object) -> Iterator[Watch]:
    with started("-m", "lazyshard.cli", "watch", stream, "--port", 0, *arguments) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()
        yield Watch(process, line.rstrip("\n"))


def get(port: int, path: str, method: str = "GET", **headers: str) -> Answered:
    """Asks once; `headers` takes the place of what a browser would send."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)) as connection:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return Answered(answer.status, dict(answer.getheaders()), answer.read())


def send(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as connection:
        connection.sendall(request)
        with contextlib.suppress(ConnectionResetError):
            return b"".join(iter(lambda: connection.recv(65536), b""))
    return b""


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = produce(tmp_path_factory.mktemp("watched") / "stream", 20, end=False)
    checkpoint(made, "sft", 8, 4, time.time())
    reads(made, "sft", 12, time.time())
    return made


@pytest.fixture(scope="module")
def served(stream: Path) -> Iterator[Watch]:
    with watch(stream) as running:
        yield running


def test_facts_are_those_of_status_and_of_metrics(served: Watch, stream: Path) -> None:
    assert served.first_line.startswith(f"http://127.0.0.1:{served.port}/ shows {stream}")
    answer = get(served.port, "/status.json")
    assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json")
    found = json.loads(answer.body)
    status = found.pop("status")
    assert found.pop("now_s") >= found.pop("answered_at_s")
    told = {"schema": 1, "directory": str(stream), "interval_s": 2.0}
    assert found == told | {"silent_since_s": None, "error": None, "missing": False}
    expected = json.loads(json.dumps(status_values(Looks().add(take_survey(stream, time.time())))))
    assert status.keys() == expected.keys()
    # All but what goes by the clock, and by what else is on the disk.
    for name in expected.keys() - {"looked_at_s", "free_bytes", "producer", "consumers", "summary"}:
        assert status[name] == expected[name], name
    assert (status["published_chunks"], status["consumers"][0]["ahead_chunks"]) == (10, -2)
    answer = get(served.port, "/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert 'lazyshard_consumer_ahead_chunks{consumer="sft"} -2.0' in answer.body.decode().splitlines()


def test_page_brings_all_that_it_needs_and_may_load_nothing_else(served: Watch) -> None:
    answer = get(served.port, "/")
    assert (answer.status, answer.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert all(re.fullmatch(r"'sha256-[A-Za-z0-9+/=]{44}'", policy[name]) for name in ("script-src", "style-src"))
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Cache-Control"] == "no-store"
    text = answer.body.decode()
    assert not re.search(r"https?://", text), "no address of anywhere else"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\son\w+=|style=", text)
    assert (text.count("<script"), text.count("<style"), text.count("<link")) == (1, 1, 1)


HERE = "127.0.0.1"
OWN_NAMES = ("localhost", "localhost:1", "LOCALHOST.", "127.0.0.1:8642", "127.8.8.8", "[::1]", "[::1]:80")
OTHER_NAMES = (
    *("evil.example", "localhost.evil.example", "10.0.0.1", "0.0.0.0", "[fe80::1]", "", "localhost:x", "a b"),
    *("::1", "@"),
)
METHODS = ("HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT")
TWO_HOSTS = b"GET /status.json HTTP/1.1\r\nHost: localhost\r\nHost: evil.example"
OTHER_PATHS = (
    *("/stream.json", "/chunk_00000.jsonl", "//stream/status.json", "/./status.json", "/../status.json"),
    *("/..%2f..%2f..%2f..%2fetc/passwd", "/%2e%2e/stream.json", "/status.json/", "/status.json%00"),
    *("http://127.0.0.1/status.json", "*", "/watch_page.html"),
)


@pytest.mark.parametrize(
    ("status", "method", "path", "host"),
    [
        *[(200, "GET", "/status.json", host) for host in OWN_NAMES],
        # A site whose name leads here reads nothing.
        *[(421, "GET", path, host) for host in OTHER_NAMES for path in ("/", "/status.json", "/metrics")],
        *[(405, method, "/status.json", HERE) for method in METHODS],
        *[(404, "GET", path, HERE) for path in OTHER_PATHS],
    ],
)
def test_requests(served: Watch, status: int, method: str, path: str, host: str) -> None:
    answer = get(served.port, path, method, Host=host, Origin="http://evil.example")
    assert answer.status == status
    assert status == 200 or method == "HEAD" or answer.body.startswith(b"%d " % status)
    assert status != 405 or answer.headers["Allow"] == "GET"
    assert not [name for name in answer.headers if name.lower().startswith("access-control")]


@pytest.mark.parametrize(
    ("request_lines", "answered"),
    [
        (b"GET /status.json HTTP/1.1\r\n", b"HTTP/1.0 421 "),
        (TWO_HOSTS, b"HTTP/1.0 421 "),
        *[(line, b"") for line in (b"GET", b"<script>", b"<script> / HTTP/1.1", b"GET / HTTP/<b>", b"\x16\x03\x01")],
    ],
)
def test_what_is_no_request_is_refused_and_not_repeated(served: Watch, request_lines: bytes, answered: bytes) -> None:
    answer = send(served.port, request_lines + b"\r\n\r\n")
    assert answer.startswith(answered)
    assert b"<" not in answer
    assert b" 200 " not in answer.partition(b"\n")[0]
    assert get(served.port, "/status.json").status == 200


def test_taken_port_is_told(stream: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        done = lazyshard("watch", stream, "--port", other.getsockname()[1])
    assert (done.returncode, done.stdout, done.stderr.count("\n"), "--port" in done.stderr) == (2, "", 1, True)


def test_a_stream_that_is_still_to_come_is_shown_once_it_comes_and_sigterm_ends_it_in_silence(tmp_path: Path) -> None:
    tmp_path = tmp_path / "to come"
    with watch(tmp_path, "--interval", "0.5") as running:
        found = json.loads(get(running.port, "/status.json").body)
        assert (found["status"], found["missing"], str(tmp_path) in found["error"]) == (None, True, True)
        assert b"lazyshard_stream_up 0.0" in get(running.port, "/metrics").body
        produce(tmp_path, 4)
        wait_until(lambda: b'"published_chunks": 2' in get(running.port, "/status.json").body, "the stream has come")
        assert b'"missing": false' in get(running.port, "/status.json").body
        assert running.stop(signal.SIGTERM) == (-signal.SIGTERM, "", "")


def test_another_host_than_the_loopback_is_warned_of(stream: Path) -> None:
    with watch(stream, "--host", "0.0.0.0") as running:
        assert running.first_line.split()[0] == f"http://{socket.gethostname()}:{running.port}/"
        assert get(running.port, "/status.json", Host="10.1.2.3:8642").status == 200
        assert get(running.port, "/status.json", Host=f"{socket.gethostname()}:8642").status == 200
        assert get(running.port, "/status.json", Host="evil.example").status == 421
        code, _, told = running.stop()
    assert (code, "0.0.0.0" in told) == (130, True)


def test_ctrl_c_ends_it_while_it_is_asked(stream: Path) -> None:
    """An interrupt that comes in the middle of taking a request was taken for an error of the request."""
    ended = threading.Event()

    def ask() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            while not ended.is_set():
                get(running.port, "/status.json")

    with watch(stream) as running, ThreadPoolExecutor(4) as viewers:
        for _ in range(4):
            viewers.submit(ask)
        for _ in range(30):
            get(running.port, "/status.json")
        code, _, told = running.stop()
        ended.set()
    assert (code, told) == (130, "")


def test_what_a_script_runs_in_its_background_outlives_ctrl_c(stream: Path) -> None:
    """A shell has such a program ignore the interrupt that all of a terminal get."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with watch(stream) as running:
            running.process.send_signal(signal.SIGINT)
            assert {get(running.port, "/status.json").status for _ in range(5)} == {200}
    finally:
        signal.signal(signal.SIGINT, before)


def test_too_many_requests_at_a_time_are_turned_away() -> None:
    with WatchServer("127.0.0.1", 0, {"/": PageAnswer("text/plain", lambda: b"here")}) as server:
        others = range(MAX_REQUESTS)
        assert all(server.verify_request(one, None) for one in others)
        with socket.create_connection((HERE, server.server_port)) as ours:
            server.handle_request()
            assert ours.recv(1) == b""
        server._served.discard(0)
        with socket.create_connection((HERE, server.server_port)) as ours:
            ours.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            server.handle_request()
            assert b"".join(iter(lambda: ours.recv(4096), b"")).endswith(b"\r\n\r\nhere")


@pytest.mark.parametrize("slow", ["asking", *full("taking")])
def test_slow_requests_come_to_an_end_and_others_are_served(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_server, "_REQUEST_S", 0.2)
    monkeypatch.setattr(watch_server, "MAX_REQUESTS", 4)
    long = bytes(16 << 20)
    answers = {"/": PageAnswer("text/plain", lambda: b"here"), "/long": PageAnswer("text/plain", lambda: long)}
    with WatchServer("127.0.0.1", 0, answers) as server, contextlib.ExitStack() as stack:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        stack.callback(thread.join)
        stack.callback(server.shutdown)
        port = server.server_port
        slow_ones = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(4)]
        for one in slow_ones:
            with contextlib.suppress(OSError):
                one.sendall(b"GET /long HTTP/1.1\r\n" + (b"Host: localhost\r\n\r\n" if slow == "taking" else b""))
        wait_until(lambda: not any(_is_open(one, slow) for one in slow_ones), "the slow ones are cut off")

        def is_served() -> bool:
            # A moment passes between the end of a connection and that of its thread.
            with contextlib.suppress(OSError, http.client.HTTPException):
                return get(port, "/").body == b"here"
            return False

        wait_until(is_served, "others are served")


def _is_open(connection: socket.socket, slow: str) -> bool:
    connection.setblocking(False)
    try:
        if slow == "asking":
            connection.send(b"x")
        # A reset is seen before the bytes are read that came before it.
        ends = select.poll()
        ends.register(connection, 0)
        return bool(connection.recv(1)) and not ends.poll(0)
    except BlockingIOError:
        return True
    except OSError:
        return False


def test_parts_of_the_page_hold_no_script_may_load_nothing_and_hold_pictures_once_they_are_drawn(served: Watch) -> None:
    for part in ("now", "history"):
        answer = get(served.port, f"/{part}")
        assert (answer.status, answer.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'none';")
        assert "img-src" not in answer.headers["Content-Security-Policy"]
        assert f'id="{part}"' in answer.body.decode()
        assert b"<script" not in answer.body and b"<style" not in answer.body
    wait_until(lambda: b"data:image/svg+xml;base64," in get(served.port, "/history").body, "pictures are drawn")
    page = get(served.port, "/").body.decode()
    assert "data:image/svg+xml;base64," in page
    version = re.findall(r'data-(?:history|version)="(\d+)"', page)
    assert version == [version[0]] * 2 != ["0", "0"]


def test_history_that_has_not_changed_is_not_drawn_again(stream: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[object] = []
    monkeypatch.setattr(watch_server, "draw", drawn.append)
    looks = history_looks(stream, 0.001)
    first = looks._look(None)
    assert (looks._look(first), len(drawn)) == (first, 1)


def test_newest_sample_is_that_of_the_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_server, "draw", lambda history: {})
    looks = history_looks(produce(tmp_path, 2, end=False), 0.001, True)
    first = looks._look(None)
    (tmp_path / "quarantine.jsonl").write_text("{}\n")
    second = looks._look(first)
    assert second.version == 2 and second.sample == first.sample is not None
    produce(tmp_path, 4)
    third = looks._look(second).sample
    assert third is not None and '  "id": 3' in third.lines
    assert history_looks(tmp_path, 0.001)._look(None).sample is None


@pytest.mark.parametrize(("module", "package"), [("prometheus_client.core", "prometheus-client"), ("jinja2", "jinja2")])
def test_missing_extra(module: str, package: str, stream: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    for name in ("watch_server", "watch_page"):
        monkeypatch.delitem(sys.modules, f"lazyshard.cli.{name}", raising=False)
    done = lazyshard("watch", stream)
    assert (done.returncode, package in done.stderr) == (1, True)


class Share:
    def __init__(self, interval: float = 0.0) -> None:
        self.count = 0
        self.fails: Exception | None = None
        self.answers = threading.Event()
        self.answers.set()
        self.looks: SharedLooks[Survey] = SharedLooks(self.take, interval, clock=lambda: NOW)

    def take(self, last: Survey | None) -> Survey:
        self.count += 1
        assert self.answers.wait(60.0)
        if self.fails is not None:
            raise self.fails
        return survey(looked_at=NOW)


def test_viewers_share_a_look_and_who_does_not_wait_is_answered_at_once() -> None:
    share = Share(3600.0)
    share.answers.clear()
    assert share.looks.facts(wait=False).last is None
    share.answers.set()
    with ThreadPoolExecutor(20) as viewers:
        found = list(viewers.map(lambda _: share.looks.facts().current, range(20)))
    assert (len({id(one) for one in found}), share.count, found[0] is None) == (1, 1, False)


@pytest.mark.parametrize("known", [True, False])
def test_share_that_hangs_holds_up_nobody_and_is_told(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    share = Share()
    assert not known or share.looks.facts().current is not None
    monkeypatch.setattr(watch_server, "SILENT_S", 0.02)
    share.answers.clear()
    wait_until(lambda: share.looks.facts().silent_since is not None, "the silence is told")
    facts = share.looks.facts()
    assert (facts.silent_since, facts.current, facts.last is not None) == (NOW, None, known)
    share.answers.set()
    wait_until(lambda: share.looks.facts().current is not None, "it answers again")


def test_a_look_that_fails_is_told_and_the_next_one_made() -> None:
    share = Share()
    share.fails = StreamMissing("/data/stream: there is no stream", directory="/data/stream")
    facts = share.looks.facts()
    assert (facts.error, facts.missing, facts.last, facts.answered_at) == (str(share.fails), True, None, NOW)
    for error, told in ((OSError(5, "Input/output error"), "Input/output"), (KeyError("x"), "KeyError: 'x'")):
        share.fails = None
        wait_until(lambda: share.looks.facts().current is not None, "the stream has come")
        share.fails = error
        wait_until(lambda: share.looks.facts().error is not None, "the failure is told")
        facts = share.looks.facts()
        assert facts.last is not None and facts.current is None and facts.error is not None
        assert told in facts.error


def test_slow_looks_are_made_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("lazyshard.cli.watch_server.time.monotonic", lambda: now[0])
    for took, due in ((0.005, 2.0), (0.1, 2.0), (3.0, 33.0)):
        looks: SharedLooks[Survey] = SharedLooks(Share().take, 2.0)
        looks._began = NOW, now[0]
        now[0] += took
        looks._run()
        assert looks.due - looks._began[1] == pytest.approx(due)
