"""The sweep over damaged files, each case drawn from seed, target, number. `corpus/`: what is kept, see its README."""

import base64
import functools
import io
import logging
import resource
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import numpy as np
import orjson
import typer

from lazyshard import BadRows, LazyShardedDataset, StreamReader
from lazyshard.cli import command, exits
from lazyshard.cli import verify as verify_command
from lazyshard.cli.command import execute
from lazyshard.errors import LazyShardError, RowInvalid
from lazyshard.format.arrays import fill_row
from lazyshard.format.records import arrays_name, chunk_name
from lazyshard.inspection.verification import verify
from lazyshard.stream import chunk, list_consumers, read_cursor
from lazyshard.stream.listing import retire
from tests.data.options import grouped
from tests.harness.fuzz import damage as spoiling
from tests.harness.fuzz import formats
from tests.harness.fuzz.damage import ARRAYS, ID, STREAMS, Damaged, Known, damage, damage_cursor, replace_by, spoil_more
from tests.harness.fuzz.states import check_blend, check_state, drawn_blend, drawn_state, put_streams
from tests.harness.tally import Tally

DEADLINE_S: Final = 30.0  # A look takes milliseconds; one that takes so long hangs


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
    most = pages * resource.getpagesize() + (1 << 30)  # Above what the process has; of more it gets a MemoryError
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
                    if known.native and spoiling.with_lists(row) not in [_parsed(known, other) for other in others]:
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
        unended = any(finding.kind == "unended" for finding in verified.findings)  # As one that was killed before
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
    if type(row) is not dict or (known.native and spoiling.with_lists(row) != _parsed(known, sample)):
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


LOOKS: Final[dict[str, Look]] = {  # In this order: the last two write
    **{"read": _read_in_order, "any": _read_any, "dataset": _read_dataset, "verify": _verify},
    **{words: _command(*words.split()) for words in ("status", "status --json", "verify --jobs 1")},
    **{words: _command(*words.split()) for words in ("verify --jobs 1 --quick --json", "inspect", "inspect --json")},
    **{words: _command(*words.split()) for words in ("inspect 0 --rows 9", "inspect --chunk 1 --json")},
    **{"resume": _resume, "delete": _delete},
}


class Input(NamedTuple):
    target: str
    data: bytes
    why: str


class Recipe(NamedTuple):
    stream: str  # its name
    steps: tuple[tuple[Any, ...], ...]  # each an operation, the name of a file, and what the operation needs
    lies: bool  # whether the damage makes a file say, in good form, what is not so; see `Damaged`
    why: str  # why it is kept


def inputs() -> Iterator[Input]:
    for line in _lines("inputs.jsonl"):
        data = base64.b64decode(line["base64"]) if "base64" in line else line["text"].encode()
        yield Input(line["target"], data, line["why"])


def recipes() -> Iterator[Recipe]:
    for line in _lines("streams.jsonl"):
        yield Recipe(line["stream"], tuple(map(tuple, line["do"])), line.get("lies", False), line["why"])


def run_input(one: Input, place: Path) -> None:
    checks: dict[str, Callable[[bytes], object]] = {
        "row": formats.check_one,
        "lines": lambda data: formats.check_batch(data.split(b"\x01")),
        "foreign": lambda data: formats.check_foreign(data, place / "foreign.jsonl"),
        **{name: functools.partial(formats.check_bytes, target) for name, target in formats.FORMATS.items()},
    }
    with bounded():
        checks[one.target](one.data)


def run_recipe(recipe: Recipe, place: Path) -> str | None:
    """Returns what a damaged stream broke, None if nothing; `place` is a directory of one's own."""

    def spoil(directory: Path) -> Damaged:
        for operation, name, *more in recipe.steps:
            _apply(directory, operation, name, *more)
        return Damaged([recipe.why], recipe.lies)

    return _look_all(place / "damaged", STREAMS[recipe.stream], spoil, LOOKS)[0]


def _look_all(
    directory: Path, known: Known, spoil: Callable[[Path], Damaged], looks: Iterable[str]
) -> tuple[str | None, Damaged]:
    known.put(directory)
    try:
        done = spoil(directory)
        broken = (look_at(directory, known, done, look) for look in looks)
        return next((one for one in broken if one is not None), None), done
    finally:
        shutil.rmtree(directory)


_CHANGES: Final[dict[str, Callable[[bytes, Any], bytes]]] = {
    "write": lambda data, text: bytes(text.encode()),
    "flip": lambda data, at: data[:at] + bytes([data[at] ^ 1]) + data[at:][1:],
    "cut": lambda data, size: data[:size],
    "append": lambda data, text: data + bytes(text.encode()),
    "zero": lambda data, _: bytes(len(data)),
    "set": lambda data, values: orjson.dumps(orjson.loads(data) | values),
}


def _apply(directory: Path, operation: str, name: str, argument: Any = None) -> None:
    path = directory / name
    if operation in _CHANGES:
        path.write_bytes(_CHANGES[operation](path.read_bytes() if path.exists() else b"", argument))
    elif operation == "remove":
        path.unlink()
    elif operation in ("swap", "copy"):
        one, other = path.read_bytes(), directory / argument
        if operation == "swap":
            path.write_bytes(other.read_bytes())
        other.write_bytes(one)
    else:
        replace_by(path, operation, directory / (argument or "stream.json"))


