"""Encoded streams in training: who is asked for samples, and what is said where settings differ."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lazyshard import ChunkWriter, Order, StreamReader
from lazyshard.data.rank import Rank
from lazyshard_swift.encoding import fingerprint, of_producer, pack, unpack
from lazyshard_swift.errors import SettingsRefused
from lazyshard_swift.gate import open_data
from lazyshard_swift.parallel import Facts, Streams
from lazyshard_swift.rows import EncodedRows, encoders
from tests.swift.unit.runs import refused


@dataclass
class Meta:
    template_type: str = "qwen2_5"
    default_system: str | None = "be brief"
    prefix: tuple[str, ...] = ("<s>",)
    template_cls: Any = object


class Tokenizer:
    def __init__(self, *words: str) -> None:
        self.words = words
        self.chat_template = "..."
        self.added_tokens_decoder = {3: "<s>"}

    def get_vocab(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}


def template(*words: str, **changes: Any) -> Any:
    values = {"max_length": 512, "truncation_strategy": "raise", "template_backend": "swift", "mode": "train"}
    tokenizer = Tokenizer(*(words or ("a", "b")))
    own = {"template_meta": Meta(), "tokenizer": tokenizer, "processor": tokenizer}
    return SimpleNamespace(**own | values | changes)


FACTS = {**of_producer(template(), {"text1": "query"}, True)}


def write(directory: Path, rows: list[dict[str, Any]], encoding: dict[str, Any] = FACTS) -> str:
    with ChunkWriter(directory, 2, arrays=True, encoding=encoding) as writer:
        for row in rows:
            writer.write(row)
    return str(directory)


def encoded(directory: Path) -> str:
    return write(directory, [pack({"input_ids": [number, 1], "length": 2}) for number in range(4)])


def formed(directory: Path, form: str, row: dict[str, Any]) -> str:
    """A row that was cut or padded after it was encoded."""
    return write(directory, [pack(row)], {**FACTS, "form": form})


def encoded_packs(directory: Path) -> str:
    """Packs of two samples each, of 2 and 3 tokens."""
    made = [
        [pack({"input_ids": [number] * size, "length": size, "lengths": [size]}) for size in (2, 3)]
        for number in (0, 1)
    ]
    return write(directory, [{"pack": samples, "lengths": [2, 3]} for samples in made])


def first(stream: str) -> Any:
    return next(iter(StreamReader(stream)))


def raw(directory: Path) -> str:
    with ChunkWriter(directory, 2) as writer:
        for number in range(4):
            writer.write({"id": number})
    return str(directory)


def of_raw(row: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": [-row["id"]], "length": 1}


def test_encoder_is_asked_for_samples_of_raw_streams_alone(tmp_path: Path) -> None:
    directories = (encoded(tmp_path / "a"), raw(tmp_path / "b"))
    found = encoders(directories, template(), of_raw)
    assert isinstance(found[0], EncodedRows)
    assert found[1] is of_raw
    facts = tuple(Facts(name, 2, 4, True) for name in "ab")
    streams = Streams(directories, facts, (0.5, 0.5), "all_exhausted")
    blend = open_data(streams, Rank(0, 1), found, Order(layout="strided"), {}, {})
    samples = sorted((blend[index]["input_ids"] for index in range(8)), key=str)
    assert samples == sorted([[0, 1], [1, 1], [2, 1], [3, 1], [0], [-1], [-2], [-3]], key=str)


@pytest.mark.parametrize(("packs", "most"), [(True, None), (True, 4), (False, 4)])
def test_packs_are_taken_where_there_are_to_be_some(packs: bool, most: int | None, tmp_path: Path) -> None:
    directory = (encoded_packs if packs else encoded)(tmp_path / "stream")
    (encoder,) = encoders([directory], template(), of_raw, most)
    with pytest.raises(ValueError, match="pack"):
        encoder(first(directory))
    if packs:
        (encoder,) = encoders([directory], template(), of_raw, 5)
        assert encoder(first(directory)) == [
            {"input_ids": [0, 0], "length": 2, "lengths": [2]},
            {"input_ids": [0, 0, 0], "length": 3, "lengths": [3]},
        ]


SEQUENCE = {"input_ids": [5, 6, 1, 8, 9], "labels": [5, 6, -100, 8, 9], "position_ids": [0, 1, 0, 1, 2], "length": 5}
BARE = {"input_ids": [5, 6], "position_ids": [0, 1], "length": 2}
PADDED = {"input_ids": [5, 6, 0, 0], "labels": [-100, 6, -100, -100], "attention_mask": [1, 1, 0, 0], "length": 2}


@pytest.mark.parametrize(
    ("form", "row", "own", "expected"),
    [
        # The first token of a sequence is nobody's label; positions stay, from which the collator takes the borders.
        # How long a document might be is nothing for who trains sequences.
        ("split", SEQUENCE, {"max_length": 5}, SEQUENCE | {"labels": [-100, 6, -100, 8, 9]}),
        ("split", BARE, {"truncation_strategy": "delete"}, BARE),
        # Documents are kept apart as those of a pack are.
        (
            "split",
            SEQUENCE,
            {"padding_free": True},
            [
                {"input_ids": [5, 6], "labels": [-100, 6], "length": 2, "lengths": [2]},
                {"input_ids": [1, 8, 9], "labels": [-100, 8, 9], "length": 3, "lengths": [3]},
            ],
        ),
        # A padded row is one of all its tokens.
        (
            "pad",
            PADDED | {"lengths": [2]},
            {},
            {"input_ids": [5, 6, 0, 0], "labels": [-100, 6, -100, -100], "length": 4, "lengths": [4]},
        ),
    ],
)
def test_rows_that_were_cut_or_padded(form: str, row: Any, own: dict[str, Any], expected: Any, tmp_path: Path) -> None:
    directory, mine = formed(tmp_path, form, row), template(**own)
    (encoder,) = encoders([directory], mine, of_raw)
    assert encoder(first(directory)) == expected
    assert getattr(mine, "packing", False) is isinstance(expected, list)
    if form == "pad":
        with refused(SettingsRefused, "max_length is 512 there and 4 here"):
            encoders([directory], template(max_length=4), of_raw)


def test_sequences_are_blended_with_sequences_alone(tmp_path: Path) -> None:
    one, two = (formed(tmp_path / name, "split", BARE) for name in "ab")
    other = raw(tmp_path / "c")
    with refused(SettingsRefused, other, argument="padding_free"):
        encoders([one, other], template(padding_free=True), of_raw)
    assert len(encoders([one, two], template(padding_free=True), of_raw)) == 2
    assert len(encoders([one, other], template(padding_free=False), of_raw)) == 2


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (template(max_length=1024), "max_length is 512 there and 1024 here"),
        (template("a", "c"), "tokenizer is '"),
        (template(mode="rlhf"), "mode is 'train' there and 'rlhf' here"),
        (template(template_meta=Meta(default_system=None)), "system is 'be brief' there and null here"),
        (template(template_meta=Meta(prefix=("",))), "template_text is '"),
    ],
)
def test_rows_that_were_encoded_otherwise_are_refused_naming_what_differs(
    other: Any, text: str, tmp_path: Path
) -> None:
    with refused(SettingsRefused, text, argument="dataset") as error:
        encoders([encoded(tmp_path / "a")], other, of_raw)
    assert str(error.value).count(" there and ") == 1
    by_function = write(tmp_path / "function", [], {"kind": "function", "function": "my_rows:encode"})
    woven = formed(tmp_path / "woven", "woven", {"input_ids": [5, 6], "length": 2})
    for directory, word in ((by_function, "my_rows:encode"), (woven, "form is 'woven'")):
        with refused(SettingsRefused, word, argument="dataset"):
            encoders([directory], template(), of_raw)


def test_facts_do_not_change_with_what_does_not_decide() -> None:
    assert fingerprint(template()) == fingerprint(template(padding_free=True, use_megatron=True))
    one, other = template(), template()
    other.tokenizer.chat_template = "another"
    assert fingerprint(one) == fingerprint(other)
    one.template_backend = other.template_backend = "jinja"
    assert fingerprint(one)["tokenizer"] != fingerprint(other)["tokenizer"]


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal and of the same kinds, at any depth."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool(torch.equal(one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or one != one


SAMPLES: dict[str, dict[str, Any]] = {
    "text": {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "length": 3, "lengths": [3]},
    "weights": {"input_ids": [1], "loss_scale": [0.0, 1.0, 0.1], "length": 1},
    "large numbers": {"a": [2**31], "b": [-(2**31) - 1, 0], "c": [2**31 - 1, -(2**31)]},
    "numbers of two kinds": {"a": [1, 2.5], "b": [True, 1], "c": [None, 1], "d": [2**63, 1]},
    "truth values": {"mask": [True, False]},
    "nothing": {"a": [], "b": None, "c": "", "d": {}, "e": ()},
    "lists in lists": {"input_ids": [[1, 2], [3]], "names": ["a", "b"], "negative": [None, [1]]},
    "pictures": {
        "pixel_values": torch.arange(12, dtype=torch.float32).reshape(2, 6),
        "image_grid_thw": torch.tensor([[1, 2, 3]]),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "mask": torch.tensor([True, False]),
        "numbers": np.arange(4, dtype=np.uint8),
        "scalar": torch.tensor(3),
        "none": torch.empty(0, 4),
        "turned": torch.arange(6).reshape(2, 3).T,
    },
    "nested": {"extra": {"a": (1, [2, 3], {"b": torch.ones(1)}), "x": 1.5}, "channel": "c"},
    "more of one row": {"chosen_input_ids": [1, 2], "rejected_input_ids": [1, 3], "margin": 0.5},
}


@pytest.mark.parametrize("name", SAMPLES)
def test_sample_comes_back_through_a_stream_as_it_was(name: str, tmp_path: Path) -> None:
    with ChunkWriter(tmp_path, 1, arrays=True) as writer:
        writer.write(pack(SAMPLES[name]))
    found = unpack(StreamReader(tmp_path).read(0))
    assert same(found, SAMPLES[name]), found


def test_tensors_share_the_memory_of_the_row() -> None:
    packed = pack({"a": torch.ones(4)})
    assert unpack(packed)["a"].data_ptr() == packed["a"]["$tensor"].ctypes.data
    assert packed["a"]["$tensor"].dtype == np.float32


@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda name: not name.startswith("$")),
        st.lists(st.integers(-(2**40), 2**40)) | st.lists(st.floats(allow_nan=False, allow_infinity=True)),
    )
)
def test_lists_of_numbers_come_back_exactly(sample: dict[str, Any]) -> None:
    packed = pack(sample)
    assert same(unpack(packed), sample) or any(name.endswith(("length", "lengths")) for name in sample)


@pytest.mark.parametrize(
    ("sample", "text"),
    [
        ({"a": object()}, "the template returned a builtins.object at a, which no row can hold"),
        ({"a": {"b": {1, 2}}}, "a builtins.set at a.b"),
        ({"$tensor": 1}, "the key '\\$tensor' at the top, which no row can have"),
        ({"a": {3: 1}}, "the key 3 at a"),
    ],
)
def test_what_no_row_can_hold_is_named(sample: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        pack(sample)
