"""What a data set is told of the cache of encoded samples, and what makes another one of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lazyshard import EncodeCache, LazyShardedDataset, Order
from lazyshard.data.rank import Rank
from lazyshard.data.shared import Stats
from lazyshard_swift import ms_swift
from lazyshard_swift.encoding import _variables, cache_facts, encode_cache, tell_cache
from lazyshard_swift.errors import SettingsRefused
from lazyshard_swift.gate import members, open_data
from lazyshard_swift.parallel import Facts, Streams
from lazyshard_swift.rows import EncodedRows
from tests.swift.unit.runs import hugging_face, refused
from tests.swift.unit.test_encoded import encoded, of_raw, raw, template


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


@pytest.mark.parametrize(
    ("args", "settings"),
    [
        ({"columns": {"text": "query"}}, {}),
        ({"disable_auto_column_mapping": True}, {}),
        ({"remove_unused_columns": False}, {}),
        ({"packing": True}, {}),
        ({"external_plugins": [__file__]}, {}),
        ({"external_plugins": ["missing.py"]}, {}),
        *(({}, changes) for changes in ({"max_length": 513}, {"padding_free": True}, {"num_frames": 8})),
        *(({}, changes) for changes in ({"sizes": [1, 2]}, {"packing": True})),
    ],
)
def test_each_thing_that_decides_about_samples_makes_other_facts(
    args: dict[str, Any], settings: dict[str, Any]
) -> None:
    made = cache_facts(arguments(), template())
    # What a template remembers of its work is no setting.
    assert made == cache_facts(arguments(), template(_cache={"a": 1}, model=object(), _seen=3))
    assert cache_facts(arguments(**args), template(**settings)) != made


def test_variables_and_plugins_that_templates_read_make_other_facts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "template" / "templates").mkdir(parents=True)
    text = "a = get_env_args('hd_num', int, 3)\nb = os.environ.get(\n    'CFG_SCALE', 3.0)\nc = os.getenv(\"Mixed\")\n"
    (tmp_path / "template" / "templates" / "one.py").write_text(text)
    monkeypatch.setattr(ms_swift, "folder", lambda: tmp_path)
    plugin = tmp_path / "plugin.py"
    plugin.write_text("a = 1")

    def facts() -> Any:
        return cache_facts(arguments(external_plugins=[str(plugin)]), template())

    _variables.cache_clear()
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
        _variables.cache_clear()


def test_what_cannot_be_cached_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = arguments(dataset=["/one", "/two"], sharded_lazy_encode_cache="/two/cache")
    with refused(SettingsRefused, "/two", argument="sharded_lazy_encode_cache"):
        encode_cache(inside, template())
    with refused(SettingsRefused, argument="sharded_lazy_encode_cache"):
        encode_cache(arguments(), template(use_model=True))
    for version in (None, "unknown"):
        monkeypatch.setattr(ms_swift, "version", lambda version=version: version)
        with refused(SettingsRefused, argument="sharded_lazy_encode_cache"):
            encode_cache(arguments(), template())


def test_of_a_blend_raw_streams_have_one(tmp_path: Path) -> None:
    directories = (encoded(tmp_path / "a"), raw(tmp_path / "b"))
    parts = tuple(Facts(name, 2, 4, True) for name in "ab")
    streams = Streams(directories, parts, (0.5, 0.5), "all_exhausted")
    own = {"cache": EncodeCache(tmp_path / "cache", fingerprint={"v": 1})}
    for expected in ((4, 0), (0, 4)):
        blend = open_data(streams, Rank(0, 1), (EncodedRows(), of_raw), Order(layout="strided"), own, {})
        assert len([blend[index] for index in range(8)]) == 8
        assert [one.stats()[5:7] for one in members(blend)] == [(0, 0), expected]


def test_what_was_found_is_told(notices: list[str]) -> None:
    tell_cache("/c", [Stats(0, 0, 0.0, encoded=3, from_cache=4), Stats(0, 0, 0.0, encoded=1, not_cached=2)])
    (told,) = notices
    assert "this rank encoded 4 rows and found 4 encoded; 2 of what it encoded" in told
