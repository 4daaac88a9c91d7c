"""Rows in training, raw and encoded, and the cache of encoded samples: who is asked, what is refused."""

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lazyshard import EncodeCache, LazyShardedDataset, Order, StreamReader
from lazyshard.data.rank import Rank, Stats
from lazyshard_swift import ms_swift, opening
from lazyshard_swift.errors import SettingsRefused
from lazyshard_swift.opening import cache_facts, encode_cache
from lazyshard_swift.rows import EncodedRows, encoders, fingerprint, of_producer, pack, unpack
from lazyshard_swift.run_plan import Stream
from lazyshard_swift.stream import TrainStream, open_data
from tests.stream.streams import produce, publish_rows, raised, refusal_of
from tests.swift.unit.runs import hugging_face, tells
from tests.swift.warm import run_warm


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
    return str(publish_rows(directory, 2, rows, arrays=True, encoding=encoding))


def encoded(directory: Path) -> str:
    return write(directory, [pack({"input_ids": [number, 1], "length": 2}) for number in range(4)])


def formed(directory: Path, form: str, row: dict[str, Any]) -> str:
    """A row that was cut or padded after it was encoded."""
    return write(directory, [pack(row)], {**FACTS, "form": form})


def first(stream: str) -> Any:
    return next(iter(StreamReader(stream)))


def raw(directory: Path) -> str:
    return str(produce(directory, 4))


