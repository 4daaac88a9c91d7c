"""What the command says: sentences for people, key=value lines for logs. Text only, nothing is printed here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from lazyshard.errors import LazyShardError, redact
from lazyshard.memory import is_short

NAME: Final = "lazyshard-producer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """How far a run is, by default one that has not begun. Earlier runs are included, but in new and seconds."""

    samples: int = 0  # rows in the stream, those of the open chunk included
    published: int = 0  # rows of sealed chunks
    chunks: int = 0
    new: int = 0  # rows that this run has read
    blank: int = 0  # blank lines skipped
    duplicate: int = 0  # rows that name a key twice
    bytes_read: int = 0
    bytes_total: int | None = None  # of the sources when the run started; None where nobody can know, as of live ones
    seconds: float = 0.0
    refused: int = 0  # rows left out or quarantined
    sources: int = 1

    @property
    def rate(self) -> float:
        """Rows a second of this whole run; 0 until time has passed."""
        return self.new / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run came out: finished, the stream has ended now; interrupted or terminated by a signal, and resumable."""

    end: Literal["finished", "interrupted", "terminated"]
    out: str
    tally: Tally


def one_line(text: str) -> str:
    """Returns a text without credentials, and with control characters escaped: file names may hold line ends."""
    text = redact(text)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def error_line(text: str) -> str:
    """Returns the line for an error."""
    return one_line(f"{NAME}: error: {text}")


def warning_line(text: str) -> str:
    """Returns the line for a warning."""
    return one_line(f"{NAME}: warning: {text}")


def note_line(text: str) -> str:
    """Returns the line for something that is neither an error nor odd."""
    return one_line(f"{NAME}: {text}")


def explain(error: Exception) -> str:
    """Returns what to say of an error."""
    if is_short(error):
        again = "give it more, or fewer --workers and a smaller --max-row-bytes, and run the same command again"
        return f"not enough memory: {error or 'the system has no more'}; {again}: no row was refused or skipped for it"
    if isinstance(error, LazyShardError):
        return str(error)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename is not None else ""
        again = "mend that, and run the same command again to go on: nothing half published is left"
        return f"{where}{error.strerror or error}; {again}"
    hint = "this should not happen; run the same command again with --debug for the traceback, and report it"
    return f"unexpected {type(error).__name__}: {error}; {hint}"


def log_line(event: str, time: str, **values: str | int | float) -> str:
    """Returns a line for a log: time=2026-01-02T03:04:05Z event=end out="a dir" samples=3 seconds=1.2."""
    pairs = {"time": time, "event": event} | values
    return one_line(" ".join(f"{key}={_value(value)}" for key, value in pairs.items()))


def tally_values(tally: Tally, rate: float | None = None) -> dict[str, str | int | float]:
    """Returns what a log line says of how far a run is; `rate` is rows a second of late, None for the whole run's."""
    values: dict[str, str | int | float] = {
        "samples": tally.samples,
        "published": tally.published,
        "chunks": tally.chunks,
        "rate": tally.rate if rate is None else rate,
        "seconds": tally.seconds,
        "bytes": tally.bytes_read,
    }
    if tally.bytes_total is not None:
        values["bytes_total"] = tally.bytes_total
    refused = {"duplicate_key_rows": tally.duplicate, "refused_rows": tally.refused}
    return values | {"blank_lines": tally.blank} | refused


def figures(tally: Tally, rate: float) -> str:
    """Returns what is written beside a bar."""
    refused = f"  {tally.refused:,} refused" if tally.refused else ""
    return f"{count(tally.samples, 'sample')}  {rate:,.0f}/s  {count(tally.chunks, 'chunk')}{refused}"


def summary(outcome: Outcome) -> str:
    """Returns the last line of a run for people."""
    tally = outcome.tally
    speed = f"{tally.new:,} read in {tally.seconds:.1f} s ({tally.rate:,.0f} samples/s)"
    extras = f"{count(tally.blank, 'blank line')} skipped, {count(tally.duplicate, 'row')} with duplicate keys"
    if tally.refused:
        extras += f", {count(tally.refused, 'row')} refused"
    if outcome.end == "finished":
        return one_line(f"finished: {outcome.out} holds {holding(tally.samples, tally.chunks)}; {speed}; {extras}")
    return one_line(f"{stopped(outcome)}; {speed}; {extras}")


def stopped(outcome: Outcome) -> str:
    """Returns what is published after a signal, and how to go on."""
    tally = outcome.tally
    waste = tally.samples - tally.published
    again = f" ({count(waste, 'row')} of the unfinished chunk will be read again)" if waste else ""
    published = holding(tally.published, tally.chunks)
    return f"{outcome.end}: {published} published in {outcome.out}; run the same command again to go on{again}"


def count(number: int, noun: str) -> str:
    """Returns a number with its noun: 1 row, 2,000 rows."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def holding(samples: int, chunks: int) -> str:
    """Returns what a stream holds."""
    return f"{count(samples, 'sample')} in {count(chunks, 'chunk')}"


def held_rows(held: int, size: int) -> str:
    """Returns what to add to a wait for a source where rows are held until they fill a chunk; "" where none are."""
    return f"; {held:,} of the {count(size, 'row')} of the next chunk are there" if held else ""


def _value(value: str | int | float) -> str:
    if isinstance(value, float):
        return f"{value:.1f}"
    text = str(value)
    if text and not set(text) & set(' "=\\'):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
