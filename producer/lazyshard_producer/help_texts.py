"""What `--help` says, but for the options."""

from __future__ import annotations

from typing import Final

from lazyshard_producer.exits import TABLE

HELP: Final = """Publishes rows as a stream of numbered chunk files, from which training reads while it grows.

See [bold]lazyshard-producer COMMAND --help[/bold]."""

EPILOG: Final = """[bold]Example[/bold]

lazyshard-producer run --source data.jsonl --out /shared/stream --samples-per-chunk 1000"""

_CODES: Final = "\n\n".join(f"{code:>3}  {meaning}" for code, meaning, _ in TABLE)

RUN_HELP: Final = """Reads sources, in order or mixed by weights, publishes their rows as a stream, and ends it.

It can be stopped or killed at any moment: the same command goes on after the last published row, each row once.
Until the stream has ended, sources may grow and more may be appended; what was read of them must stay as it was.
A line that is not a JSON object stops it with file, line and byte; mend the line and run it again.

--transform, --where, --encode and python: sources run code of yours, with all rights of this command. A configuration
file may name them: trust it as you trust a program."""

_MIXED: Final = (
    "lazyshard-producer run --source web.jsonl --weight 0.7 --follow /data/incoming --weight 0.3 "
    "--out /shared/stream --samples-per-chunk 1000 --max-ahead 64chunks"
)

RUN_EPILOG: Final = f"""[bold]Examples[/bold]

lazyshard-producer run --source a.jsonl --source b.jsonl --out /shared/stream --samples-per-chunk 1000

lazyshard-producer run --source 'data/*.jsonl' --out /shared/stream --samples-per-chunk 1000 --rate 500

{_MIXED}

lazyshard-producer run --source /shared/stream --out /shared/larger --samples-per-chunk 10000

lazyshard-producer run --config stream.toml

[bold]Signals[/bold]

SIGTERM  finish the publish in hand and stop; the same command goes on

SIGUSR1  live sources give what they have, then the stream ends

SIGHUP   read --config again: rate, limits, max_bad_rows, log_every_seconds

[bold]Exit codes[/bold]

{_CODES}

A second Ctrl-C ends it at once; that can be resumed too."""

CHECK_HELP: Final = """Says what a run with these settings would do, and shows the first rows it would publish.

Takes a configuration file, flags, or both, as run does. Makes nothing, and takes nothing from pipes. The functions that
these settings name are imported and called: do not try a file of somebody else's without reading it."""

CHECK_EPILOG: Final = """[bold]Examples[/bold]

lazyshard-producer check stream.toml

lazyshard-producer check stream.toml --rows 10 --transform my_rows:clean

[bold]Exit codes[/bold]

Those of run: 0 it would run, 2 a setting, 3 a bad row, 4 a source, 5 the stream."""

INIT_HELP: Final = (
    "Writes an example of a configuration file, with a comment for each setting. Never overwrites a file."
)

INIT_EPILOG: Final = """[bold]Examples[/bold]

lazyshard-producer init

lazyshard-producer init stream.toml

[bold]Exit codes[/bold]

  0  written

  1  a package that is needed is not installed

  2  there is such a file already, or usage

  7  the filesystem failed: disk full, read-only, no permission

130  Ctrl-C"""

QUARANTINE_HELP: Final = """Shows the rows refused with --on-bad-row quarantine, counted by reason.

With --rows prints them as they came, to be mended and given as a further --source."""

QUARANTINE_EPILOG: Final = """[bold]Example[/bold]

lazyshard-producer quarantine /shared/stream --rows > refused.jsonl

[bold]Exit codes[/bold]

  0  shown, or nothing was refused

  1  a package that is needed is not installed

  2  usage; there is no such directory

  5  the file of refused rows cannot be read as what it is

  7  the filesystem or store failed

130  Ctrl-C"""
