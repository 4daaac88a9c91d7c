"""Validation data of streams, by `--split_dataset_ratio` or `--val_dataset STREAM`, up to ms-swift's pipeline."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lazyshard.format.state import BlendState
from lazyshard.stream import list_consumers, read_cursor
from lazyshard.stream.listing import retire
from lazyshard_swift import commands, rows
from lazyshard_swift.checkpoints import Checkpoints
from lazyshard_swift.errors import ResumeRefused, SettingsRefused
from lazyshard_swift.rows import pack
from lazyshard_swift.stream import TrainStream
from tests.plan.oracle import split_owners
from tests.stream.streams import produce, publish_rows, raised
from tests.swift.unit.runs import checkpoint, hugging_face, megatron, opened, tells
from tests.swift.unit.test_encoded import template, write

RATIO = {"split_dataset_ratio": 0.3}


@pytest.fixture(autouse=True)
def rows_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encodes without ms-swift's preprocessing."""
    monkeypatch.setattr(rows, "encoder_of", lambda args, template, most: template.encode)


def of(split: int, total: int) -> list[int]:
    return [sample for sample, owner in enumerate(split_owners((7, 3), total)) if owner == split]


def validated(stream: TrainStream) -> list[int]:
    assert stream.validation is not None
    return [row["id"] for row in DataLoader(stream.validation, batch_size=None)]


def refuse(directory: Path, argument: str, *words: str, **changes: Any) -> None:
    tells(raised(SettingsRefused, opened, directory, **changes), *words, argument=argument)
    # Before the run has registered.
    assert list_consumers(directory, 99) == ()


@pytest.mark.parametrize("make", [megatron, hugging_face])
@pytest.mark.parametrize("window", [0, 2])
def test_ratio_splits_an_ended_stream(tmp_path: Path, make: Any, window: int) -> None:
    steps = {"max_steps": 7, "sharded_lazy_shuffle_window": window}
    stream = opened(produce(tmp_path / "s", 44, 4), make, **RATIO, **steps)
    assert sorted(stream[index]["id"] for index in range(len(of(0, 44)))) == of(0, 44)
    assert validated(stream) == of(1, 44) == validated(stream)
    assert "7 of every 10 samples" in repr(stream)
    assert repr(stream.validation) == f"{len(of(1, 44))} samples of {tmp_path / 's'}"
    assert pickle.loads(pickle.dumps(stream)).validation is None
    assert validated(SimpleNamespace(validation=pickle.loads(pickle.dumps(stream.validation)))) == of(1, 44)  # type: ignore[arg-type]


def test_live_stream_is_validated_on_what_was_published_at_the_start(tmp_path: Path, notices: list[str]) -> None:
    directory = produce(tmp_path / "s", 20, 2, end=False)
    stream = opened(directory, **RATIO, train_iters=30)
    produce(directory, 60, 2, end=False)
    assert validated(stream) == of(1, 20)
    assert [stream[index]["id"] for index in range(30)] != []
    notices.clear()
    stream.log_progress(14, at_once=True)
    assert f"trained 14 of {len(of(0, 60))} published samples" in notices[0]
    assert stream.plan.end(14, stream.gate.published())[1].endswith(f"; not trained: 28 of the 42 of {directory}")


def test_each_stream_of_a_blend_is_split(tmp_path: Path) -> None:
    names = [str(produce(tmp_path / f"s{size}", size, 2)) for size in (20, 40)]
    stream = opened(tmp_path, **RATIO, dataset=names, interleave_prob=[0.5, 0.5], stopping_strategy="first_exhausted")
    assert validated(stream) == of(1, 20) + of(1, 40)
    assert {stream[index]["id"] for index in range(2 * len(of(0, 20)))} <= set(of(0, 40))
    state = stream.plan.position(8, 8).blend
    assert isinstance(state, BlendState) and [one.split for one in state.members] == [((7, 3), 0)] * 2


