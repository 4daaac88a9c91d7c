"""moto's S3 server on loopback, which counts what it is asked for and fails as a test tells it to."""

import contextlib
import socketserver
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final
from urllib.parse import unquote

import boto3
from moto.server import ThreadedMotoServer

from tests.stream.streams import DEADLINE_S

Environ = dict[str, Any]
Answer = Iterable[bytes]
BUSY: Final = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
BROKEN: Final = b"<Error><Code>InternalError</Code><Message>We encountered an internal error.</Message></Error>"


class Server:
    """A server of its own thread."""

    def __init__(self) -> None:
        self._moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._moto.start()
        host, port = self._moto.get_host_and_port()
        self.url = f"http://{host}:{port}"
        # How often each (method, key) was asked for; a listing has the key "".
        self.asked: Counter[tuple[str, str]] = Counter()
        # Is called for each request with its method and key; what it returns takes the answer's place unless it is
        # None: a status and a body, or a function that makes other bytes of the body.
        self.fault: Callable[[str, str], Any] = _none
        self._answer: Callable[..., Answer] = self._moto._server.app
        self._moto._server.app = self._serve
        self._lock = threading.Lock()
        self._client = boto3.client("s3", endpoint_url=self.url)

    def stop(self) -> None:
        self._moto.stop()

    def make_bucket(self, name: str) -> None:
        self._client.create_bucket(Bucket=name)

    def gets(self, ending: str) -> Counter[str]:
        """Returns how often objects were got whose names end so, by their last name."""
        found: Counter[str] = Counter()
        for (method, key), count in self.asked.items():
            if method == "GET" and key.endswith(ending):
                found[key.rpartition("/")[2]] += count
        return found

    def _serve(self, environ: Environ, start: Callable[..., Any]) -> Answer:
        method, key = environ["REQUEST_METHOD"], unquote(environ["PATH_INFO"]).partition("/")[2].partition("/")[2]
        with self._lock:
            self.asked[method, key] += 1
        instead = self.fault(method, key)
        if isinstance(instead, tuple):
            status, body = instead
            start(f"{status} Error", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
            return [body]
        answer = self._answer(environ, start)
        if instead is None:
            return answer
        changed: Answer = instead(b"".join(answer))
        return changed


def _none(method: str, key: str) -> None:
    return None


@contextlib.contextmanager
def mute(interim: int) -> Iterator[str]:
    """A server that never answers a request; it says "go on" (100 Continue) so many times to each. Yields its URL."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            left = interim
            with contextlib.suppress(OSError):
                while self.request.recv(1 << 16):
                    self.request.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" if left > 0 else b"")
                    left -= 1

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


class Gate:
    """Holds the bytes of answers back, after half of them, until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def open(self) -> None:
        self._open.set()

    def wait(self) -> None:
        assert self.reached.wait(DEADLINE_S)

    def hold(self, data: bytes) -> Iterator[bytes]:
        yield data[: len(data) // 2]
        self.reached.set()
        self._open.wait(DEADLINE_S)
        yield data[len(data) // 2 :]
