"""`lazyshard watch`: a web page that shows how a stream is, live or as a file, and the same facts for Prometheus."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NoReturn

import typer

from lazyshard.cli import exits, output
from lazyshard.cli.status import INTERVAL_S
from lazyshard.errors import ConfigInvalid
from lazyshard.inspection.inspection import take_history
from lazyshard.inspection.outlook import Looks
from lazyshard.inspection.survey import take_survey
from lazyshard.store.durable import publish_bytes, remove
from lazyshard.store.urls import is_url, stream_path

if TYPE_CHECKING:
    from lazyshard.cli.watch_server import PageAnswer

PORT: Final = 8642
HOST: Final = "127.0.0.1"
_MIN_INTERVAL_S: Final = 0.5

EPILOG: Final = output.epilog(
    [
        "lazyshard watch /shared/stream",
        "lazyshard watch s3://bucket/prefix --interval 15",
        "lazyshard watch /shared/stream --save page.html",
        "ssh -L 8642:localhost:8642 node7    # then open http://localhost:8642/ here",
        "curl -s http://localhost:8642/status.json | jq .status.summary",
    ],
    {
        0: "--save: the page is written",
        1: "typer, rich, jinja2 or prometheus-client is missing: pip install 'lazyshard\\[cli]'",
        2: "usage; STREAM is no directory and cannot become one, or the port is taken",
        3: "--save: FILE is there and is no page of this command",
        5: "--save: there is no stream, or none that can be read",
        7: "--save: the filesystem or store failed: no permission, no answer, no room for FILE",
        130: "Ctrl-C, which is how it ends",
    },
    "What goes wrong with the stream ends nothing while the page is served: it says so. It may be opened before there "
    "is a stream. For pictures matplotlib is needed: pip install 'lazyshard\\[plots]'; without it there are tables.",
)


def command(
    stream: output.StreamArgument,
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65535, help="TCP port; 0 for any that is free.")
    ] = PORT,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen at; whoever reaches it can read the page.")
    ] = HOST,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", min=_MIN_INTERVAL_S, help="Seconds between two looks at the stream.")
    ] = INTERVAL_S,
    save: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the page as it is now to this file, and serve nothing.")
    ] = None,
) -> Callable[[], int]:
    """Serves a page that shows how a stream is while it is produced and trained.

    What has become of each chunk and which rank reads it, what producer and consumers do and wait for, rates, lag,
    disk, lengths, refused rows, and when something runs out.

    The page needs nothing but a browser, and only looks. Only this machine can open it, unless [bold]--host[/bold] says
    otherwise. With [bold]--save[/bold] the same page becomes a file, and nothing is served.
    """
    output.check_stream(stream, may_come=save is None)
    if not host:
        raise typer.BadParameter("an address is needed, such as 127.0.0.1 or 0.0.0.0", param_hint="--host")
    if save is not None:
        _check_target(save)
    try:
        from lazyshard.cli.watch_page import WatchPage
        from lazyshard.cli.watch_server import stream_answers
    except ModuleNotFoundError as cause:
        missing = (cause.name or "").partition(".")[0].replace("_", "-")
        raise ImportError(f"watch needs {missing}, which is not installed: pip install 'lazyshard[cli]'") from cause
    directory = stream_path(stream)
    if save is not None:
        return lambda: _save(directory, save)
    page = WatchPage()
    return lambda: _serve(directory, stream_answers(directory, page, interval), host, port)


def _check_target(save: str) -> None:
    # What is there and no plain file, a device for instance, must not be replaced by one.
    if not save or is_url(save) or (os.path.exists(save) and not os.path.isfile(save)):
        raise typer.BadParameter(f"{save!r} is no name of a plain file on this machine", param_hint="--save")
    parent = os.path.dirname(save) or "."
    if not os.path.isdir(parent):
        raise typer.BadParameter(f"{parent!r} is not a directory", param_hint="--save")


def _save(stream: Path, save: str) -> int:
    """Writes the page; it appears whole or not at all. Raises ConfigInvalid where something else is there."""
    from lazyshard.cli.watch_page import BEGINNING, Shown, WatchPage, draw
    from lazyshard.cli.watch_server import LastLook, watch_values

    # Where a link leads to, not the link.
    target, beginning = Path(os.path.realpath(save)), BEGINNING.encode()
    with contextlib.suppress(FileNotFoundError), open(target, "rb") as file:
        if file.read(len(beginning)) not in (b"", beginning):
            why = "is there already and is no page of lazyshard watch; choose another name, or remove it"
            raise ConfigInvalid(f"{target}: {why}", file=str(target))
    now = time.time()
    outlook, history = Looks().add(take_survey(stream, now)), take_history(stream)
    values = watch_values(stream, 0.0, LastLook(outlook, answered_at=now), now)
    made = WatchPage().render("whole", values, outlook, Shown(history, draw(history), 1), live=False)
    temporary = target.with_name(f".{target.name[:200]}.{secrets.token_hex(8)}")
    try:
        publish_bytes(made, target, temporary)
    except BaseException:
        remove(temporary)
        raise
    output.say(f"{save}: {output.size(len(made))}")
    return exits.DONE


def _serve(stream: Path, answers: dict[str, PageAnswer], host: str, port: int) -> NoReturn:
    from lazyshard.cli.watch_server import WatchServer, is_loopback

    outside = not is_loopback(host)
    try:
        server = WatchServer(host, port, answers, {host, socket.gethostname()} if outside else None)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        text = f"{host}:{port} cannot be listened at ({reason.lower()}); choose another one, or 0 for any that is free"
        if unknown := isinstance(error, socket.gaierror):
            text = f"{host} is no name or address of a machine that is known here ({reason.lower()})"
        raise typer.BadParameter(text, param_hint="--host" if unknown else "--port") from None
    with server:
        # In all threads. Raised as an exception it may come in the middle of a lock's own code, which turns it into
        # another error, and the server takes any error for one of a request, and goes on.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        threading.Thread(target=server.serve_forever, name="lazyshard-watch-server", daemon=True).start()
        output.say(f"{server.url} shows {stream}; Ctrl-C ends")
        if outside:
            output.explain(
                f"whoever reaches {host} can read it: how the stream is, why rows were refused, and the names of its "
                f"consumers, sources and machines. Nothing is authenticated or encrypted"
            )
        # What a script starts in its background ignores it, and is to outlive it.
        while signal.getsignal(signal.sigwait({signal.SIGINT})) is signal.SIG_IGN:
            pass
        server.shutdown()
        # A look that is under way may be in C++ code, such as matplotlib's. CPython before 3.14 ends a daemon thread at
        # its next use of the interpreter, which there is a call of std::terminate.
        output.drop_what_nobody_reads()
        os._exit(exits.INTERRUPTED)
