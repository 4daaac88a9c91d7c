"""A running `lazyshard watch`, and requests to it, byte for byte where that matters."""

import contextlib
import http.client
import signal
import socket
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.cli.commands import environment

DEADLINE_S = 60.0


class Answered(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class Watch(NamedTuple):
    process: subprocess.Popen[str]
    url: str
    first_line: str

    @property
    def port(self) -> int:
        port = urllib.parse.urlsplit(self.url).port
        assert port is not None
        return port

    def stop(self) -> tuple[int, str, str]:
        self.process.send_signal(signal.SIGINT)
        out, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, out, err


@contextlib.contextmanager
def watch(stream: Path, *arguments: object) -> Iterator[Watch]:
    command = [sys.executable, "-m", "lazyshard.cli", "watch", str(stream), "--port", "0", *map(str, arguments)]
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, process.communicate()
            yield Watch(process, line.split()[0], line.rstrip("\n"))
        finally:
            process.kill()


def get(port: int, path: str, method: str = "GET", host: str = "127.0.0.1", **headers: str) -> Answered:
    """Asks once; `headers` takes the place of what a browser would send."""
    connection = http.client.HTTPConnection(host, port, timeout=DEADLINE_S)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return Answered(answer.status, dict(answer.getheaders()), answer.read())
    finally:
        connection.close()


def send(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as connection:
        connection.sendall(request)
        with contextlib.suppress(ConnectionResetError):
            return b"".join(iter(lambda: connection.recv(65536), b""))
    return b""
