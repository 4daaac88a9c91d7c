"""What each command does, its arguments taken apart. Each returns the exit code; errors are the caller's affair."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from lazyshard.format import End
from lazyshard_producer import exits
from lazyshard_producer.check import describe_run
from lazyshard_producer.configuration.assembly import Flags, assemble
from lazyshard_producer.configuration.config import read_config
from lazyshard_producer.configuration.init import write_example
from lazyshard_producer.configuration.reload import Reload
from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.display.metrics import open_metrics
from lazyshard_producer.display.progress import Display, choose_display, say
from lazyshard_producer.errors import SettingInvalid
from lazyshard_producer.quarantined import read_refused, summarize, summary_json, summary_lines
from lazyshard_producer.run import run as run_to_its_end
from lazyshard_producer.shipping.destination import as_directory
from lazyshard_producer.stop import Stop
from lazyshard_producer.wording import NAME, Outcome, count, one_line, warning_line


def run(flags: Flags, config: str | None, quiet: bool, stop: Stop) -> int:
    """Publishes a stream.

    Args:
        flags: what the command line says.
        config: path of a configuration file, if there is one.
        quiet: whether to show warnings and the last line only.
        stop: tells it when a signal has come.
    """
    settings = load_settings(flags, config)
    # The port first: one that is taken is to be noticed before anything is made.
    metrics = open_metrics(settings.metrics_host, settings.metrics_port)
    try:
        display = choose_display(quiet, settings.log_every_s)
        reload = Reload(None if config is None else lambda: load_settings(flags, config), str(config))
        if metrics.address is not None:
            display.note(f"metrics at {metrics.address}")
        if config is not None and stop.reload_ignored:
            display.note(
                f"SIGHUP is ignored, as under nohup: {config} is not read again while this runs. To change a setting, "
                "stop this with SIGTERM and start it again; to have SIGHUP read it, start this with setsid instead"
            )
        try:
            result = run_to_its_end(
                settings, display, stop, metrics=metrics, reload=lambda settings: reload.take(settings, display)
            )
        finally:
            display.close()
        return _conclude(result, settings.out, display)
    finally:
        metrics.close()


def load_settings(flags: Flags, config: str | None) -> Settings:
    """Returns the settings of a command line and the configuration file that it names, if it does.

    Raises:
        SettingInvalid, ExtraMissing: see there.
    """
    return assemble(flags, None if config is None else read_config(config))


def check(flags: Flags, config: str | None, rows: int) -> int:
    """Says what a run would do; arguments as those of `run`, `rows` is how many rows to show."""
    # Imported here: the readers of all kinds of sources come with it.
    from lazyshard_producer.rows.preview import preview

    settings = load_settings(flags, config)
    with as_directory(settings.out, settings.samples_per_chunk) as directory:
        return _print_all(describe_run(settings, rows, preview, directory))


def init(file: str) -> int:
    """Writes an example of a configuration file."""
    write_example(file)
    return _print_all([f"written: {file}; edit it, then `{NAME} check {file}` says what it means"])


def quarantine(stream: str, rows: bool, as_json: bool) -> int:
    """Shows a stream's refused rows: counted, for people or as JSON, or as they came."""
    with as_directory(stream, None) as directory:
        if not os.path.isdir(directory):
            raise SettingInvalid(f"STREAM: {stream!r} is not a directory", option="STREAM")
        if rows:
            return _print_rows(stream, directory)
        summary = summarize(directory)
        return _print_all([summary_json(summary)] if as_json else summary_lines(stream, summary))


def _print_rows(stream: str, directory: str) -> int:
    lost = 0
    try:
        for refused in read_refused(directory):
            if refused is None or not refused.row:
                lost += 1
            else:
                sys.stdout.buffer.write((_shown(refused.row) if sys.stdout.isatty() else refused.row) + b"\n")
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        return exits.FINISHED
    if lost:
        rows = count(lost, "row")
        say(
            warning_line(
                f"{rows} could not be printed: rows of tables and generators, and those that were too long, are not "
                f"kept; `{NAME} quarantine {stream}` names their places"
            )
        )
    return exits.FINISHED


def _shown(row: bytes) -> bytes:
    """Returns a refused row as a terminal may have it: what is in it comes from somebody else."""
    return one_line(row.decode("utf-8", "backslashreplace")).encode("utf-8", "backslashreplace")


def _print_all(lines: Iterable[str]) -> int:
    try:
        for line in lines:
            print(line, flush=True)
    except BrokenPipeError:
        # Whoever listened has heard enough.
        return exits.FINISHED
    return exits.FINISHED


def _conclude(result: Outcome | End, out: str, display: Display) -> int:
    if isinstance(result, End):
        holds = f"{count(result.samples, 'sample')} in {count(result.chunks, 'chunk')}"
        say(one_line(f"already ended: {out} holds {holds}; nothing to do"))
        return exits.FINISHED
    display.finish(result)
    return exits.INTERRUPTED if result.end == "interrupted" else exits.FINISHED
