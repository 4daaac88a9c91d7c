"""`lazyshard watch`: a web page that shows how a stream is, live, and the same facts for Prometheus."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from lazyshard.cli import exits
from lazyshard.cli.options import check_stream
from lazyshard.cli.output import complain, explain, say
from lazyshard.cli.status import INTERVAL_S, status_values
from lazyshard.cli.watch_looks import Facts, SharedLooks
from lazyshard.cli.watch_server import Answer, WatchServer, is_loopback, page_answer
from lazyshard.store.urls import stream_path

PORT: Final = 8642
HOST: Final = "127.0.0.1"

_MIN_INTERVAL_S: Final = 0.5

HELP: Final = """Serves a page that shows how a stream is while it is produced and trained: what has become of each
chunk and which rank reads it, what producer and consumers do and wait for, rates, lag, disk, and when something runs
out.

The page needs nothing but a browser, and only looks. Only this machine can open it, unless [bold]--host[/bold] says
otherwise."""

EPILOG: Final = """[bold]Examples[/bold]

lazyshard watch /shared/stream

lazyshard watch s3://bucket/prefix --interval 15

ssh -L 8642:localhost:8642 node7    # then open http://localhost:8642/ here

curl -s http://localhost:8642/status.json | jq .status.summary

[bold]Exit codes[/bold]

  1  typer, rich or prometheus-client is missing: pip install 'lazyshard\\[cli]'

  2  usage; STREAM is no directory and cannot become one, or the port is taken

 70  unexpected error

 71  not enough memory

130  Ctrl-C, which is how it ends

What goes wrong with the stream ends nothing: the page says so. It may be opened before there is a stream."""


def command(
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="The stream's directory, or its URL.")],
    port: Annotated[
        int,
        typer.Option("--port", metavar="PORT", min=0, max=65535, help="TCP port; 0 for any that is free."),
    ] = PORT,
    host: Annotated[
        str,
        typer.Option(
            "--host",
            metavar="ADDRESS",
            help="Address to listen at. Whoever reaches another one than the default can read the page.",
        ),
    ] = HOST,
    interval: Annotated[
        float,
        typer.Option(
            "--interval", metavar="SECONDS", min=_MIN_INTERVAL_S, help="Seconds between two looks at the stream."
        ),
    ] = INTERVAL_S,
) -> Callable[[], int]:
    """Returns what is to be done; see `lazyshard.cli.command`."""
    check_stream(stream, may_come=True)
    if not host:
        raise typer.BadParameter("an address is needed, such as 127.0.0.1 or 0.0.0.0", param_hint="--host")
    try:
        from lazyshard.cli.watch_metrics import CONTENT_TYPE, metrics_page
    except ModuleNotFoundError as cause:
        if (cause.name or "").partition(".")[0] != "prometheus_client":
            raise
        complain("watch needs prometheus-client, which is not installed: pip install 'lazyshard[cli]'")
        raise typer.Exit(exits.NO_EXTRA) from None

    def task() -> int:
        looks = SharedLooks(stream_path(stream), interval)
        answers = {
            "/": page_answer(),
            "/status.json": Answer("application/json", lambda: _encode(looks.stream, looks.interval, looks.facts())),
            "/metrics": Answer(CONTENT_TYPE, metrics_page(looks.facts, time.time)),
        }
        return _serve(looks, answers, host, port)

    return task


def watch_values(stream: Path, interval: float, facts: Facts, now: float) -> dict[str, Any]:
    """Returns the values of `/status.json`; its fields are described in `docs/watch.md`."""
    return {
        "schema": 1,
        "directory": str(stream),
        "now_s": now,
        "interval_s": interval,
        "answered_at_s": facts.answered_at,
        "silent_since_s": facts.silent_since,
        "error": facts.error,
        "missing": facts.missing,
        "status": None if facts.outlook is None else status_values(facts.outlook),
    }


def _encode(stream: Path, interval: float, facts: Facts) -> bytes:
    return json.dumps(watch_values(stream, interval, facts, time.time())).encode()


def _serve(looks: SharedLooks, answers: dict[str, Answer], host: str, port: int) -> int:
    outside = not is_loopback(host)
    try:
        server = WatchServer(host, port, answers, {host, socket.gethostname()} if outside else None)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        if isinstance(error, socket.gaierror):
            raise typer.BadParameter(
                f"{host} is no name or address of a machine that is known here ({reason.lower()})", param_hint="--host"
            ) from None
        raise typer.BadParameter(
            f"{host}:{port} cannot be listened at ({reason.lower()}); choose another one, or --port 0 for any that is "
            f"free",
            param_hint="--port",
        ) from None
    with server, _interrupt_held():
        looks.start()
        threading.Thread(target=server.serve_forever, name="lazyshard-watch-server", daemon=True).start()
        say(f"{server.url} shows {looks.stream}; Ctrl-C ends")
        if outside:
            explain(
                f"whoever reaches {host} can read it: how the stream is, and the names of its consumers, sources and "
                f"machines. Nothing is authenticated or encrypted"
            )
        _wait_for_interrupt()
        server.shutdown()
        looks.close()
    return exits.INTERRUPTED


def _wait_for_interrupt() -> None:
    """Returns at Ctrl-C, unless this process ignores it: what a script starts in its background is to outlive it."""
    while True:
        signal.sigwait({signal.SIGINT})
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            return


@contextlib.contextmanager
def _interrupt_held() -> Iterator[None]:
    """Holds Ctrl-C back, for `_wait_for_interrupt`, in this thread and in those that it starts meanwhile.

    Raised as an exception it may come in the middle of a lock's own code, which turns it into another error, and the
    server takes any error for one of a request, and goes on.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