def _lines(name: str) -> Iterator[dict[str, Any]]:
    for line in (Path(__file__).parent / "corpus" / name).read_bytes().splitlines():
        yield orjson.loads(line)


class Found(NamedTuple):
    broken: str | None  # what was broken, None if nothing
    taken: bool  # whether the input was taken as valid, and so was looked at further


class Cases:
    def __init__(self, place: Path) -> None:
        self._place = place
        self._streams = put_streams(place)
        self._run: Final[dict[str, Callable[[Random], object]]] = {
            **{"formats": _formats, "rows": _rows, "descriptions": _descriptions},
            "batches": lambda random: formats.check_batch(formats.drawn_lines(random)),
            **{"foreign": self._foreign, "states": self._states},
            "blends": lambda random: check_blend(
                self._streams, *drawn_blend(self._streams, random), random.choice((1, 1, 2, 3))
            ),
        }

    def run(self, target: str, seed: int, number: int) -> Found:
        """Runs a case of a target: one of `_run`, "cursors", "streams" or "arrays"."""
        random = Random(f"{seed}/{target}/{number}")
        if target == "arrays":
            return self._look(ARRAYS, random, damage, LOOKS)
        if target == "streams":
            return self._look(random.choice(list(STREAMS.values())), random, damage, LOOKS)
        if target == "cursors":
            known = STREAMS[random.choice(("live", "retired"))]
            return self._look(known, random, damage_cursor, ("status", "resume", "delete"))
        try:
            with bounded():
                return Found(None, self._run[target](random) is not False)
        except (Exception, Hangs) as error:
            return Found(f"{type(error).__name__}: {str(error)[:500]}", False)

    def _foreign(self, random: Random) -> None:
        data = b"".join(formats.drawn_lines(random))
        formats.check_foreign(spoil_more(data, random) if random.randrange(2) else data, self._place / "foreign.jsonl")

    def _states(self, random: Random) -> bool:
        known, state, options = drawn_state(random)
        return check_state(self._streams[known.name], known, state, options, random.choice((1, 1, 2, 3)))

    def _look(self, known: Known, random: Random, spoil: Callable[..., Damaged], looks: Iterable[str]) -> Found:
        broken, done = _look_all(self._place / "damaged", known, lambda at: spoil(at, known, random), looks)
        if broken is not None:
            return Found(f"{known.name}, {', '.join(done.what)}: {broken}", False)
        return Found(None, not done.what)


def _formats(random: Random) -> bool:
    target = random.choice(list(formats.FORMATS.values()))
    return formats.check_bytes(target, formats.mutated(target, random))


def _rows(random: Random) -> bool:
    line = random.choice(formats.drawn_lines(random))
    return formats.check_one(spoil_more(line, random) if random.randrange(2) else line)


def _descriptions(random: Random) -> bool:
    line = ARRAYS.rows[random.randrange(len(ARRAYS.rows))]
    assert line is not None
    data = np.frombuffer(random.randbytes(8 * random.randrange(8)), np.uint8)
    try:
        row = orjson.loads(spoiling.alter_json(line, random, values=(-8, 4, 8, 16, 33, 2**31, 2**62, 2**63)))
        if type(row) is not dict:
            return False
        fill_row(row, data)
    except (RowInvalid, orjson.JSONDecodeError):
        return False
    pending = [row]
    while pending:
        value: Any = pending.pop()
        if isinstance(value, np.ndarray) and value.nbytes:
            assert np.may_share_memory(value, data) and value.nbytes <= data.nbytes
        elif isinstance(value, (dict, list)):
            pending += value.values() if isinstance(value, dict) else value
    return True


CASES: Final = {  # At scale 1: some ten minutes on one core
    **{"streams": 9_000, "arrays": 2_000, "descriptions": 40_000, "cursors": 6_000, "states": 40_000, "blends": 20_000},
    **{"rows": 40_000, "batches": 15_000, "foreign": 15_000, "formats": 300_000},
}
_MOST_VIOLATIONS: Final = 20  # Of a target: one fault shows in very many cases


def sweep(tally: Tally, place: Path, seed: int, scale: float) -> None:
    cases = Cases(place)
    with quiet():
        for target, most in CASES.items():
            count = max(10, round(most * scale))
            broken = 0
            for number in range(count):
                found = cases.run(target, seed, number)
                tally.trial(faults=1, points=1)  # A point is a case: no two are alike but by chance
                tally.count(f"cases of {target}")
                if found.taken:
                    tally.count(f"of {target} taken as valid")
                if found.broken is not None:
                    tally.violation(f"{target} {number} of seed {seed}: {found.broken}")
                    broken += 1
                    if broken == _MOST_VIOLATIONS:
                        tally.notes.append(f"{target}: given up after {broken} violations in {number + 1} cases")
                        break


@contextmanager
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
