"""The programs and files of `docs/pipeline.md`, on two ranks: what they print is what the page says."""

import re
from pathlib import Path
from typing import Any

import pytest

from lazyshard import BadRows, ChunkWriter, Filter, LazyShardedDataset, Map
from lazyshard.config import read_config
from lazyshard.data.samples import FILL_ROWS
from lazyshard.errors import BadSample
from tests.data.programs import AS_MODULE, run_program
from tests.stream.streams import HERE

GUIDE = (HERE / "docs" / "pipeline.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)


MODULE, STEPS, LOADING = blocks("python")
GOOD, BAD = blocks("yaml")
PRINTED = blocks("text")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with the streams and files that the page tells of."""
    (tmp_path / "my_rows.py").write_text(MODULE)
    (tmp_path / "train.yaml").write_text(GOOD)
    (tmp_path / "bad.yaml").write_text(BAD)
    with ChunkWriter(tmp_path / "chat", 3) as writer:
        for number in range(12):
            answer = "" if number in (1, 3, 4, 9, 11) else f"answer {number}"
            writer.write({"question": f"question {number}", "answer": answer})
    with ChunkWriter(tmp_path / "code", 3) as writer:
        for number in range(6):
            writer.write({"question": f"code {number}", "answer": f"def f{number}"})
    return tmp_path


@pytest.mark.parametrize(("program", "printed"), [(STEPS, PRINTED[:2]), (LOADING, PRINTED[3:5])], ids=["steps", "load"])
@pytest.mark.full
def test_two_ranks_print_what_the_page_says(place: Path, program: str, printed: list[str]) -> None:
    for rank, expected in enumerate(printed):
        done = run_program(program, rank, folder=place)
        assert (done.returncode, done.stdout) == (0, expected), done.stderr


def test_error_is_what_the_page_says(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)

    def number(row: dict[str, Any]) -> dict[str, Any]:
        raise KeyError("question")

    number.__module__, number.__qualname__ = "my_rows", "number"
    steps = [Filter(lambda row: True), Map(number)]
    with pytest.raises(BadSample) as caught:
        LazyShardedDataset("chat", steps=steps, bad_rows=BadRows("raise"), dp_rank=0, dp_size=1)[2]
    assert f"{caught.value}\n" == PRINTED[2]


def test_command_says_what_the_page_says(place: Path) -> None:
    asked, _, expected = PRINTED[5].partition("\n")
    done = run_program(AS_MODULE + "lazyshard.cli", *asked.split()[2:], folder=place)
    assert (done.returncode, done.stdout) == (3, expected)


def test_defaults_and_limits_are_as_the_page_says() -> None:
    assert f"{FILL_ROWS:,} rows in a row are dropped" in " ".join(GUIDE.split())
    config = read_config({"version": 1, "datasets": [{"path": "a"}]}).config
    assert config is not None
    (dataset,) = config.datasets
    assert f"| `max_error_count` | {dataset.max_error_count} |" in GUIDE
    assert f"| `weight` | {dataset.weight:g} |" in GUIDE
    assert f"| `stopping` | {config.stopping} |" in GUIDE
    for name in ("batch_size", "form", "at_end"):
        assert f"| `{name}` | {getattr(config.dataloader, name)} |" in GUIDE
