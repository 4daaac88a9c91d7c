"""`lazyshard watch`: a web page with the state of a stream, live or as a file, and Prometheus metrics."""

from __future__ import annotations

import os
from typing import Annotated

from typer import Option

from lazyshard.cli import output
from lazyshard.cli.status import INTERVAL_S
from lazyshard.store.files import is_url


def command(
    stream: output.StreamArgument,
    port: Annotated[int, Option(metavar="PORT", min=0, max=65535, help="TCP port; 0 for any free one.")] = 8642,
    host: Annotated[str, Option(metavar="ADDRESS", help="To listen on; readable by all who reach it.")] = "127.0.0.1",
    interval: Annotated[float, Option(metavar="SECONDS", min=0.5, help="Time between refreshes.")] = INTERVAL_S,
    sample: Annotated[bool, Option("--sample", help="Also show the newest sample, with thumbnails.")] = False,
    save: Annotated[str | None, Option(metavar="FILE", help="Write the page to this file; serve nothing.")] = None,
) -> int:
    r"""Serves a web page that shows a stream while it is produced and trained.

    Shows the state of each chunk and which rank reads it, what producer and consumers do and wait for, rates, lag, disk
    usage, row lengths, refused rows, and when data or disk space will run out.

    The page is read-only and needs nothing but a browser. Only this machine can open it, unless [bold]--host[/bold] is
    given. With [bold]--save[/bold] the page is written to a file, and nothing is served.

    Examples:
        lazyshard watch /shared/stream
        lazyshard watch s3://bucket/prefix --interval 15
        lazyshard watch /shared/stream --save page.html
        ssh -L 8642:localhost:8642 node7    # then open http://localhost:8642/ here
        curl -s http://localhost:8642/status.json | jq .status.summary

    Exit codes:
        0  --save: the page is written
        1  typer, rich, jinja2 or prometheus-client is missing: pip install 'lazyshard\[cli]'
        2  usage error; STREAM is not a directory and its parent does not exist; or the port is taken
        3  --save: FILE exists and is not a page of this command
        5  --save: no stream, or none that can be read
        7  --save: the filesystem or store failed: no permission, no answer, no space for FILE
        130  Ctrl-C, which ends the server

    The page reports problems of the stream, and the server continues. It can be started before the stream exists.
    Charts need matplotlib, thumbnails Pillow: pip install 'lazyshard\[plots]'; without it the page has tables instead.
    """
    directory = output.find_stream(stream, may_appear=save is None)
    output.refuse_if(not host, "--host", "expected an address such as 127.0.0.1 or 0.0.0.0")
    if save is not None:
        # Do not replace anything but a regular file, for example a device.
        other = not save or is_url(save) or (os.path.exists(save) and not os.path.isfile(save))
        output.refuse_if(other, "--save", f"{save!r} is not the path of a regular file")
        parent = os.path.dirname(save) or "."
        output.refuse_if(not os.path.isdir(parent), "--save", f"{parent!r} is not a directory")
    try:
        from lazyshard.cli.watch_server import save_page, serve_page
    except ModuleNotFoundError as cause:
        missing = (cause.name or "").partition(".")[0].replace("_", "-")
        raise ImportError(f"watch needs {missing}, which is not installed: pip install 'lazyshard[cli]'") from cause
    return serve_page(directory, interval, host, port, sample) if save is None else save_page(directory, save, sample)
