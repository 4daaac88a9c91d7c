"""Encoded streams in training: who is asked for samples, and what is said where settings differ."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lazyshard import ChunkWriter, LazyShardedDataset, StreamReader
from lazyshard.data.rank import Rank
from lazyshard_swift.blend_streams import Streams
from lazyshard_swift.encoded import EncodedRows, encoders
from lazyshard_swift.encoded_values import pack
from lazyshard_swift.errors import SettingsRefused
from lazyshard_swift.exits import code_of
from lazyshard_swift.fingerprint import fingerprint, of_producer
from lazyshard_swift.parallel import Facts


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


def encoded(directory: Path, **options: Any) -> str:
    with ChunkWriter(
        directory, 2, arrays=True, encoding=of_producer(template(), {"text1": "query"}, True), **options
    ) as writer:
        for number in range(4):
            writer.write(pack({"input_ids": [number, 1], "length": 2}))
    return str(directory)


def formed(directory: Path, form: str, row: dict[str, Any]) -> str:
    """Rows that were cut or padded after they were encoded."""
    facts = {**of_producer(template(), {"text1": "query"}, True), "form": form}
    with ChunkWriter(directory, 2, arrays=True, encoding=facts) as writer:
        writer.write(pack(row))
    return str(directory)


def encoded_packs(directory: Path) -> str:
    """Packs of two samples each, of 2 and 3 tokens."""
    facts = of_producer(template(), {"text1": "query"}, True)
    with ChunkWriter(directory, 2, arrays=True, encoding=facts) as writer:
        for number in range(2):
            samples = [pack({"input_ids": [number] * size, "length": size, "lengths": [size]}) for size in (2, 3)]
            writer.write({"pack": samples, "lengths": [2, 3]})
    return str(directory)


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
    blend = streams.open(Rank(0, 1), found, {}, {"layout": "strided"})
    samples = sorted((blend[index]["input_ids"] for index in range(8)), key=str)
    assert samples == sorted([[0, 1], [1, 1], [2, 1], [3, 1], [0], [-1], [-2], [-3]], key=str)


def test_packs_become_the_lists_that_the_collator_takes(tmp_path: Path) -> None:
    directory = encoded_packs(tmp_path / "packs")
    (encoder,) = encoders([directory], template(), of_raw, 5)
    dataset = LazyShardedDataset(directory, encoder, dp_rank=0, dp_size=1)
    assert dataset[1] == [
        {"input_ids": [1, 1], "length": 2, "lengths": [2]},
        {"input_ids": [1, 1, 1], "length": 3, "lengths": [3]},
    ]


@pytest.mark.parametrize(
    ("packs", "most", "text"),
    [
        (True, None, "its rows are packs .*: give --packing true"),
        (True, 4, r"its pack has 5 tokens, more than the 4 of --packing_length: .* \[2, 3\] as encoded here"),
        (False, 4, "its rows are no packs"),
    ],
)
def test_packs_are_taken_where_there_are_to_be_some(packs: bool, most: int | None, text: str, tmp_path: Path) -> None:
    directory = (encoded_packs if packs else encoded)(tmp_path / "stream")
    (encoder,) = encoders([directory], template(), of_raw, most)
    with pytest.raises(ValueError, match=text):
        encoder(next(iter(StreamReader(directory))))


def test_the_first_token_of_a_sequence_is_nobodys_label(tmp_path: Path) -> None:
    """Of documents of 2 and 3 tokens: positions stay, from which the collator takes the borders."""
    row = {"input_ids": [5, 6, 7, 8, 9], "labels": [5, 6, -100, 8, 9], "position_ids": [0, 1, 0, 1, 2], "length": 5}
    directory = formed(tmp_path / "a", "split", row)
    # How long a document might be is nothing for who trains sequences.
    (encoder,) = encoders([directory], template(max_length=5, truncation_strategy="delete"), of_raw)
    expected = row | {"labels": [-100, 6, -100, 8, 9]}
    assert encoder(next(iter(StreamReader(directory)))) == expected


def test_a_sequence_without_labels_has_none(tmp_path: Path) -> None:
    row = {"input_ids": [5, 6], "position_ids": [0, 1], "length": 2}
    directory = formed(tmp_path / "a", "split", row)
    (encoder,) = encoders([directory], template(), of_raw)
    assert encoder(next(iter(StreamReader(directory)))) == row


def test_a_padded_row_is_one_of_all_its_tokens(tmp_path: Path) -> None:
    tokens = {"input_ids": [5, 6, 0, 0], "labels": [-100, 6, -100, -100]}
    row = {**tokens, "attention_mask": [1, 1, 0, 0], "length": 2, "lengths": [2]}
    directory = formed(tmp_path / "a", "pad", row)
    (encoder,) = encoders([directory], template(), of_raw)
    assert encoder(next(iter(StreamReader(directory)))) == {**tokens, "length": 4, "lengths": [4]}
    with pytest.raises(SettingsRefused, match="max_length is 512 there and 4 here"):
        encoders([directory], template(max_length=4), of_raw)


def test_documents_of_a_sequence_are_kept_apart_as_those_of_a_pack_are(tmp_path: Path) -> None:
    row = {"input_ids": [5, 6, 1, 8, 9], "labels": [5, 6, 1, 8, 9], "position_ids": [0, 1, 0, 1, 2], "length": 5}
    own = template(padding_free=True)
    directory = formed(tmp_path / "a", "split", row)
    (encoder,) = encoders([directory], own, of_raw)
    assert encoder(next(iter(StreamReader(directory)))) == [
        {"input_ids": [5, 6], "labels": [-100, 6], "length": 2, "lengths": [2]},
        {"input_ids": [1, 8, 9], "labels": [-100, 8, 9], "length": 3, "lengths": [3]},
    ]
    assert own.packing


def test_sequences_are_blended_with_sequences_alone(tmp_path: Path) -> None:
    row = {"input_ids": [5, 6], "position_ids": [0, 1], "length": 2}
    first, second = (formed(tmp_path / name, "split", row) for name in "ab")
    other = raw(tmp_path / "c")
    with pytest.raises(SettingsRefused, match=r"blended with sequences alone, and .*c holds others") as error:
        encoders([first, other], template(padding_free=True), of_raw)
    assert code_of(error.value) == 2
    assert len(encoders([first, second], template(padding_free=True), of_raw)) == 2
    assert len(encoders([first, other], template(padding_free=False), of_raw)) == 2


def test_a_form_that_is_not_known_is_refused(tmp_path: Path) -> None:
    directory = formed(tmp_path / "a", "woven", {"input_ids": [5, 6], "length": 2})
    with pytest.raises(SettingsRefused, match="form is 'woven' there and not said here"):
        encoders([directory], template(), of_raw)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (template(max_length=1024), "max_length is 512 there and 1024 here (there: the stream, here: this run)"),
        (template("a", "c"), "tokenizer is '"),
        (template(mode="rlhf"), "mode is 'train' there and 'rlhf' here"),
        (template(template_meta=Meta(default_system=None)), "system is 'be brief' there and null here"),
        (template(template_meta=Meta(prefix=("",))), "template_text is '"),
    ],
)
def test_template_that_would_encode_otherwise_is_refused_naming_what_differs(
    other: Any, text: str, tmp_path: Path
) -> None:
    directory = encoded(tmp_path)
    with pytest.raises(SettingsRefused) as error:
        encoders([directory], other, of_raw)
    assert text in str(error.value)
    assert str(error.value).count(" there and ") == 1
    assert code_of(error.value) == 2


def test_rows_that_a_function_has_encoded_are_refused(tmp_path: Path) -> None:
    facts = {"kind": "function", "function": "my_rows:encode"}
    ChunkWriter(tmp_path, 2, arrays=True, encoding=facts).close()
    with pytest.raises(SettingsRefused, match="its rows were encoded by my_rows:encode, not by ms-swift's template"):
        encoders([str(tmp_path)], template(), of_raw)


def test_facts_do_not_change_with_what_does_not_decide() -> None:
    assert fingerprint(template()) == fingerprint(template(padding_free=True, use_megatron=True))
    one, other = template(), template()
    other.tokenizer.chat_template = "another"
    assert fingerprint(one) == fingerprint(other)
    one.template_backend = other.template_backend = "jinja"
    assert fingerprint(one)["tokenizer"] != fingerprint(other)["tokenizer"]