def test_run_with_a_ratio_keeps_every_chunk_and_resumes_with_the_same_ratio(tmp_path: Path) -> None:
    directory, output = produce(tmp_path / "s", 40, 2), tmp_path / "output"
    given: dict[str, Any] = {"train_iters": 40, "sharded_lazy_consumer": "sft", "output_dir": str(output)}
    for ratio, done in ((RATIO, 0), ({}, 9)):
        stream = opened(directory, **given, **ratio, sharded_lazy_shuffle_window=0)
        kept = Checkpoints(stream.plan, str(output))
        kept.begin(20, 20)
        checkpoint(output / "checkpoint-20")
        kept.commit()
        cursor = read_cursor(directory, "sft")
        assert cursor is not None and (cursor.consumed, cursor.chunks_before >= done) == (20, True)
        assert (cursor.chunks_before == 0) is bool(ratio)
        given |= {"finetune": False, "mcore_model": str(output / "checkpoint-20")}
        for other in (RATIO, {}, {"split_dataset_ratio": 0.25}):
            if other == ratio:
                assert opened(directory, **given, **other, sharded_lazy_shuffle_window=0).plan.consumed == 20
                continue
            error = raised(ResumeRefused, opened, directory, **given, **other, sharded_lazy_shuffle_window=0)
            tells(error, "keep --split_dataset_ratio as it was", expected="train of 7:3" if ratio else "None")
        del given["finetune"], given["mcore_model"]


def test_refused_before_training(tmp_path: Path) -> None:
    few = produce(tmp_path / "few", 1, 2, end=False)
    refuse(few, "split_dataset_ratio", "has 0 samples, at least 4 are needed", **RATIO)
    live, empty = produce(tmp_path / "live", 8, 2, end=False), produce(tmp_path / "empty", 0, 2)
    directory = produce(tmp_path / "s", 8, 2)
    refuse(directory, "val_dataset", f"{live} is still being produced", val_dataset=[str(live)])
    refuse(directory, "val_dataset", f"{empty} has 0 samples", val_dataset=[str(empty)])
    retire(live, 1, 3)
    refuse(directory, "val_dataset", "has deleted all chunks below 1", val_dataset=[str(produce(live, 10, 2))])


def test_streams_as_val_dataset(tmp_path: Path) -> None:
    names = [str(produce(tmp_path / name, size, 3)) for name, size in (("one", 5), ("two", 4))]
    rows = publish_rows(tmp_path / "s", 2, ({"id": 100 + number} for number in range(8)))
    stream = opened(rows, val_dataset=names, sharded_lazy_samples_per_chunk=2)
    assert validated(stream) == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert sorted(stream[index]["id"] for index in range(8)) == list(range(100, 108))


def test_encoded_stream_as_val_dataset(tmp_path: Path) -> None:
    encoded = write(tmp_path / "encoded", [pack({"input_ids": [number], "length": 1}) for number in range(3)])
    made = template()
    made.encode = lambda row, **_: row
    stream = opened(produce(tmp_path / "s", 8, 2), template=made, val_dataset=[encoded])
    assert stream.validation is not None
    assert [stream.validation[index] for index in range(3)] == [{"input_ids": [n], "length": 1} for n in range(3)]
    assert stream[0]["id"] in range(8)
    made.max_length = 7
    other = produce(tmp_path / "other", 8, 2)
    refuse(other, "dataset", str(encoded), "max_length", template=made, val_dataset=[encoded])


def test_pipeline_passes_it_on_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "_check_hooks", lambda trainer: None)
    args = megatron(dataset=[str(produce(tmp_path / "s", 20, 2))], train_iters=7, global_batch_size=1, **RATIO)
    args.lazy_tokenize, shown = False, list[Any]()
    plain = SimpleNamespace(encode=lambda row, **_: row, print_inputs=shown.append, packing=False)
    sft = SimpleNamespace(args=args, template=plain, train_msg={})
    # As `SwiftSft._prepare_dataset`; ms-swift's own methods, None here, are not called.
    datasets = commands._get_dataset(None, sft)
    encoded = commands._encode_dataset(None, sft, *datasets, pre_process=True)
    processed = commands._post_process_datasets(None, sft, encoded)
    assert [one is two for one, two in zip(datasets, processed, strict=True)] == [True, True]
    commands._show_dataset(None, sft, *processed)
    assert sft.train_msg["val_dataset"] == repr(datasets[1]) and len(shown) == 1