def of_raw(row: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": [-row["id"]], "length": 1}


def test_encoder_is_asked_for_samples_of_raw_streams_alone(tmp_path: Path) -> None:
    directories = (encoded(tmp_path / "a"), raw(tmp_path / "b"))
    found = encoders(directories, template(), of_raw)
    assert isinstance(found[0], EncodedRows)
    assert found[1] is of_raw
    streams = [Stream(directory, directory, 2, 4, True, weight=0.5) for directory in directories]
    blend = open_data(streams, Rank(0, 1), found, Order(layout="strided"), {}, stopping="all_exhausted")
    samples = sorted((blend[index]["input_ids"] for index in range(8)), key=str)
    assert samples == sorted([[0, 1], [1, 1], [2, 1], [3, 1], [0], [-1], [-2], [-3]], key=str)


def test_packs_are_taken_where_there_are_to_be_some(tmp_path: Path) -> None:
    samples = [pack({"input_ids": [7] * size, "length": size, "lengths": [size]}) for size in (2, 3)]
    packs, alone = write(tmp_path / "packs", [{"pack": samples, "lengths": [2, 3]}]), encoded(tmp_path / "alone")
    for stream, most in ((packs, None), (packs, 4), (alone, 4)):
        (encoder,) = encoders([stream], template(), of_raw, most)
        refusal_of(ValueError, "pack", encoder, first(stream))
    (encoder,) = encoders([packs], template(), of_raw, 5)
    assert encoder(first(packs)) == [
        {"input_ids": [7, 7], "length": 2, "lengths": [2]},
        {"input_ids": [7, 7, 7], "length": 3, "lengths": [3]},
    ]


SEQUENCE = {"input_ids": [5, 6, 1, 8, 9], "labels": [5, 6, -100, 8, 9], "position_ids": [0, 1, 0, 1, 2], "length": 5}
BARE = {"input_ids": [5, 6], "position_ids": [0, 1], "length": 2}
PADDED = {"input_ids": [5, 6, 0, 0], "labels": [-100, 6, -100, -100]}
MASK = {"attention_mask": [1, 1, 0, 0], "length": 2, "lengths": [2]}
DOCUMENTS = [
    {"input_ids": [5, 6], "labels": [-100, 6], "length": 2, "lengths": [2]},
    {"input_ids": [1, 8, 9], "labels": [-100, 8, 9], "length": 3, "lengths": [3]},
]
# Form, row, settings of the template, and the sample.
FORMED: list[tuple[str, Any, dict[str, Any], Any]] = [
    # The first token of a sequence is nobody's label; positions stay, from which the collator takes the borders.
    # How long a document might be is nothing for who trains sequences.
    ("split", SEQUENCE, {"max_length": 5}, SEQUENCE | {"labels": [-100, 6, -100, 8, 9]}),
    ("split", BARE, {"truncation_strategy": "delete"}, BARE),
    # Documents are kept apart as those of a pack are.
    ("split", SEQUENCE, {"padding_free": True}, DOCUMENTS),
    # A padded row is one of all its tokens.
    ("pad", PADDED | MASK, {}, PADDED | {"length": 4, "lengths": [4]}),
]


def test_rows_that_were_cut_or_padded(tmp_path: Path) -> None:
    for number, (form, row, own, expected) in enumerate(FORMED):
        directory, mine = formed(tmp_path / str(number), form, row), template(**own)
        (encoder,) = encoders([directory], mine, of_raw)
        assert encoder(first(directory)) == expected
        assert getattr(mine, "packing", False) is isinstance(expected, list)
    error = raised(SettingsRefused, encoders, [directory], template(max_length=4), of_raw)
    tells(error, "max_length is 512 there and 4 here")


def test_sequences_are_blended_with_sequences_alone(tmp_path: Path) -> None:
    one, two = (formed(tmp_path / name, "split", BARE) for name in "ab")
    other = raw(tmp_path / "c")
    error = raised(SettingsRefused, encoders, [one, other], template(padding_free=True), of_raw)
    tells(error, other, argument="padding_free")
    assert len(encoders([one, two], template(padding_free=True), of_raw)) == 2
    assert len(encoders([one, other], template(padding_free=False), of_raw)) == 2


def test_rows_that_were_encoded_otherwise_are_refused_naming_what_differs(tmp_path: Path) -> None:
    stream = encoded(tmp_path / "a")
    for other, text in (
        (template(max_length=1024), "max_length is 512 there and 1024 here"),
        (template("a", "c"), "tokenizer is '"),
        (template(mode="rlhf"), "mode is 'train' there and 'rlhf' here"),
        (template(template_meta=Meta(default_system=None)), "system is 'be brief' there and null here"),
        (template(template_meta=Meta(prefix=("",))), "template_text is '"),
    ):
        error = raised(SettingsRefused, encoders, [stream], other, of_raw)
        tells(error, text, argument="dataset")
        assert str(error).count(" there and ") == 1
    by_function = write(tmp_path / "function", [], {"kind": "function", "function": "my_rows:encode"})
    woven = formed(tmp_path / "woven", "woven", {"input_ids": [5, 6], "length": 2})
    for directory, word in ((by_function, "my_rows:encode"), (woven, "form is 'woven'")):
        tells(raised(SettingsRefused, encoders, [directory], template(), of_raw), word, argument="dataset")


def test_facts_do_not_change_with_what_does_not_decide() -> None:
    assert fingerprint(template()) == fingerprint(template(padding_free=True, use_megatron=True))
    one, other = template(), template()
    other.tokenizer.chat_template = "another"
    assert fingerprint(one) == fingerprint(other)
    one.template_backend = other.template_backend = "jinja"
    assert fingerprint(one)["tokenizer"] != fingerprint(other)["tokenizer"]


def test_tensors_share_the_memory_of_the_row() -> None:
    packed = pack({"a": torch.ones(4)})
    assert unpack(packed)["a"].data_ptr() == packed["a"]["$tensor"].ctypes.data
    assert packed["a"]["$tensor"].dtype == np.float32


def test_what_is_of_a_subclass_or_another_kind_is_kept_as_what_it_is() -> None:
    for value, plain in (
        (OrderedDict(b=OrderedDict(c=1)), {"b": {"c": 1}}),
        ([OrderedDict(c=1)], [{"c": 1}]),
        (np.str_("text"), "text"),
    ):
        assert unpack(pack({"a": value})) == {"a": plain}
    found = unpack(pack({"a": torch.ones(2, requires_grad=True), "b": np.ones(2, ">f4")}))
    assert found["a"].tolist() == found["b"].tolist() == [1, 1]
    assert not found["a"].requires_grad


def test_what_no_row_can_hold_is_named() -> None:
    bad: list[tuple[Any, str]] = [
        ({"a": object()}, "the template returned a builtins.object at 'a', which no row can hold"),
        ({"a": {"b": {1, 2}}}, "a builtins.set at 'a'"),
        ({"$tensor": 1}, "the key '\\$tensor' at"),
        ({"a": {3: 1}}, "the key 3 at 'a'"),
        ({3: [1]}, "a key that is not a str at 3"),
    ]
    for sample, text in bad:
        refusal_of(TypeError, text, pack, sample)


def arguments(**changes: Any) -> Any:
    return hugging_face(**{"sharded_lazy_encode_cache": "/dev/shm/cache", **changes})


def test_data_set_is_told_where_how_much_and_what_encodes(tmp_path: Path) -> None:
    assert encode_cache(arguments(sharded_lazy_encode_cache=None), template()) == EncodeCache()
    assert encode_cache(arguments(), template()).size is None
    args = arguments(sharded_lazy_encode_cache_size="20GB")
    assert encode_cache(args, template()) == EncodeCache("/dev/shm/cache", "20GB", cache_facts(args, template()))
    given = encode_cache(arguments(sharded_lazy_encode_cache=str(tmp_path / "cache")), template())
    dataset = LazyShardedDataset(raw(tmp_path / "s"), of_raw, dp_rank=0, dp_size=1, cache=given)
    assert dataset[3] == {"input_ids": [-3], "length": 1}
    assert dataset.stats().not_cached == 0


def test_each_thing_that_decides_about_samples_makes_other_facts() -> None:
    made = cache_facts(arguments(), template())
    # What a template remembers of its work is no setting.
    assert made == cache_facts(arguments(), template(_cache={"a": 1}, model=object(), _seen=3))
    others: list[dict[str, Any]] = [
        *({"columns": {"text": "query"}}, {"disable_auto_column_mapping": True}, {"remove_unused_columns": False}),
        *({"packing": True}, {"external_plugins": [__file__]}, {"external_plugins": ["missing.py"]}),
    ]
    assert made not in [cache_facts(arguments(**changes), template()) for changes in others]
    settings: list[dict[str, Any]] = [{"max_length": 513}, {"padding_free": True}, {"num_frames": 8}]
    settings += [{"sizes": [1, 2]}, {"packing": True}]
    assert made not in [cache_facts(arguments(), template(**changes)) for changes in settings]


def test_variables_and_plugins_make_other_facts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "template" / "templates").mkdir(parents=True)
    text = "a = get_env_args('hd_num', int, 3)\nb = os.environ.get(\n    'CFG_SCALE', 3.0)\nc = os.getenv(\"Mixed\")\n"
    (tmp_path / "template" / "templates" / "one.py").write_text(text)
    monkeypatch.setattr(ms_swift, "folder", lambda: tmp_path)
    plugin = tmp_path / "plugin.py"
    plugin.write_text("a = 1")

    def facts() -> Any:
        return cache_facts(arguments(external_plugins=[str(plugin)]), template())

    opening._variables.cache_clear()
    try:
        for name in ("HD_NUM", "CFG_SCALE", "Mixed", "MAX_PIXELS"):
            before = facts()
            monkeypatch.setenv(name, "7")
            assert facts() != before, name
        before = facts()
        monkeypatch.setenv("SOMETHING_ELSE", "7")
        assert facts() == before
        plugin.write_text("a = 2")
        assert facts() != before
    finally:
        opening._variables.cache_clear()


