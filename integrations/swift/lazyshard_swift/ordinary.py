"""Ordinary data sets in ``--dataset``: ms-swift loads them, and their rows are written as an ended stream, a spool.

Rank 0 does this for all ranks, in the run's output folder, which all nodes must share:

    OUTPUT/lazyshard-spools/NAME-IDENTITY/

The identity is the stream's id: 16 digits for the entry without ``#N``, then 16 for what determines its rows. So the
same rows are the same stream if they are written again, also elsewhere, and a resume recognises an entry whose rows
have changed. A writer that is killed leaves whole chunks, and the next one continues after them. While another run
writes the spool, this one waits for its end.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from collections.abc import Sequence
from typing import Any, Final

import orjson

from lazyshard import ChunkWriter, LazyShardError, StreamReader
from lazyshard.errors import ProducerFenced, StreamEnded
from lazyshard.format.records import END
from lazyshard.format.state import BlendState
from lazyshard.stream.lock import Wanted, open_for_writing
from lazyshard_swift import checkpoints, ms_swift
from lazyshard_swift.arguments import place_of
from lazyshard_swift.errors import not_resumed, refused
from lazyshard_swift.rows import content, data_uri, digest

_SAMPLES_PER_CHUNK: Final = 1000  # unless --sharded_lazy_samples_per_chunk is given
# Arguments of ms-swift's `load_dataset` that do not determine the rows of a single data set.
_OTHER: Final = (
    *("num_proc", "load_from_cache_file", "streaming", "interleave_prob", "stopping_strategy", "shuffle_buffer_size"),
    *("hub_token", "download_mode"),
)


def spooled(args: Any, entry: str) -> str:
    """Returns the directory of the ended stream with the rows of an entry. A collective."""
    made: str | Exception = ""
    if checkpoints.is_first():
        try:
            made = _spool(args, entry)
        except (LazyShardError, OSError) as error:
            made = error
    if isinstance(made := checkpoints.agree(made), Exception):
        raise made
    return made


def _spool(args: Any, entry: str) -> str:
    place, size = place_of(entry), args.sharded_lazy_samples_per_chunk or _SAMPLES_PER_CHUNK
    options = args.get_dataset_kwargs() | {"interleave_prob": None, "shuffle": args.dataset_shuffle}
    known = [content(one) for one in getattr(args, "custom_dataset_info", None) or ()]
    facts = [entry, _contents(place), known, size, ms_swift.version()]
    facts.append({name: value for name, value in options.items() if name not in _OTHER})
    identity = digest(re.sub(r"#\d+$", "", entry)) + digest(facts)
    _check_same(args, entry, identity)
    readable = re.sub(r"[^\w.-]+", "-", os.path.basename(place))[:64]
    directory = checkpoints.run_folder(args.output_dir) / "lazyshard-spools" / f"{readable}-{identity}"
    if (directory / END).exists():
        return str(directory)
    rows = _load(entry, options)
    try:
        # Creates the stream with this identity; the writer then finds it.
        open_for_writing(directory, Wanted(size), time.time, identity)[1].release()
        with ChunkWriter(directory) as writer:
            for row in itertools.islice(rows, writer.published_samples, None):
                writer.write(orjson.dumps(row, default=_as_text))
    except (ProducerFenced, StreamEnded):
        # Another run is writing it, or has just ended it.
        StreamReader(directory, max_wait=args.sharded_lazy_max_wait).wait_for(len(rows) + 1)
    ms_swift.notice(f"--dataset {entry}: its {len(rows)} rows are in {directory}")
    return str(directory)


def _contents(place: str) -> Any:
    """Returns a digest of a file, or of each file of a directory; the name of a hub's data set."""
    if not os.path.isdir(place):
        return content(place)
    files = (os.path.join(folder, name) for folder, _, names in os.walk(place) for name in names)
    # A hub's client adds hidden files, and ms-swift renames dataset_infos.json.
    left_out = re.compile(r"(.*/)?(\.|dataset_infos\.json)")
    return {name: content(one) for one in files if not left_out.match(name := os.path.relpath(one, place))}


def _check_same(args: Any, entry: str, identity: str) -> None:
    """Refuses to resume with other rows of an entry than those in the checkpoint."""
    checkpoint = checkpoints.resume_checkpoint(args)
    saved = None if checkpoint is None else checkpoints.load_position(checkpoint)
    names: tuple[str, ...] = () if saved is None else (saved.stream,)
    if saved is not None and isinstance(saved.blend, BlendState):
        names = saved.blend.names
    was = [name for name in names if name.startswith(identity[:16])]
    if was and identity not in was:
        why = f"--dataset {entry}: its rows, ms-swift, or the arguments with which it loads them have changed"
        raise not_resumed(checkpoint, f"{why}: undo that, or start over from the weights alone", was[0], identity)


def _load(entry: str, options: dict[str, Any]) -> Sequence[Any]:
    """Returns the rows of an entry after ms-swift's preprocessing."""
    from swift.dataset import load_dataset
    from swift.utils import disable_safe_ddp_context_use_barrier

    rows: Sequence[Any] | None = None
    try:
        # The other ranks do not come to its barriers. It divides by the number of rows.
        with contextlib.suppress(ZeroDivisionError), disable_safe_ddp_context_use_barrier():
            rows, _ = load_dataset([entry], **options)
    except Exception as cause:
        text = f"{type(cause).__name__}: {' '.join(str(cause).split())}"
        raise refused("dataset", f"{entry}: there is no stream, and ms-swift cannot load it: {text}") from cause
    if not rows:
        raise refused("dataset", f"{entry}: ms-swift finds no row to train in it: check its columns")
    return rows


def _as_text(value: Any) -> str:
    """Returns a value that JSON does not have as text: of an image's bytes, templates take it."""
    return data_uri(value) if isinstance(value, bytes) else str(value)
