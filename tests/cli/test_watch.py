"""`lazyshard watch` as a process: what it serves, to whom, and how it ends."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lazyshard.cli import watch_server
from lazyshard.cli.main import main
from lazyshard.cli.status import status_values
from lazyshard.cli.watch import history_looks
from lazyshard.cli.watch_server import MAX_REQUESTS, PageAnswer, WatchServer
from lazyshard.inspection.outlook import Looks
from lazyshard.inspection.survey import take_survey
from tests.cli.commands import lazyshard
from tests.cli.watched import DEADLINE_S, Watch, get, send, watch
from tests.inspection.surveyed import checkpoint, reads
from tests.stream.streams import produce, wait_until


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


def test_says_where_the_page_is(served: Watch, stream: Path) -> None:
    assert re.fullmatch(r"http://127\.0\.0\.1:[1-9][0-9]*/", served.url)
    assert served.first_line == f"{served.url} shows {stream}; Ctrl-C ends"


def test_facts_are_those_of_status(served: Watch, stream: Path) -> None:
    answer = get(served.port, "/status.json")
    assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json")
    found = json.loads(answer.body)
    status, missing = found.pop("status"), found.pop("missing")
    assert found.keys() == {"schema", "directory", "now_s", "interval_s", "answered_at_s", "silent_since_s", "error"}
    assert missing is False
    assert (found["directory"], found["interval_s"], found["error"], found["silent_since_s"]) == (
        str(stream),
        2.0,
        None,
        None,
    )
    expected = json.loads(json.dumps(status_values(Looks().add(take_survey(stream, time.time())))))
    assert status.keys() == expected.keys()
    # All but what goes by the clock, and by what else is on the disk.
    for name in expected.keys() - {"looked_at_s", "free_bytes", "producer", "consumers", "summary"}:
        assert status[name] == expected[name], name
    assert (status["published_chunks"], status["consumers"][0]["ahead_chunks"]) == (10, -2)
    assert status["summary"].endswith("waiting for data: 'sft' for 2 chunks")


def test_metrics_are_the_same_facts(served: Watch) -> None:
    answer = get(served.port, "/metrics")
    lines = answer.body.decode().splitlines()
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert "lazyshard_stream_up 1.0" in lines
    assert "lazyshard_stream_published_chunks 10.0" in lines
    assert 'lazyshard_consumer_ahead_chunks{consumer="sft"} -2.0' in lines
    assert 'lazyshard_consumer_waiting{consumer="sft"} 1.0' in lines


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


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:1", "LOCALHOST.", "127.0.0.1:8642", "127.8.8.8", "[::1]", "[::1]:80"],
)
def test_loopback_by_any_of_its_names(served: Watch, host: str) -> None:
    assert get(served.port, "/status.json", Host=host).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "10.0.0.1",
        "0.0.0.0",
        "[fe80::1]",
        "",
        "localhost:x",
        "a b",
        "::1",
        "@",
    ],
)
@pytest.mark.parametrize("path", ["/", "/status.json", "/metrics"])
def test_site_whose_name_leads_here_reads_nothing(served: Watch, host: str, path: str) -> None:
    answer = get(served.port, path, Host=host)
    assert (answer.status, answer.body) == (421, b"421 use the address that `lazyshard watch` has printed\n")


@pytest.mark.parametrize("hosts", [b"", b"Host: localhost\r\nHost: evil.example\r\n"])
def test_request_without_a_host_or_with_two_reads_nothing(served: Watch, hosts: bytes) -> None:
    assert send(served.port, b"GET /status.json HTTP/1.1\r\n" + hosts + b"\r\n").startswith(b"HTTP/1.0 421 ")


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"])
def test_other_methods_than_get_are_refused(served: Watch, method: str) -> None:
    answer = get(served.port, "/status.json", method)
    assert (answer.status, answer.headers["Allow"]) == (405, "GET")


@pytest.mark.parametrize(
    "path",
    [
        "/stream.json",
        "/chunk_00000.jsonl",
        "//stream/status.json",
        "/./status.json",
        "/../status.json",
        "/..%2f..%2f..%2f..%2fetc/passwd",
        "/%2e%2e/stream.json",
        "/status.json/",
        "/status.json%00",
        "http://127.0.0.1/status.json",
        "*",
        "/watch_page.html",
    ],
)
def test_no_other_path_leads_anywhere(served: Watch, path: str) -> None:
    answer = get(served.port, path)
    assert (answer.status, answer.body) == (404, b"404 there are /, /status.json and /metrics\n")


@pytest.mark.parametrize(
    "request_line",
    [
        b"GET\r\n\r\n",
        b"<script>\r\n\r\n",
        b"<script> / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/<b>\r\n\r\n",
        b"\x16\x03\x01\r\n\r\n",
    ],
)
def test_what_is_no_request_is_refused_and_not_repeated(served: Watch, request_line: bytes) -> None:
    answer = send(served.port, request_line)
    assert b"<" not in answer
    assert b" 200 " not in answer.partition(b"\n")[0]
    assert get(served.port, "/status.json").status == 200


def test_cross_site_requests_get_no_leave_to_read(served: Watch) -> None:
    answer = get(served.port, "/status.json", Origin="http://evil.example")
    assert not [name for name in answer.headers if name.lower().startswith("access-control")]


def test_sigterm_ends_it_at_once_and_in_silence(stream: Path) -> None:
    with watch(stream) as running:
        assert get(running.port, "/status.json").status == 200
        running.process.send_signal(signal.SIGTERM)
        out, err = running.process.communicate(timeout=DEADLINE_S)
    assert (running.process.returncode, out, err) == (-signal.SIGTERM, "", "")


def test_taken_port_is_told(stream: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = lazyshard("watch", stream, "--port", port)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"--port: 127.0.0.1:{port} cannot be listened at (address already in use); choose another one" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--host", "no such host"), "--host: no such host is no name or address of a machine that is known here"),
        (("--host", ""), "an address is needed"),
        (("--port", "65536"), "--port"),
        (("--interval", "0"), "--interval"),
    ],
)
def test_impossible_options(
    stream: Path, arguments: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", str(stream), *arguments]) == 2
    assert told in capsys.readouterr().err


def test_directory_that_cannot_come(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path / "no" / "stream")]) == 2
    assert f"nor is {tmp_path}/no, in which a producer would make it" in capsys.readouterr().err


def test_directory_that_is_still_to_come_is_shown_as_such_and_the_stream_once_it_comes(tmp_path: Path) -> None:
    tmp_path = tmp_path / "to come"
    with watch(tmp_path, "--interval", "0.5") as running:
        found = json.loads(get(running.port, "/status.json").body)
        assert (found["status"], found["error"]) == (
            None,
            f"{tmp_path}: there is no stream: neither stream.json nor any chunk file; see whether the path is right, "
            "and start its producer",
        )
        assert found["missing"] is True
        assert b"lazyshard_stream_up 0.0" in get(running.port, "/metrics").body
        produce(tmp_path, 4)
        deadline = time.monotonic() + 30.0
        while found["status"] is None:
            assert time.monotonic() < deadline
            found = json.loads(get(running.port, "/status.json").body)
        assert (found["status"]["published_chunks"], found["missing"]) == (2, False)


def test_another_host_than_the_loopback_is_warned_of(stream: Path) -> None:
    with watch(stream, "--host", "0.0.0.0") as running:
        assert running.url == f"http://{socket.gethostname()}:{running.port}/"
        assert get(running.port, "/status.json", Host="10.1.2.3:8642").status == 200
        assert get(running.port, "/status.json", Host=f"{socket.gethostname()}:8642").status == 200
        assert get(running.port, "/status.json", Host="evil.example").status == 421
        code, _, told = running.stop()
    assert code == 130
    assert told.startswith("whoever reaches 0.0.0.0 can read it")


def test_ctrl_c_ends_it_while_it_is_asked(stream: Path) -> None:
    """An interrupt that comes in the middle of taking a request was taken for an error of the request."""
    for _ in range(2):
        with watch(stream) as running:
            ended = threading.Event()
            viewers = [threading.Thread(target=_ask_until, args=(ended, running.port)) for _ in range(4)]
            for viewer in viewers:
                viewer.start()
            for _ in range(30):
                get(running.port, "/status.json")
            code, _, told = running.stop()
            ended.set()
            for viewer in viewers:
                viewer.join()
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


def _ask_until(ended: threading.Event, port: int) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException):
        while not ended.is_set():
            get(port, "/status.json")


def test_too_many_requests_at_a_time_are_turned_away() -> None:
    with WatchServer("127.0.0.1", 0, {"/": PageAnswer("text/plain", lambda: b"here")}) as server:
        for _ in range(MAX_REQUESTS):
            assert server._free.acquire(blocking=False)
        ours, theirs = socket.socketpair()
        with ours:
            server.process_request(theirs, ("127.0.0.1", 1))
            assert ours.recv(1) == b""
        server._free.release()
        ours, theirs = socket.socketpair()
        with ours:
            ours.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            server.process_request(theirs, ("127.0.0.1", 1))
            assert b"".join(iter(lambda: ours.recv(4096), b"")).endswith(b"\r\n\r\nhere")


@pytest.mark.parametrize("slow", ["asking", "taking"])
def test_slow_requests_come_to_an_end_and_others_are_served(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_server, "_REQUEST_S", 0.5, raising=False)
    long = bytes(32 << 20)
    answers = {"/": PageAnswer("text/plain", lambda: b"here"), "/long": PageAnswer("text/plain", lambda: long)}
    with WatchServer("127.0.0.1", 0, answers) as server, contextlib.ExitStack() as stack:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        stack.callback(thread.join)
        stack.callback(server.shutdown)
        port = server.server_port
        slow_ones = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(MAX_REQUESTS)]
        for one in slow_ones:
            with contextlib.suppress(OSError):
                one.sendall(b"GET /long HTTP/1.1\r\n" + (b"Host: localhost\r\n\r\n" if slow == "taking" else b""))
        due = time.monotonic() + DEADLINE_S
        while slow_ones and time.monotonic() < due:
            slow_ones = [one for one in slow_ones if _is_open(one, slow)]
            time.sleep(0.02)
        assert not slow_ones
        found = None
        while found is None and time.monotonic() < due:
            # A moment passes between the end of a connection and that of its thread.
            with contextlib.suppress(OSError, http.client.HTTPException):
                found = get(port, "/")
        assert found is not None
        assert found.body == b"here"


def _is_open(connection: socket.socket, slow: str) -> bool:
    """Sends or takes one byte."""
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


@pytest.mark.parametrize("path", ["/now", "/history"])
def test_parts_of_the_page_hold_no_script_and_may_load_nothing(served: Watch, path: str) -> None:
    answer = get(served.port, path)
    assert (answer.status, answer.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert answer.headers["Content-Security-Policy"].startswith("default-src 'none';")
    assert "img-src" not in answer.headers["Content-Security-Policy"]
    assert f'id="{path[1:]}"' in answer.body.decode()
    assert b"<script" not in answer.body and b"<style" not in answer.body


def test_pictures_come_once_they_are_drawn_and_stand_in_the_page(served: Watch) -> None:
    wait_until(lambda: b"data:image/svg+xml;base64," in get(served.port, "/history").body, "pictures are drawn")
    page = get(served.port, "/").body.decode()
    assert "data:image/svg+xml;base64," in page
    version = re.findall(r'data-(?:history|version)="(\d+)"', page)
    assert version == [version[0]] * 2 != ["0", "0"]


def test_history_that_has_not_changed_is_not_drawn_again(stream: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyshard.cli.watch._HISTORY_S", 0.01)
    # Else the pause would be ten times as long as matplotlib takes to start.
    monkeypatch.setattr("lazyshard.cli.watch_server._LOAD", 1.0)
    looks = history_looks(stream, 0.001)
    looks.start()
    first = looks.facts(DEADLINE_S)
    assert first.last is not None, first
    wait_until(lambda: looks.facts(0.0).answered_at != first.answered_at, "it is looked at again")
    assert looks.facts(0.0).last is first.last
    looks.close()


def test_page_has_one_script_and_one_style(served: Watch) -> None:
    text = get(served.port, "/").body.decode()
    assert (text.count("<script"), text.count("<style"), text.count("<link")) == (1, 1, 1)


@pytest.mark.parametrize(
    ("missing", "package"),
    [
        (("prometheus_client", "prometheus_client.core", "prometheus_client.registry"), "prometheus-client"),
        (("jinja2",), "jinja2"),
    ],
)
def test_the_extra_of_what_is_missing_is_named(
    missing: tuple[str, ...],
    package: str,
    stream: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("watch_metrics", "watch_page"):
        monkeypatch.delitem(sys.modules, f"lazyshard.cli.{name}", raising=False)
    assert main(["watch", str(stream)]) == 1
    assert f"watch needs {package}, which is not installed" in capsys.readouterr().err
