"""Everything that reads a stream, let loose on a damaged one; each look returns what it broke. What must hold: a row
that is returned is the true row of its sample. A look ends with a result or a `LazyShardError`, soon, in bounded
memory. Reading comes to the end of the stream only with all of its rows. A verification that finds nothing wrong is
right. Nothing is deleted that a true cursor still needs."""

import functools
import io
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import orjson
import typer

from lazyshard import BadRows, LazyShardedDataset, StreamReader
from lazyshard.cli import command, exits
from lazyshard.cli import verify as verify_command
from lazyshard.cli.command import execute
from lazyshard.cli.output import with_lists
from lazyshard.errors import LazyShardError
from lazyshard.format.names import arrays_name, chunk_name
from lazyshard.inspection.verification import verify
from lazyshard.stream import chunk, list_consumers, read_cursor
from lazyshard.stream.retention import retire
from tests.data.options import grouped
from tests.harness.fuzz.damage import Damaged
from tests.harness.fuzz.streams import ID, Known

DEADLINE_S: Final = 30.0  # A look takes milliseconds; one that takes so long hangs
# Above what the process has already. What asks for more gets a MemoryError, which is none of lazyshard's own.
MEMORY_BYTES: Final = 1 << 30


class Hangs(BaseException):
    """Raised by the timer, out of whatever hangs; nothing that catches errors catches it."""


@contextmanager
def bounded() -> Iterator[None]:
    """Within, a call that takes too long ends with `Hangs`, and one that takes too much memory with a MemoryError."""

    def stop(number: int, frame: Any) -> None:
        raise Hangs(f"no end within {DEADLINE_S:.0f} s")

    limits = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, DEADLINE_S)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    most = most if limits[0] == resource.RLIM_INFINITY else min(most, limits[0])
    resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


_DOCUMENTED: Final = (exits.DONE, exits.USAGE, exits.REFUSED, exits.STREAM_DAMAGED, exits.FILESYSTEM)

Look = Callable[[Path, Known, Damaged], None]


class Broken(AssertionError):
    """A promise that was broken."""


def look_at(directory: Path, known: Known, done: Damaged, name: str) -> str | None:
    try:
        # A scan of two gigabytes of zeros would take longer than all the rest.
        with bounded(), patch.object(chunk, "MAX_ROW_BYTES", 1 << 22):
            LOOKS[name](directory, known, done)
    except (Broken, Hangs) as broken:
        return f"{name}: {broken}"
    except Exception as error:
        return f"{name}: {type(error).__module__}.{type(error).__name__}: {str(error)[:300]}"
    return None


def _read_in_order(directory: Path, known: Known, done: Damaged) -> None:
    sample = 0
    try:
        reader = _reader(directory, known)
        if reader.seen.samples and any(row is None for row in known.rows):
            sample = known.rows.index(next(row for row in known.rows if row is not None))
        while True:
            published = reader.wait_for(sample + 1)
            if published.samples <= sample:
                break
            for row in reader.read_published(sample, published.samples, 2):
                _check_row(row, sample, known)
                sample += 1
        _check_end(sample, known, done)
    except LazyShardError as error:
        _check_error(error)


def _read_any(directory: Path, known: Known, done: Damaged) -> None:
    try:
        reader = _reader(directory, known)
    except LazyShardError as error:
        _check_error(error)
        return
    for sample in (*reversed(range(len(known.rows) + 2)), 2**62):
        try:
            line = reader.line(sample)
            row = reader.read(sample)
        except LazyShardError as error:
            _check_error(error)
        except IndexError:
            _check_end(sample, known, done)
        else:
            _check_row(row, sample, known)
            if known.native and line != known.rows[sample]:
                raise Broken(f"sample {sample} is {line[:80]!r}")


def _dataset(directory: Path, known: Known, **options: Any) -> LazyShardedDataset:
    most = None if known.ended else len(known.rows)
    given = {"dp_rank": 0, "dp_size": 1, "max_wait": 0, "samples_per_chunk": known.size, "max_total_samples": most}
    return LazyShardedDataset(directory, **grouped(given | options))


def _read_dataset(directory: Path, known: Known, done: Damaged) -> None:
    for options in ({"bad_rows": BadRows("raise")}, {"unit": "sample", "shuffle_window": 2, "seed": 1}):
        try:
            dataset = _dataset(directory, known, **options)
            for index in dataset.rank_indices:
                sample = dataset.draw(index).sample
                if sample >= len(known.rows) or known.rows[sample] is not None:
                    row = dataset[index]
                    same = sample // known.per_chunk * known.per_chunk
                    # A bad sample is substituted by another one of its chunk.
                    others = range(same, same + known.per_chunk) if len(options) > 1 else [sample]
                    if known.native and with_lists(row) not in [_parsed(known, other) for other in others]:
                        raise Broken(f"sample {sample} is {str(row)[:80]}")
        except LazyShardError as error:
            _check_error(error)


def _resume(directory: Path, known: Known, done: Damaged) -> None:
    try:
        cursor = read_cursor(directory, "run0")
        dataset = _dataset(directory, known, consumer="run0", bad_rows=BadRows("raise"))
        if cursor is not None and cursor.state is not None:
            dataset.load_state_dict(cursor.state.to_dict())
        for index in dataset.rank_indices[:3]:
            _check_row(dataset[index], dataset.draw(index).sample, known)
        dataset.commit(dataset.consumed, last_epoch=True)
    except LazyShardError as error:
        _check_error(error)


