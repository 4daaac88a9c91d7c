"""`lazyshard watch`: a web page that shows how a stream is, live or as a file, and the same facts for Prometheus."""

from __future__ import annotations

import os
from typing import Annotated

from typer import Option

from lazyshard.cli import output
from lazyshard.cli.status import INTERVAL_S
from lazyshard.store.files import is_url


def command(
    stream: output.StreamArgument,
    port: Annotated[int, Option(metavar="PORT", min=0, max=65535, help="TCP port; 0 for any that is free.")] = 8642,
    host: Annotated[str, Option(metavar="ADDRESS", help="To listen at; all who reach it read the page.")] = "127.0.0.1",
    interval: Annotated[float, Option(metavar="SECONDS", min=0.5, help="Between looks at the stream.")] = INTERVAL_S,
    save: Annotated[str | None, Option(metavar="FILE", help="Write the page to this file; serve nothing.")] = None,
) -> int:
    r"""Serves a page that shows how a stream is while it is produced and trained.

    What has become of each chunk and which rank reads it, what producer and consumers do and wait for, rates, lag,
    disk, lengths, refused rows, and when something runs out.

    The page needs nothing but a browser, and only looks. Only this machine can open it, unless [bold]--host[/bold] says
    otherwise. With [bold]--save[/bold] the same page becomes a file, and nothing is served.

    Examples:
        lazyshard watch /shared/stream
        lazyshard watch s3://bucket/prefix --interval 15
        lazyshard watch /shared/stream --save page.html
        ssh -L 8642:localhost:8642 node7    # then open http://localhost:8642/ here
        curl -s http://localhost:8642/status.json | jq .status.summary

    Exit codes:
        0  --save: the page is written
        1  typer, rich, jinja2 or prometheus-client is missing: pip install 'lazyshard\[cli]'
        2  usage; STREAM is no directory and cannot become one, or the port is taken
        3  --save: FILE is there and is no page of this command
        5  --save: there is no stream, or none that can be read
        7  --save: the filesystem or store failed: no permission, no answer, no room for FILE
        130  Ctrl-C, which is how it ends

    What goes wrong with the stream ends nothing while the page is served: it says so. It may be opened before there is
    a stream. For pictures matplotlib is needed: pip install 'lazyshard\[plots]'; without it there are tables.
    """
    directory = output.find_stream(stream, may_come=save is None)
    output.refuse_if(not host, "--host", "an address is needed, such as 127.0.0.1 or 0.0.0.0")
    if save is not None:
        # What is there and no plain file, a device for instance, must not be replaced by one.
        other = not save or is_url(save) or (os.path.exists(save) and not os.path.isfile(save))
        output.refuse_if(other, "--save", f"{save!r} is no name of a plain file on this machine")
        parent = os.path.dirname(save) or "."
        output.refuse_if(not os.path.isdir(parent), "--save", f"{parent!r} is not a directory")
    try:
        from lazyshard.cli.watch_server import save_page, serve_page
    except ModuleNotFoundError as cause:
        missing = (cause.name or "").partition(".")[0].replace("_", "-")
        raise ImportError(f"watch needs {missing}, which is not installed: pip install 'lazyshard[cli]'") from cause
    return serve_page(directory, interval, host, port) if save is None else save_page(directory, save)
