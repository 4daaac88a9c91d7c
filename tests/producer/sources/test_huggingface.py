import json
from pathlib import Path
from typing import Any

import pytest

from lazyshard_producer.errors import SourceRefused
from lazyshard_producer.sources.arrow import find_data_files, is_hugging_face
from tests.producer.sources.table_sources import open_table_source, read_rows, values

pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'lazyshard[arrow]'")


def save_state(directory: Path, state: Any, name: str = "state.json") -> None:
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(json.dumps(state))


@pytest.fixture
def datasets() -> Any:
    return pytest.importorskip("datasets", reason="needs datasets: pip install datasets")


def test_a_saved_data_set(tmp_path: Path, datasets: Any) -> None:
    rows = [{"id": number, "messages": [{"role": "user", "content": f"{number}"}]} for number in range(10)]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "d", num_shards=3)
    assert is_hugging_face(str(tmp_path / "d"))
    source = open_table_source("huggingface", tmp_path / "d")
    found = read_rows(source)
    assert [row.value for row in found] == rows
    assert found[4].place == (str(tmp_path / "d" / "data-00001-of-00003.arrow"), 1, None)
    position = source.entry(found[5].position)
    source.close()
    assert (position["kind"], position["files"], position["row"]) == ("huggingface", 1, 2)
    assert values(open_table_source("huggingface", tmp_path / "d", position)) == rows[6:]


def test_rows_that_were_selected_are_saved_in_their_order(tmp_path: Path, datasets: Any) -> None:
    dataset = datasets.Dataset.from_dict({"id": list(range(10))}).select([7, 3, 5])
    dataset.save_to_disk(tmp_path / "d")
    assert values(open_table_source("huggingface", tmp_path / "d")) == [{"id": 7}, {"id": 3}, {"id": 5}]


def test_images_labels_and_arrays(tmp_path: Path, datasets: Any) -> None:
    features = datasets.Features(
        {
            "image": datasets.Image(decode=False),
            "label": datasets.ClassLabel(names=["cat", "dog"]),
            "array": datasets.Array2D((1, 2), "int8"),
        }
    )
    rows = {"image": [{"bytes": b"\x89PNG", "path": None}], "label": ["dog"], "array": [[[1, 2]]]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "d")
    expected = {"image": {"bytes": "iVBORw==", "path": None}, "label": 1, "array": [[1, 2]]}
    assert values(open_table_source("huggingface", tmp_path / "d")) == [expected]


def test_a_dictionary_of_data_sets_names_its_splits(tmp_path: Path, datasets: Any) -> None:
    dataset = datasets.Dataset.from_dict({"id": [1]})
    datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(tmp_path / "d")
    assert is_hugging_face(str(tmp_path / "d"))
    with pytest.raises(SourceRefused, match=r"found a DatasetDict; give one of its splits: .*/d/train, .*/d/test$"):
        open_table_source("huggingface", tmp_path / "d")
    assert values(open_table_source("huggingface", tmp_path / "d" / "train")) == [{"id": 1}]


@pytest.mark.parametrize(
    ("state", "match"),
    [
        ({"_data_files": [{"filename": "a.arrow"}], "_indices_files": [{"filename": "i"}]}, "flatten_indices"),
        ({"_data_files": []}, r"state\.json: expected the names of its data files, found \[\]"),
        ({}, "found None"),
        ({"_data_files": [{"filename": "../a.arrow"}]}, r"found .*\.\./a\.arrow"),
        ({"_data_files": [{"filename": "a.arrow"}, "b"]}, "expected the names"),
        ([], r"state\.json: expected a JSON object, found \[\]"),
    ],
)
def test_a_state_that_cannot_be_used(tmp_path: Path, state: Any, match: str) -> None:
    save_state(tmp_path / "d", state)
    with pytest.raises(SourceRefused, match=match):
        find_data_files(str(tmp_path / "d"))


def test_a_state_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(SourceRefused, match=r"state\.json: expected JSON"):
        find_data_files(str(tmp_path))


def test_a_folder_of_the_cache(tmp_path: Path) -> None:
    save_state(tmp_path, {}, "dataset_info.json")
    assert is_hugging_face(str(tmp_path))
    with pytest.raises(SourceRefused, match=r"no state\.json: a folder of the cache of `datasets`\?"):
        find_data_files(str(tmp_path))


def test_the_order_is_that_of_the_state(tmp_path: Path) -> None:
    save_state(tmp_path, {"_data_files": [{"filename": "b"}, {"filename": "a"}], "_indices_files": None})
    assert find_data_files(str(tmp_path)) == [str(tmp_path / "b"), str(tmp_path / "a")]


def test_any_other_directory_is_none(tmp_path: Path) -> None:
    assert not is_hugging_face(str(tmp_path))
    assert not is_hugging_face(str(tmp_path / "none"))
