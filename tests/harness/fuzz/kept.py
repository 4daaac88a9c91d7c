"""The inputs that are kept, `corpus/`: found by fuzzing, or what it once broke; each is run again in CI.
`inputs.jsonl`: the bytes of a file or of lines, a JSON object on each line: `target` (a format of `FORMATS`, "row",
"lines" or "foreign"), `text` or `base64`, and `why` it is kept. `streams.jsonl`: `stream` (of `STREAMS`), what to `do`
to its directory, and `why`."""

import base64
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson

from tests.harness.fuzz.damage import Damaged, replace_by
from tests.harness.fuzz.formats import FORMATS, check_batch, check_bytes, check_foreign, check_one
from tests.harness.fuzz.looks import LOOKS, bounded, look_at
from tests.harness.fuzz.streams import STREAMS

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


def inputs() -> list[Input]:
    found = []
    for line in _lines("inputs.jsonl"):
        data = base64.b64decode(line["base64"]) if "base64" in line else line["text"].encode()
        found.append(Input(line["target"], data, line["why"]))
    return found


def recipes() -> list[Recipe]:
    return [
        Recipe(line["stream"], tuple(map(tuple, line["do"])), line.get("lies", False), line["why"])
        for line in _lines("streams.jsonl")
    ]


def run_input(one: Input, place: Path) -> None:
    """Asserts what must hold for an input; `place` is a directory of one's own."""
    with bounded():
        if one.target == "row":
            check_one(one.data)
        elif one.target == "lines":
            check_batch(one.data.split(b"\x01"))
        elif one.target == "foreign":
            check_foreign(one.data, place / "foreign.jsonl")
        else:
            check_bytes(FORMATS[one.target], one.data)


def run_recipe(recipe: Recipe, place: Path) -> str | None:
    """Returns what a damaged stream broke, None if nothing; `place` is a directory of one's own."""
    known = STREAMS[recipe.stream]
    directory = place / "damaged"
    known.put(directory)
    try:
        for operation, name, *more in recipe.steps:
            _apply(directory, operation, name, *more)
        done = Damaged([recipe.why], recipe.lies, {name for _, name, *_ in recipe.steps})
        for look in LOOKS:
            broken = look_at(directory, known, done, look)
            if broken is not None:
                return broken
    finally:
        shutil.rmtree(directory)
    return None


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
