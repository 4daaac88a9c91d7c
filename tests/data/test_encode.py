"""How the encoder is called, and what becomes of what it returns."""

from __future__ import annotations

import functools
from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lazyshard import LazyShardedDataset
from lazyshard.data.steps import Encoder
from tests.stream.streams import produce


def plain(row: dict[str, Any]) -> dict[str, Any]:
    return {"options": {}}


def named(row: dict[str, Any], return_length: bool = False) -> dict[str, Any]:
    return {"options": {"return_length": return_length}}


def keyword_only(row: dict[str, Any], *, return_length: bool) -> dict[str, Any]:
    return {"options": {"return_length": return_length}}


def anything(row: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"options": options}


def positional_only(row: dict[str, Any], return_length: bool = False, /) -> dict[str, Any]:
    return {"options": {"return_length": return_length}}


def other_options(row: dict[str, Any], length: int = 5) -> dict[str, Any]:
    return {"options": {"length": length}}


class Template:
    """As in ms-swift: `template.encode`."""

    def encode(self, row: dict[str, Any], return_template_inputs: bool = False, return_length: bool = False) -> Any:
        return {"options": {"return_length": return_length}}

    def __call__(self, row: dict[str, Any], return_length: bool = False) -> Any:
        return {"options": {"return_length": return_length}}


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (plain, {}),
        (named, {"return_length": True}),
        (keyword_only, {"return_length": True}),
        (anything, {"return_length": True}),
        (positional_only, {"return_length": False}),
        (other_options, {"length": 5}),
        (Template().encode, {"return_length": True}),
        (Template(), {"return_length": True}),
        (functools.partial(named, return_length=False), {"return_length": True}),
        (lambda row: {"options": {}}, {}),
    ],
)
def test_length_is_asked_for_where_it_can_be(function: Any, options: dict[str, Any]) -> None:
    assert Encoder(function)({})["options"] == options


def test_function_without_a_signature_is_called_with_the_row_alone() -> None:
    assert Encoder(dict)({"a": 1}) == {"a": 1}
    assert Encoder(str)({"a": 1}) == "{'a': 1}"


@pytest.mark.parametrize(
    ("sample", "length"),
    [
        ({"input_ids": [1, 2, 3]}, 3),
        ({"input_ids": (1, 2)}, 2),
        ({"input_ids": np.arange(4)}, 4),
        ({"input_ids": torch.arange(5)}, 5),
        ({"input_ids": [1, 2, 3], "length": 9}, 9),
        ({"input_ids": []}, 0),
    ],
)
def test_length_is_that_of_the_tokens_unless_the_encoder_gives_one(sample: dict[str, Any], length: int) -> None:
    assert Encoder(lambda row: sample)({})["length"] == length


@pytest.mark.parametrize(
    "sample",
    [{"input_ids": [1], "lengths": [1]}, {"labels": [1]}, {"input_ids": 5}, [1, 2], UserDict({"input_ids": [1]})],
    ids=["lengths", "no tokens", "a number", "a list", "another mapping"],
)
def test_other_samples_are_left_as_they_are(sample: Any) -> None:
    before = repr(sample)
    assert Encoder(lambda row: sample)({}) is sample
    assert repr(sample) == before


def test_encoder_that_returns_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="the encoder returned None"):
        Encoder(lambda row: None)({})


def test_encoder_may_change_its_row(tmp_path: Path) -> None:
    def encode(row: dict[str, Any]) -> dict[str, Any]:
        assert row == {"id": row["id"]}
        number = row.pop("id")
        if number == 2:
            raise ValueError("bad")
        row["seen"] = number
        return row

    dataset = LazyShardedDataset(produce(tmp_path / "s", 4, 4), encode, dp_rank=0, dp_size=1)
    for _ in range(3):
        assert [dataset[i] for i in range(4)] == [{"seen": 0}, {"seen": 1}, {"seen": 0}, {"seen": 3}]
        assert dataset.__getitems__([1, 1, 2]) == [{"seen": 1}, {"seen": 1}, {"seen": 0}]
    assert dataset.stats().bad_samples == 1
