"""`lazyshard.load`: what a configuration says is what comes out of the loader, on every rank alike."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lazyshard
from lazyshard import BadRows, BlendedDataset, Filter, LazyShardedDataset, LazyShardedStream, Map
from lazyshard.config import read_config
from lazyshard.data.samples import FILL_ROWS
from lazyshard.errors import BadSample, ConfigInvalid
from tests.data.options import grouped
from tests.data.programs import AS_MODULE, run_program
from tests.data.workers import DEADLINE_S
from tests.packaging.guide_programs import blocks_of
from tests.stream.streams import HERE, produce, publish_rows, raised, refusal_of

NAMED = "tests.data.workers"


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    return produce(tmp_path / "s", 17, 3)


def configuration(*paths: Path, loader: Any = None, steps: Any = (), **options: Any) -> dict[str, Any]:
    datasets = [{"path": path, "steps": list(steps), "weight": weight} for weight, path in enumerate(paths, 1)]
    known = {"version": 1, "datasets": datasets, "max_wait": DEADLINE_S}
    return known | {"dataloader": {"batch_size": 2, **(loader or {})}} | options


def ids(batches: Any) -> list[list[int]]:
    return [[row["id"] for row in batch] for batch in batches]


@pytest.mark.parametrize(("form", "workers", "dp"), [("stream", 2, 2), ("stream", 0, 3), ("map", 0, 1), ("map", 2, 3)])
def test_loader_draws_what_the_data_set_draws(stream: Path, form: str, workers: int, dp: int) -> None:
    loader = {"form": form, "num_workers": workers}
    if workers:
        loader["multiprocessing_context"] = "fork"
    loaded = lazyshard.load(configuration(stream, loader=loader), dp_rank=dp - 1, dp_size=dp)
    assert (loaded.stream is None) == (form == "map")
    plain = LazyShardedDataset(stream, dp_rank=dp - 1, dp_size=dp, batch_size=2)
    found = ids(loaded.loader)
    assert [len(batch) for batch in found] == [2] * (17 // (2 * dp))
    assert [number for batch in found for number in batch] == [plain[index]["id"] for index in plain.rank_indices]


@pytest.mark.parametrize("kind", ["a directory", "a named pipe"])
def test_what_is_no_file_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    if kind == "a named pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    caught = refusal_of(ConfigInvalid, f"found {kind}", lazyshard.load, path)
    assert (caught.file, caught.count) == (str(path), 1)
    # Mistakes are raised before anything is opened.
    refusal_of(ConfigInvalid, "seed: ", lazyshard.load, configuration(tmp_path / "no such stream", seed=-1))


@pytest.mark.parametrize("form", ["stream", "map"])
def test_several_data_sets_are_blended_by_their_weights(tmp_path: Path, form: str) -> None:
    paths = [produce(tmp_path / name, 12, 3) for name in "ab"]
    config = configuration(*paths, loader={"form": form}, steps=[{"map": lambda row: {"of": 1}}], num_samples=12)
    loaded = lazyshard.load(config, dp_rank=0, dp_size=1)
    assert isinstance(loaded.dataset, BlendedDataset)
    assert loaded.dataset.shares == (1 / 3, 2 / 3)
    rows = [row for batch in loaded.loader for row in batch]
    assert len(rows) == 12
    assert all(row["of"] == 1 for row in rows)
    assert len(loaded.stats()) == 2


@pytest.mark.parametrize("form", ["stream", "map"])
def test_state_goes_on_with_other_ranks(stream: Path, form: str) -> None:
    config = configuration(stream, loader={"form": form})
    before = []
    for rank in (0, 1):
        loaded = lazyshard.load(config, dp_rank=rank, dp_size=2)
        batches = iter(loaded.loader)
        before += [number for batch in ids([next(batches), next(batches)]) for number in batch]
    state = loaded.state_dict(8)
    resumed = lazyshard.load(config, dp_rank=0, dp_size=1)
    resumed.load_state_dict(state)
    assert resumed.consumed == 8
    after = [number for batch in ids(resumed.loader) for number in batch]
    assert len(after) == 8
    assert len({*before, *after}) == 16
    resumed.set_epoch(1)
    assert len(ids(resumed.loader)) == 8


def test_settings_of_the_run_and_of_the_data_set_are_taken_over(stream: Path) -> None:
    counted = {"num_samples": 24, "micro_batches_per_step": 2, "consumer": "run"}
    loader = {"form": "map", "collate_fn": f"{NAMED}:count"}
    loaded = lazyshard.load(configuration(stream, loader=loader, **counted), dp_rank=0, dp_size=1)
    assert list(loaded.loader) == [2] * 12
    assert loaded.state_dict(24)["parts"][-1]["draws_per_step"] == 4
    assert loaded.commit(16, last_epoch=True)
    assert (stream / "cursors" / "run.json").exists()
    config = configuration(stream, loader={"at_end": "loop"}, seed=3)
    config["datasets"][0] |= {"shuffle_window": 2, "max_total_samples": 15, "unit": "sample"}
    loaded = lazyshard.load(config, dp_rank=0, dp_size=2)
    options: Any = {"shuffle_window": 2, "max_total_samples": 15, "unit": "sample", "seed": 3, "batch_size": 2}
    plain = LazyShardedStream(LazyShardedDataset(stream, dp_rank=0, dp_size=2, **grouped(options)), at_end="loop")
    assert [number for batch in ids(loaded.loader) for number in batch] == [row["id"] for row in plain]
    assert len(ids(loaded.loader)) == 4


def test_error_budget_and_steps_are_those_of_the_data_set(stream: Path) -> None:
    config = configuration(stream, steps=[{"filter_fn": f"{NAMED}:even"}, {"map": f"{NAMED}:fail_on_two"}])
    config["datasets"][0]["max_error_count"] = 0
    caught = raised(BadSample, lambda: list(lazyshard.load(config, dp_rank=0, dp_size=1).loader))
    assert caught.step == f"steps[1], map {NAMED}:fail_on_two"


def test_neither_yaml_nor_transformers_is_imported_without_need(stream: Path, tmp_path: Path) -> None:
    program = (
        "import sys, lazyshard; "
        f"list(lazyshard.load({{'version': 1, 'datasets': [{{'path': {str(stream)!r}}}]}}).loader); "
        "print({'yaml', 'transformers'} & set(sys.modules))"
    )
    done = run_program(program, folder=tmp_path)
    assert (done.stdout, done.returncode) == ("set()\n", 0), done.stderr


KNOWN = {"[PAD]": 0, "[UNK]": 1, "row": 2, "user": 3, **{str(number): 10 + number for number in range(17)}}


class Words:
    """A tokenizer of words, whose chat template is role and content."""

    pad_token_id, eos_token_id = 0, None

    @classmethod
    def from_pretrained(cls, path: str, local_files_only: bool) -> Words:
        assert local_files_only
        if not Path(path, "tokenizer.json").exists():
            raise OSError("no tokenizer")
        return cls()

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [KNOWN.get(word, 1) for word in text.split()]}

    def apply_chat_template(self, messages: Any, tokenize: bool, return_dict: bool) -> dict[str, list[int]]:
        return self(" ".join(f"{one['role']} {one['content']}" for one in messages))


@pytest.fixture(params=["in its place", pytest.param("transformers", marks=pytest.mark.full)])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with such a tokenizer: of transformers, which take seconds to be imported, or of ours."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    if request.param != "transformers":
        (folder / "tokenizer.json").touch()
        monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoTokenizer=Words))
        return folder
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(KNOWN, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")
    fast.chat_template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    fast.save_pretrained(folder)
    return folder


def test_tokenizer_makes_samples_of_messages(stream: Path, tokenizer: Path) -> None:
    loader = {"num_workers": 1, "multiprocessing_context": "fork"}
    steps = [{"message_transform": f"{NAMED}:to_messages"}]
    config = configuration(stream, loader=loader, steps=steps, tokenizer={"path": str(tokenizer)})
    loaded = lazyshard.load(config, dp_rank=0, dp_size=1)
    batch = next(iter(loaded.loader))
    assert batch["input_ids"].tolist() == [[3, 2, 10], [3, 2, 11]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 1]]
    assert torch.equal(batch["labels"], batch["input_ids"])
    assert loaded.tokenizer.pad_token_id == 0


def texts(row: dict[str, Any]) -> dict[str, Any]:
    return {"text": " ".join(["row"] * (row["id"] + 1))}


@pytest.mark.parametrize("too_long", ["truncate", "drop"])
def test_texts_that_are_too_long_are_cut_or_dropped(stream: Path, tokenizer: Path, too_long: str) -> None:
    settings = {"path": str(tokenizer), "max_length": 3, "too_long": too_long}
    config = configuration(stream, steps=[{"map": texts}], tokenizer=settings)
    loaded = lazyshard.load(config, dp_rank=0, dp_size=1)
    batches = list(loaded.loader)
    assert [len(batch["input_ids"]) for batch in batches] == [2] * 8
    assert batches[0]["input_ids"].tolist() == [[2, 0], [2, 2]]
    assert batches[0]["labels"].tolist() == [[2, -100], [2, 2]]
    assert batches[0]["attention_mask"].tolist() == [[1, 0], [1, 1]]
    assert {int(count) for batch in batches for count in batch["attention_mask"].sum(dim=1)} == {1, 2, 3}
    # Rows 3 to 15 are longer than three words.
    assert loaded.stats()[0].dropped == (13 if too_long == "drop" else 0)
    assert too_long == "drop" or batches[2]["input_ids"].tolist() == [[2, 2, 2], [2, 2, 2]]


def test_what_has_no_text_and_what_is_no_tokenizer_is_refused(stream: Path, tokenizer: Path) -> None:
    config = configuration(stream, tokenizer={"path": str(tokenizer)})
    config["datasets"][0]["max_error_count"] = 0
    loaded = lazyshard.load(config, dp_rank=0, dp_size=1)
    refusal_of(BadSample, r"`messages` .*`text`, .*'id'", next, iter(loaded.loader))
    (tokenizer / "empty").mkdir()
    config["tokenizer"]["path"] += "/empty"
    refusal_of(ConfigInvalid, r"tokenizer\.path: ", lazyshard.load, config)


GUIDE = (HERE / "docs" / "pipeline.md").read_text(encoding="utf-8")
MODULE, STEPS, LOADING = blocks_of(GUIDE, "python")
GOOD, BAD = blocks_of(GUIDE, "yaml")
PRINTED = blocks_of(GUIDE, "text")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with the streams and files that the page tells of."""
    (tmp_path / "my_rows.py").write_text(MODULE)
    (tmp_path / "train.yaml").write_text(GOOD)
    (tmp_path / "bad.yaml").write_text(BAD)
    answers = ["" if number in (1, 3, 4, 9, 11) else f"answer {number}" for number in range(12)]
    chat = ({"question": f"question {number}", "answer": answer} for number, answer in enumerate(answers))
    publish_rows(tmp_path / "chat", 3, chat)
    code = ({"question": f"code {number}", "answer": f"def f{number}"} for number in range(6))
    publish_rows(tmp_path / "code", 3, code)
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
    dataset = LazyShardedDataset("chat", steps=steps, bad_rows=BadRows("raise"), dp_rank=0, dp_size=1)
    assert f"{raised(BadSample, dataset.__getitem__, 2)}\n" == PRINTED[2]


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
