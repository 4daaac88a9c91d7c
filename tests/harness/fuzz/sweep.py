"""The sweep over damaged files: formats, rows, states of runs, whole directories; about ten minutes at scale 1. Each
case is drawn from its seed, target and number alone. And the inputs that are kept, `corpus/`, each run again in CI.
`inputs.jsonl`: on each line `target` (a format of `FORMATS`, row, lines or foreign), `text` or `base64`, and `why`
it is kept. `streams.jsonl`: `stream` (of `STREAMS`), what to `do` to its directory, and `why`."""

import base64
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

import numpy as np
import orjson

from lazyshard.errors import RowInvalid
from lazyshard.format.arrays import fill_row
from tests.harness.fuzz import formats
from tests.harness.fuzz.damage import Damaged, alter_json, damage, damage_cursor, replace_by, spoil, spoil_more
from tests.harness.fuzz.looks import LOOKS, Hangs, bounded, look_at
from tests.harness.fuzz.states import check_blend, check_state, drawn_blend, drawn_state, put_streams
from tests.harness.fuzz.streams import ARRAYS, STREAMS, Known
from tests.harness.tally import Tally

CORPUS: Final = Path(__file__).parent / "corpus"


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
    """Asserts what must hold for an input; `place` is a directory of one's own."""
    checks: dict[str, Callable[[bytes], object]] = {
        "row": formats.check_one,
        "lines": lambda data: formats.check_batch(data.split(b"\x01")),
        "foreign": lambda data: formats.check_foreign(data, place / "foreign.jsonl"),
    }
    with bounded():
        checks.get(one.target, lambda data: formats.check_bytes(formats.FORMATS[one.target], data))(one.data)


def run_recipe(recipe: Recipe, place: Path) -> str | None:
    """Returns what a damaged stream broke, None if nothing; `place` is a directory of one's own."""

    def spoil(directory: Path) -> Damaged:
        for operation, name, *more in recipe.steps:
            _apply(directory, operation, name, *more)
        return Damaged([recipe.why], recipe.lies, {name for _, name, *_ in recipe.steps})

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
    for line in (CORPUS / name).read_bytes().splitlines():
        yield orjson.loads(line)


class Found(NamedTuple):
    broken: str | None  # what was broken, None if nothing
    taken: bool  # whether the input was taken as valid, and so was looked at further


class Cases:
    """Runs cases. `place`: an empty directory of one's own."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._streams = put_streams(place)
        self._run: Final[dict[str, Callable[[Random], object]]] = {
            **{"formats": _formats, "rows": _rows, "descriptions": _descriptions},
            "batches": lambda random: formats.check_batch(formats.drawn_lines(random)),
            **{"foreign": self._foreign, "states": self._states, "blends": self._blends},
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

    def _blends(self, random: Random) -> bool:
        return check_blend(self._streams, *drawn_blend(self._streams, random), random.choice((1, 1, 2, 3)))

    def _look(self, known: Known, random: Random, spoil: Callable[..., Damaged], looks: Iterable[str]) -> Found:
        broken, done = _look_all(self._place / "damaged", known, lambda at: spoil(at, known, random), looks)
        if broken is not None:
            return Found(f"{known.name}, {', '.join(done.what)}: {broken}", False)
        return Found(None, not done.what)


def hypothesis_case(random: Random) -> None:
    target = random.choice((*formats.FORMATS.values(), None))
    if target is None:
        formats.check_one(spoil(random.choice(formats.drawn_lines(random)), random)[1])
        formats.check_batch(formats.drawn_lines(random))
        return
    formats.check_bytes(target, formats.mutated(target, random))


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
        row = orjson.loads(alter_json(line, random, values=(-8, 4, 8, 16, 33, 2**31, 2**62, 2**63)))
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


# How many at scale 1, by target: some ten minutes on one core
CASES: Final = {
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
                # A point is a case: no two are alike but by chance.
                tally.trial(faults=1, points=1)
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
