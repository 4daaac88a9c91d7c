"""Streams in a bucket: put there as a producer would, object after object."""

from pathlib import Path

from lazyshard.format.records import END, HEAD, MANIFEST, SEAL_SUFFIX
from lazyshard.store.files import UrlPath
from tests.stream.streams import produce


def put(url: UrlPath, data: bytes) -> None:
    url.store.put(url.key, data)


def upload(directory: Path, url: UrlPath) -> None:
    """Puts what is in a directory: what a reader looks at first comes last."""

    def place(path: Path) -> tuple[int, str]:
        order = {MANIFEST: 0, END: 3, HEAD: 4}
        return order.get(path.name, 2 if path.name.endswith(SEAL_SUFFIX) else 1), path.name

    for path in sorted((path for path in directory.rglob("*") if path.is_file()), key=place):
        if not path.name.startswith("."):
            put(url / str(path.relative_to(directory)), path.read_bytes())


def publish(folder: Path, url: UrlPath, samples: int, per_chunk: int = 2, *, end: bool = True) -> Path:
    """Produces into a folder, and puts what is in it."""
    produce(folder, samples, per_chunk, end=end)
    upload(folder, url)
    return folder
