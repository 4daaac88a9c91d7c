"""Deterministic rows for benchmarks, and streams of very many chunks."""

from __future__ import annotations

import base64
import json
import random
from array import array
from io import BytesIO
from pathlib import Path
from typing import Any, Final

from lazyshard import ChunkWriter

SAMPLES_PER_CHUNK: Final = 1000
BATCH: Final = 8
IMAGE_BYTES: Final = 750_000
"""As base64 text 1 MB."""


def _prose(rng: random.Random, words: list[str], length: int) -> str:
    """Returns about this many words of natural text: sentences, paragraphs, quotes, some non-ASCII letters."""
    text = []
    while length > 0:
        sentence = rng.choices(words, k=min(length, rng.randint(4, 24)))
        length -= len(sentence)
        if rng.random() < 0.2:
            sentence[-1] = f'"{sentence[-1]}"'
        text.append(" ".join(sentence).capitalize() + rng.choice((". ", ". ", ".\n", "?\n\n")))
    return "".join(text)


def _plain(rng: random.Random, words: list[str], length: int) -> str:
    """Returns this many plain words: text without escapes parses in a third of the time."""
    return " ".join(rng.choices(words, k=length))


def make_stream(directory: Path, rows: int, text: str = "prose") -> Path:
    """Writes chat rows of made-up text, unless they are there: lognormal lengths, about 2 KB in the mean."""
    if directory.exists():
        return directory
    make = _plain if text == "plain" else _prose
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlucmfwypvbgkjqxz", k=rng.randint(2, 9))) for _ in range(5000)]
    if text != "plain":
        words += ["naïve", "señor", "Größe", "œuvre", "мир", "世界", "データ"] * 10
    with ChunkWriter(directory, SAMPLES_PER_CHUNK) as writer:
        for number in range(rows):
            length = int(rng.lognormvariate(5.5, 0.6))
            messages = [
                {"role": "user", "content": make(rng, words, length // 5)},
                {"role": "assistant", "content": make(rng, words, length - length // 5)},
            ]
            writer.write({"id": number, "messages": messages})
    return directory


def make_images(directory: Path, rows: int, samples_per_chunk: int) -> Path:
    """Writes rows with random bytes as base64 and a line of text, unless they are there."""
    if directory.exists():
        return directory
    rng = random.Random(0)
    with ChunkWriter(directory, samples_per_chunk) as writer:
        for number in range(rows):
            image = base64.b64encode(rng.randbytes(IMAGE_BYTES)).decode("ascii")
            writer.write({"id": number, "text": f"What does image {number} show?", "image": image})
    return directory


def make_photos(directory: Path, rows: int, samples_per_chunk: int, sides: tuple[int, int]) -> Path:
    """Writes rows as `make_images`, whose bytes are JPEG: 32 pictures of noise with these sides, in turn."""
    if directory.exists():
        return directory
    from PIL import Image

    photos = []
    for _ in range(32):
        photo = BytesIO()
        Image.merge("RGB", [Image.effect_noise(sides, 20.0) for _ in range(3)]).save(photo, "JPEG", quality=80)
        photos.append(base64.b64encode(photo.getvalue()).decode("ascii"))
    with ChunkWriter(directory, samples_per_chunk) as writer:
        for number in range(rows):
            row = {"id": number, "text": f"What does photo {number} show?", "media": photos[number % 32]}
            writer.write(row)
    return directory


def make_media(directory: Path, images: Path, samples_per_chunk: int) -> Path:
    """Writes the rows of `make_photos` with their bytes as they are, unless they are there."""
    if not directory.exists():
        with ChunkWriter(directory, samples_per_chunk, arrays=True) as writer:
            for row in map(json.loads, (line for path in chunk_files(images) for line in path.open("rb"))):
                writer.write(row | {"media": base64.b64decode(row["media"])})
    return directory


def chunk_files(directory: Path) -> list[Path]:
    """Returns the files with the rows, in order."""
    return sorted(directory.glob("chunk_*.jsonl"))


def write_offsets(directory: Path, offsets: Path) -> Path:
    """Writes where each row begins, u64 of shape (chunks, rows of a chunk + 1), unless it is there."""
    if not offsets.exists():
        with offsets.open("wb") as file:
            for path in chunk_files(directory):
                places = array("Q", [0])
                with path.open("rb") as chunk:
                    for line in chunk:
                        places.append(places[-1] + len(line))
                file.write(places.tobytes())
    return offsets


def _change(path: Path, **facts: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_bytes()) | facts))


def make_many_chunks(directory: Path, chunks: int) -> Path:
    """Makes a stream of many files cheaply, four rows each: one is written, the others are its copies."""
    with ChunkWriter(directory, 4) as writer:
        for number in range(4):
            writer.write({"id": number, "text": "x" * 100})
    data = (directory / "chunk_00000.jsonl").read_bytes()
    seal = json.loads((directory / "chunk_00000.jsonl.completed").read_bytes())
    for chunk in range(1, chunks):
        (directory / f"chunk_{chunk:05d}.jsonl").write_bytes(data)
        (directory / f"chunk_{chunk:05d}.jsonl.completed").write_text(json.dumps(seal | {"chunk": chunk}))
    for name in ("head.json", "stream.end"):
        _change(directory / name, chunks=chunks, samples=4 * chunks)
    return directory


class SparseStream:
    """A stream of very many full chunks, of which only the chunks to be read exist.

    A million chunks of a thousand rows take a few megabytes: the stream's metadata covers all of them, and a chunk is
    created before it is read, as a copy of a template with its own number.

    Args:
        directory: where to make it; must not be there yet.
        chunks: how many chunks its facts name.
        ended: whether nothing follows.

    Attributes:
        directory: as given.
        total: samples in it.
    """

    def __init__(self, directory: Path, chunks: int, *, ended: bool = True) -> None:
        self.directory = make_stream(directory, SAMPLES_PER_CHUNK)
        self.total = chunks * SAMPLES_PER_CHUNK
        self._data = (directory / "chunk_00000.jsonl").read_bytes()
        self._seal = json.loads((directory / "chunk_00000.jsonl.completed").read_bytes())
        facts: dict[str, Any] = {"chunks": chunks, "samples": self.total}
        _change(directory / "head.json", **facts, **({} if ended else {"ended": False, "state": "running"}))
        if ended:
            _change(directory / "stream.end", **facts)
        else:
            (directory / "stream.end").unlink()

    def add(self, sample: int) -> int:
        """Makes the chunk of a sample readable and returns the row's id, which is its place in the chunk."""
        chunk = sample // SAMPLES_PER_CHUNK
        (self.directory / f"chunk_{chunk:05d}.jsonl").write_bytes(self._data)
        seal = json.dumps(self._seal | {"chunk": chunk})
        (self.directory / f"chunk_{chunk:05d}.jsonl.completed").write_text(seal)
        return sample % SAMPLES_PER_CHUNK
