"""`ordinary`: which entries of --dataset are no streams, how they become some, and what is refused; `STREAM#N`."""

import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lazyshard import BlendedDataset, ChunkWriter, LazyShardedDataset, StreamReader
from lazyshard.errors import WaitTimeout
from lazyshard.format.records import Manifest
from lazyshard_swift import arguments
from lazyshard_swift.arguments import check_combinations, first_of, is_ordinary, place_of
from lazyshard_swift.errors import ResumeRefused, SettingsRefused
from lazyshard_swift.ordinary import spooled
from tests.stream.streams import produce, raised
from tests.swift.programs import write
from tests.swift.unit.runs import checkpoint, let_go_of_cursors, megatron, opened, tells

Calls = list[tuple[list[str], dict[str, Any]]]
LOADING = {"columns": None, "strict": False, "seed": 42, "num_proc": 1, "interleave_prob": [0.5, 0.5]}


@pytest.fixture(autouse=True)
def loads(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The calls of a stand-in for ms-swift's `load_dataset`, which makes a row of each word of a file."""
    calls: Calls = []

    def load_dataset(datasets: list[str], **options: Any) -> tuple[list[dict[str, Any]], None]:
        calls.append((datasets, options))
        place = Path(place_of(datasets[0]))
        words = (next(place.glob("*.txt")) if place.is_dir() else place).read_bytes().split()
        # As ms-swift's own, which divides by the number of rows.
        assert 1 // len(words) <= 1
        return [{"text": one.decode(), "images": [{"bytes": b"\xff\x00", "path": None}]} for one in words], None

    for name, values in (("dataset", {"load_dataset": load_dataset}), ("template", {"MaxLengthError": KeyError})):
        module = ModuleType(f"swift.{name}")
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    vars(sys.modules["swift.utils"]).update(disable_safe_ddp_context_use_barrier=nullcontext)
    return calls


def arguments_of(**changes: Any) -> Any:
    """Arguments of `megatron sft`, with those by which ms-swift loads data."""
    loading = {name: changes.get(name, value) for name, value in LOADING.items()}
    shuffle = {"dataset_shuffle": changes.pop("dataset_shuffle", True)}
    own: dict[str, Any] = {"train_dataloader_shuffle": False, "num_train_epochs": 1, "global_batch_size": 1}
    own |= {"interleave_prob": None, "stopping_strategy": "first_exhausted"}
    return megatron(**own | shuffle | {"get_dataset_kwargs": lambda: dict(loading)} | changes)


def texts(directory: str) -> list[str]:
    return [row["text"] for row in StreamReader(directory, max_wait=0)]


def test_entries_of_each_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("rows", "stream", "empty", "begun", "with#5"):
        Path(name).mkdir()
    for file in ("rows.jsonl", "a:b#1.csv", "rows/.gitattributes", "rows/train.parquet", "begun/.producer.lock"):
        Path(file).touch()
    produce(Path("stream"), 2)
    for name in (
        *("rows.jsonl", "rows.jsonl#100", "a:b#1.csv", "a:b#1.csv#2", "rows", "rows:default#7", "missing.json"),
        *("org/name", "org/name#1000", "org/name:one/two#9", "ms::org/name", "hf::name:subset"),
    ):
        assert is_ordinary(name), name
    for name in (
        *("stream", "stream#5", "empty", "begun", "with#5", "not-yet", "empty/not-yet", "empty/not-yet#5"),
        *("/org/name", "a/b/c", "s3://bucket/name", "s3://bucket/rows.jsonl#5"),
    ):
        assert not is_ordinary(name), name
    assert first_of("stream#5") == ("stream", 5)
    assert [first_of(name)[1] for name in ("with#5", "stream", "stream#0", "stream#x", "stream#")] == [None] * 5
    assert [place_of(name) for name in ("a:b#1.csv#2", "rows:x/y#7", "hf::a/b:c#1")] == ["a:b#1.csv", "rows", "hf::a/b"]
    # What is no path stays as it is.
    args = megatron(dataset=["rows.jsonl#3", "org/name#4", "stream#1"])
    monkeypatch.setattr(arguments, "install_exits", lambda: None)
    arguments.check(args)
    assert args.dataset == [f"{tmp_path}/rows.jsonl#3", "org/name#4", f"{tmp_path}/stream#1"]
    for names in (["missing.jsonl"], ["rows.jsonl", "./rows.jsonl"], ["stream#5", "stream"], ["stream#0"]):
        tells(raised(SettingsRefused, check_combinations, megatron(dataset=names)), names[0], argument="dataset")
    for names in (["rows.jsonl#5", "rows.jsonl#6"], [f"{tmp_path}/with#5"], [f"{tmp_path}/with#5/not there yet"]):
        check_combinations(megatron(dataset=names))


def test_spool_is_written_once_and_is_the_same_stream_everywhere(tmp_path: Path, loads: Calls) -> None:
    file = write(tmp_path / "a b.txt", "one two three")
    args = arguments_of(output_dir=str(tmp_path / "run" / "v0-20270101-000000"))
    first = spooled(args, str(file))
    assert loads == [([str(file)], LOADING | {"shuffle": True, "interleave_prob": None})]
    assert Path(first).parent == tmp_path / "run" / "lazyshard-spools"
    assert Path(first).name.startswith("a-b.txt-")
    assert texts(first) == ["one", "two", "three"]
    assert StreamReader(first).refresh().ended
    assert next(iter(StreamReader(first)))["images"] == [{"bytes": "data:image;base64,/wA=", "path": None}]
    # The next start finds it; how it is loaded, and the time of the file, are of no account.
    file.touch()
    args.output_dir = str(tmp_path / "run" / "v1-20270101-000001")
    assert spooled(args, str(file)) == first
    assert len(loads) == 1
    other = spooled(arguments_of(output_dir=str(tmp_path / "other"), num_proc=8), str(file))
    identity = Manifest.decode((Path(first) / "stream.json").read_bytes()).stream_id
    assert Manifest.decode((Path(other) / "stream.json").read_bytes()).stream_id == identity
    assert first.endswith(identity)


def test_what_determines_the_rows_is_in_the_identity(tmp_path: Path) -> None:
    file, output = write(tmp_path / "a.txt", "one two"), str(tmp_path / "run")
    found = [spooled(arguments_of(output_dir=output), str(file))]
    for changes in ({"columns": {"a": "text"}}, {"dataset_shuffle": False}, {"sharded_lazy_samples_per_chunk": 1}):
        found.append(spooled(arguments_of(output_dir=output, **changes), str(file)))
    found.append(spooled(arguments_of(output_dir=output), f"{file}#1"))
    file.write_text("one six")
    found.append(spooled(arguments_of(output_dir=output), str(file)))
    assert len({name[-16:] for name in found}) == len(found) == 6
    assert len({name[-32:-16] for name in found}) == 1


def test_directory_is_known_by_its_visible_files(tmp_path: Path) -> None:
    args, folder = arguments_of(output_dir=str(tmp_path / "run")), tmp_path / "folder"
    write(folder / "one.txt", "one")
    first = spooled(args, str(folder))
    # A hub's client, and ms-swift, add such files.
    for name in (".cache", "dataset_infos.json_bak"):
        (folder / name).write_text("")
    assert spooled(args, str(folder)) == first
    (folder / "one.txt").rename(folder / "two.txt")
    assert spooled(args, str(folder)) != first


def test_data_that_cannot_be_loaded_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    args = arguments_of(output_dir=str(tmp_path / "run"))
    for entry in (str(tmp_path / "empty.txt"), "org/name#5"):
        tells(raised(SettingsRefused, spooled, args, entry), entry, argument="dataset")
    assert not (tmp_path / "run").exists()


def test_resume_with_other_rows_is_refused_and_with_the_same_ones_continues(tmp_path: Path) -> None:
    file, stream = write(tmp_path / "a.txt", " ".join(map(str, range(8)))), produce(tmp_path / "s", 12)
    more: dict[str, Any] = {"output_dir": str(tmp_path / "run"), "finetune": False}
    for names, weights in (([str(file)], None), ([str(stream), str(file)], [0.5, 0.5])):
        given = more | {"dataset": names, "interleave_prob": weights}
        begun = opened(tmp_path, arguments_of, **given)
        given["mcore_model"] = checkpoint(tmp_path / f"checkpoint-{len(names)}", begun.plan.position(4, 4))
        let_go_of_cursors()
        assert opened(tmp_path, arguments_of, **given).plan.consumed == 4
        let_go_of_cursors()
        content = file.read_text()
        file.write_text(f"{content} 8")
        error = raised(ResumeRefused, opened, tmp_path, arguments_of, **given)
        tells(error, str(file), checkpoint=given["mcore_model"])
        assert error.expected != error.actual
        file.write_text(content)


def test_another_run_that_is_writing_is_waited_for(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "one two three")
    args = arguments_of(output_dir=str(tmp_path / "run"), sharded_lazy_samples_per_chunk=2)
    spool = Path(spooled(args, str(file)))
    # As if that run had been killed after its first chunk.
    for name in ("stream.end", "chunk_00001.jsonl", "chunk_00001.jsonl.completed"):
        (spool / name).unlink()
    before = (spool / "chunk_00000.jsonl").stat().st_ino
    writer = ChunkWriter(spool)
    assert writer.published_samples == 2
    args.sharded_lazy_max_wait = 0.01
    tells(raised(WaitTimeout, spooled, args, str(file)), str(spool))
    args.sharded_lazy_max_wait = 60.0
    found: list[str] = []
    waiting = threading.Thread(target=lambda: found.append(spooled(args, str(file))))
    waiting.start()
    writer.write({"text": "three"})
    writer.close()
    waiting.join(60)
    assert found == [str(spool)]
    assert texts(str(spool)) == ["one", "two", "three"]
    # Without another run, this one continues.
    for name in ("stream.end", "chunk_00001.jsonl", "chunk_00001.jsonl.completed"):
        (spool / name).unlink()
    assert spooled(args, str(file)) == str(spool)
    assert texts(str(spool)) == ["one", "two", "three"]
    assert (spool / "chunk_00000.jsonl").stat().st_ino == before


def test_rows_that_ms_swift_has_prepared_are_encoded_as_they_are(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "one two three")
    stream = opened(tmp_path, arguments_of, dataset=[str(file)], output_dir=str(tmp_path / "run"))
    assert [stream[index]["text"] for index in range(3)] == ["one", "two", "three"]
    assert (len(stream), stream.plan.total) == (3, 3)


def test_first_samples_of_an_ended_and_of_a_live_stream(tmp_path: Path) -> None:
    ended, live = produce(tmp_path / "ended", 20), produce(tmp_path / "live", 4, end=False)
    for directory, limit in ((ended, 7), (live, 3)):
        stream = opened(tmp_path, arguments_of, dataset=[f"{directory}#{limit}"])
        assert (len(stream), stream.plan.total) == (limit, limit)
        data = stream.gate.data
        assert isinstance(data, LazyShardedDataset)
        assert [data.draw(index).sample for index in range(limit)] == list(range(limit))
        assert [data.in_epoch(index) for index in (limit - 1, limit)] == [True, False]
        told = f"{directory}#{limit} has ended with {limit} samples", ""
        assert stream.plan.end(limit, stream.gate.published()) == told
        let_go_of_cursors()
    stream = opened(tmp_path, arguments_of, dataset=[f"{live}#5"], num_train_epochs=None, train_iters=9)
    assert (len(stream), stream.plan.total) == (9, None)
    assert stream.gate.allows(3, 4)
    raised(WaitTimeout, stream.gate.allows, 4, 5)
    produce(live, 8, end=False)
    assert [stream.gate.allows(4, 5), stream.gate.allows(5, 6)] == [True, False]
    assert stream.plan.end(5, stream.gate.published()) == (f"{live}#5 has ended with 5 samples", "")


def test_resume_keeps_the_number_of_first_samples(tmp_path: Path) -> None:
    one, two = (produce(tmp_path / name, 20) for name in ("one", "two"))
    for others, weights in (([], None), ([str(two)], [0.5, 0.5])):
        more: dict[str, Any] = {"interleave_prob": weights, "finetune": False}
        begun = opened(tmp_path, arguments_of, dataset=[f"{one}#7", *others], **more)
        more["mcore_model"] = checkpoint(tmp_path / f"checkpoint-{len(others)}", begun.plan.position(4, 4))
        let_go_of_cursors()
        assert opened(tmp_path, arguments_of, dataset=[f"{one}#7", *others], **more).plan.consumed == 4
        let_go_of_cursors()
        for other in (f"{one}#8", str(one)):
            raised(ResumeRefused, opened, tmp_path, arguments_of, dataset=[other, *others], **more)
            let_go_of_cursors()


def test_first_samples_in_a_blend(tmp_path: Path) -> None:
    names = [f"{produce(tmp_path / 'one', 20)}#4", str(produce(tmp_path / "two", 20))]
    stream = opened(tmp_path, arguments_of, dataset=names, interleave_prob=[0.5, 0.5])
    assert len(stream) == 8
    data = stream.gate.data
    assert isinstance(data, BlendedDataset)
    assert [data.draw(index).draw.sample for index in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    why = f"{names[0]} has ended with 4 samples", f"; not trained: 16 of the 20 of {names[1]}"
    assert stream.plan.end(8, stream.gate.published()) == why
    # By their sizes: 4 and 20.
    let_go_of_cursors()
    assert len(opened(tmp_path, arguments_of, dataset=names)) == 24