def test_what_cannot_be_cached_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = arguments(dataset=["/one", "/two"], sharded_lazy_encode_cache="/two/cache")
    tells(raised(SettingsRefused, encode_cache, inside, template()), "/two", argument="sharded_lazy_encode_cache")
    error = raised(SettingsRefused, encode_cache, arguments(), template(use_model=True))
    tells(error, argument="sharded_lazy_encode_cache")
    for version in (None, "unknown"):
        monkeypatch.setattr(ms_swift, "version", lambda version=version: version)
        tells(raised(SettingsRefused, encode_cache, arguments(), template()), argument="sharded_lazy_encode_cache")


def test_what_was_found_is_told(notices: list[str]) -> None:
    data = SimpleNamespace(stats=lambda: Stats(0, 0, 0.0, encoded=4, from_cache=4, not_cached=2))
    stream: Any = SimpleNamespace(_cache="/c", _dataset=SimpleNamespace(datasets=(data,)))
    TrainStream.log_cache(stream)
    (told,) = notices
    assert "this rank encoded 4 rows and found 4 in the cache; 2 of the encoded ones" in told


def test_rows_are_what_load_dataset_of_ms_swift_makes_of_them(tmp_path: Path) -> None:
    run_warm(tmp_path, Path(__file__).with_name("rows_program.py"))
