"""How other packages write the rows that benchmarks compare, each as its documentation shows, uncompressed; and pack.

Runs in the environments of these packages: imports nothing of ours, and each of them only where it is used.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import importlib.machinery
import itertools
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from scripts.benchmarks.bench_process import timed

SHARD_BYTES: Final = 64 << 20

Row = dict[str, Any]


def rows_of(path: str) -> Iterator[Row]:
    """Yields the parsed rows of a file; those in a folder `media` with bytes instead of their base64."""
    orjson = importlib.import_module("orjson")
    with open(path, "rb", buffering=1 << 20) as file:
        rows = map(orjson.loads, file)
        yield from map(_with_bytes, rows) if Path(path).parent.name.startswith("media") else rows


def _with_bytes(row: Row) -> Row:
    return row | {"media": base64.b64decode(row["media"])}


def all_rows(files: Sequence[str]) -> Iterator[Row]:
    """Yields those of all files."""
    return itertools.chain.from_iterable(map(rows_of, files))


def streaming() -> Any:
    """Returns MosaicML's package, with a stand-in for torchvision where that cannot be imported.

    The torchvision of PyPI wants torch with CUDA. Data sets of images are imported with the package; none of them is
    used here.
    """
    try:
        importlib.import_module("torchvision")
    except Exception:
        _stand_in_for_torchvision()
    package = importlib.import_module("streaming")
    # What a process that was killed may have left behind.
    with contextlib.suppress(Exception):
        package.base.util.clean_stale_shared_memory()
    return package


def _stand_in_for_torchvision() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]

    def lookup(name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})

    for name in ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        module.__getattr__ = lookup  # type: ignore[method-assign]
        sys.modules[name] = module


def write_mds(files: Sequence[str], out: str, shard_bytes: int, **options: Any) -> None:
    """MosaicML's MDSWriter: text as text, messages as JSON."""
    kinds = {"id": "int", "messages": "json", "text": "str", "image": "str", "media": "bytes"}
    columns = {name: kinds[name] for name in next(rows_of(files[0]))}
    with streaming().MDSWriter(out=out, columns=columns, size_limit=shard_bytes, **options) as writer:
        for row in all_rows(files):
            writer.write(row)


def write_litdata(files: Sequence[str], out: str, shard_bytes: int) -> None:
    """litdata's `optimize`, one worker, which is a process of its own."""
    importlib.import_module("litdata").optimize(
        fn=rows_of,
        inputs=list(files),
        output_dir=out,
        chunk_bytes=shard_bytes,
        num_workers=1,
        keep_data_ordered=True,
        verbose=False,
    )


def write_arrow(files: Sequence[str], out: str, shard_bytes: int) -> None:
    """The JSON reader of `datasets`, or rows with bytes, saved as Arrow files, as many as there are chunks."""
    package = importlib.import_module("datasets")
    package.disable_progress_bars()
    if Path(files[0]).parent.name.startswith("media"):
        dataset = package.Dataset.from_generator(all_rows, gen_kwargs={"files": list(files)}, cache_dir=f"{out}.cache")
    else:
        dataset = package.load_dataset("json", data_files=list(files), cache_dir=f"{out}.cache", split="train")
    if shard_bytes:
        dataset.save_to_disk(out, num_shards=len(files))


def write_tars(files: Sequence[str], out: str, shard_bytes: int, least: int = 2) -> None:
    """webdataset's ShardWriter: a row is one JSON member, an image one of its own."""
    orjson = importlib.import_module("orjson")
    rows = list(all_rows(files))
    Path(out).mkdir(parents=True)
    writer_of = importlib.import_module("webdataset").ShardWriter
    with writer_of(f"{out}/%05d.tar", maxcount=-(-len(rows) // least), maxsize=shard_bytes, verbose=0) as writer:
        for row in rows:
            sample = {"__key__": f"{row['id']:09d}"}
            if "image" in row:
                sample["image"] = row.pop("image").encode()
            elif "media" in row:
                sample["media"] = row.pop("media")
            writer.write(sample | {"json": orjson.dumps(row)})


def write_energon(files: Sequence[str], out: str, shard_bytes: int) -> None:
    """The same tar files, and what `energon prepare` adds to them."""
    energon = importlib.import_module("megatron.energon")
    paths = importlib.import_module("megatron.energon.epathlib")
    root = Path(out)
    write_tars(files, str(root / "tars"), shard_bytes)
    names = sorted(str(path.relative_to(root)) for path in root.glob("tars/*.tar"))
    energon.BaseWebdatasetFactory.prepare_dataset(
        paths.EPath(root), names, split_parts_ratio=[("train", 1.0)], shuffle_seed=None, workers=1
    )
    (root / ".nv-meta" / "dataset.yaml").write_text("__module__: megatron.energon\n__class__: CrudeWebdataset\n")


def write_records(files: Sequence[str], out: str, shard_bytes: int) -> None:
    """ArrayRecord files of pickled rows, as many as there are chunks, any record read without its neighbours."""
    writers = importlib.import_module("array_record.python.array_record_module")
    Path(out).mkdir()
    for number, path in enumerate(files):
        writer = writers.ArrayRecordWriter(str(Path(out, f"{number:05d}.array_record")), "group_size:1,uncompressed")
        for row in rows_of(path):
            writer.write(pickle.dumps(row, pickle.HIGHEST_PROTOCOL))
        writer.close()


WRITERS: Final[dict[str, Callable[..., None]]] = {
    "mosaicml-streaming": write_mds,
    "litdata": write_litdata,
    "datasets": write_arrow,
    "webdataset": write_tars,
    "megatron-energon": write_energon,
    "grain": write_records,
}
"""By package."""

_MODULES: Final = {"mosaicml-streaming": "streaming", "megatron-energon": "megatron.energon"}


def write(package: str, files: Sequence[str], out: str, shard_bytes: int, **options: Any) -> dict[str, float]:
    """In a process of that package: writes all rows and returns what that took, imports not counted."""
    if package == "mosaicml-streaming":
        streaming()
    importlib.import_module(_MODULES.get(package, package))
    return timed(lambda: WRITERS[package](files, out, shard_bytes, **options))


def binpack(lengths: Sequence[int], capacity: int) -> dict[str, float]:
    """In a process of binpacking: packs samples as ms-swift does; returns the packs and what that took.

    Raises:
        RuntimeError: a sample is in none of them, or in two.
    """
    pack = importlib.import_module("binpacking").to_constant_volume
    packs: list[list[tuple[int, int]]] = []
    # ms-swift 4.6, `calculate_matched_group` in swift/dataset/packing.py.
    found = timed(lambda: packs.extend(pack(list(enumerate(lengths)), capacity, weight_pos=1)))
    if sorted(index for one in packs for index, _ in one) != list(range(len(lengths))):
        raise RuntimeError("binpacking lost samples")
    return {"packs": len(packs), "processor us": found["processor us"]}