def _verify(directory: Path, known: Known, done: Damaged) -> None:
    try:
        verified = verify(directory, known.size, grace_s=0.0)
    except LazyShardError as error:
        _check_error(error)
        return
    for finding in verified.findings:
        if len(str(finding)) > 2000 or "\n" in str(finding):
            raise Broken(f"a finding of {len(str(finding))} characters: {str(finding)[:200]!r}")
    if known.native and not done.lies and not (verified.count("damage") or verified.count("unchecked")):
        reader = _reader(directory, known)  # All is well, it says: then every row can be read
        # Without its end, a stream looks as one that was killed before it could write that.
        unended = any(finding.kind == "unended" for finding in verified.findings)
        for sample, row in enumerate(known.rows[: verified.samples - 1 if unended else None]):
            if row is not None and reader.line(sample) != row:
                raise Broken(f"all is well, it says, but sample {sample} is not")
        for number in range(verified.retired, verified.chunks):
            for name in (chunk_name(number), *([] if known.values is None else [arrays_name(number)])):
                if (directory / name).read_bytes() != known.files[name]:
                    raise Broken(f"all is well, it says, but {name} holds other bytes")


def _delete(directory: Path, known: Known, done: Damaged) -> None:
    published = -(-len(known.rows) // known.per_chunk)
    before = _sealed(directory)
    try:
        consumers = list_consumers(directory, published)
        if consumers and known.native:
            retire(directory, min(one.chunks_before for one in consumers), published)
    except LazyShardError as error:
        _check_error(error)
    except OSError:
        pass  # a folder where a file should be cannot be removed: what is meant to be there is not touched
    gone = before - _sealed(directory)
    floor = max(known.done, _released(directory, published))
    if any(number >= floor for number in gone) and not done.lies:
        raise Broken(f"chunks {sorted(gone)} are deleted, but only those below {floor} may be")


def _released(directory: Path, published: int) -> int:
    released = []
    for path in {*(directory / "cursors").glob("[!.]*.json")} - {*(directory / "cursors").glob("*.reading.json")}:
        try:
            found = orjson.loads(path.read_bytes() if path.is_file() and path.stat().st_size < 1 << 20 else b"")
            right = found["stream_id"] == ID and 0 <= found["chunks_before"] <= published
            released.append(found["chunks_before"] if right else 0)
        except (orjson.JSONDecodeError, KeyError, TypeError, OSError):
            released.append(0)
    return min(released, default=0)


def _command(*arguments: str) -> Look:
    def run(directory: Path, known: Known, done: Damaged) -> None:
        out, err = io.StringIO(), io.StringIO()
        more = [] if known.native or arguments[0] == "status" else ["--samples-per-chunk", str(known.per_chunk)]
        app, quick = patch.object(command, "app", _built_app()), functools.partial(verify, grace_s=0.0)
        with app, patch.object(verify_command, "verify", quick), redirect_stdout(out), redirect_stderr(err):
            code = execute([arguments[0], str(directory), *arguments[1:], *more])
        said = err.getvalue()
        if code not in (*_DOCUMENTED, exits.OUT_OF_MEMORY) or "Traceback" in said:
            raise Broken(f"exit code {code}: {said[-400:]}")
        if said.count("\n") > 1 or (code and code not in (5, 7) and not said) or (said and not code):
            raise Broken(f"exit code {code}, and {said.count(chr(10))} lines: {said[:400]!r}")
        if any(ord(char) < 32 and char != "\n" for char in out.getvalue() + said):
            raise Broken(f"control characters: {(out.getvalue() + said)[:400]!r}")
        if "--json" in arguments and out.getvalue():
            orjson.loads(out.getvalue())

    return run


@functools.cache
def _built_app() -> Any:
    """The command's parser, made once: typer makes it anew for each call, which takes far longer than a look."""
    parser: Any = typer.main.get_command(command.app)
    parser.registered_commands = command.app.registered_commands
    return parser


def _reader(directory: Path, known: Known) -> StreamReader:
    return StreamReader(directory, known.size, max_wait=0)


def _parsed(known: Known, sample: int) -> Any:
    if known.values is not None:
        return known.values[sample] if sample < len(known.values) else None
    return orjson.loads(known.rows[sample] or b"null") if sample < len(known.rows) else None


def _check_row(row: Any, sample: int, known: Known) -> None:
    if type(row) is not dict or (known.native and with_lists(row) != _parsed(known, sample)):
        raise Broken(f"sample {sample} is {str(row)[:80]}")


def _check_end(sample: int, known: Known, done: Damaged) -> None:
    if known.native and not done.lies and (sample < len(known.rows) or not known.ended):
        raise Broken(f"the stream ends before sample {sample}")


def _check_error(error: LazyShardError) -> None:
    message = str(error)
    if not message or len(message) > 3000 or "Errno" in message:
        raise Broken(f"the message of a {type(error).__name__} is {message[:300]!r}")


def _sealed(directory: Path) -> set[int]:
    return {number for number in range(10) if (directory / f"chunk_{number:05d}.jsonl").exists()}


LOOKS: Final[dict[str, Look]] = {
    **{"read": _read_in_order, "any": _read_any, "dataset": _read_dataset, "verify": _verify},
    **{words: _command(*words.split()) for words in ("status", "status --json", "verify --jobs 1")},
    **{words: _command(*words.split()) for words in ("verify --jobs 1 --quick --json", "inspect", "inspect --json")},
    **{words: _command(*words.split()) for words in ("inspect 0 --rows 9", "inspect --chunk 1 --json")},
    **{"resume": _resume, "delete": _delete},
}
"""In this order: the last two write."""
