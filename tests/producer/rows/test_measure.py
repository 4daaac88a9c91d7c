"""`--measure`: lengths in tokens by a function or a tokenizer, sealed with rows that stay as they are."""

import os
from pathlib import Path
from typing import Any

import pytest

from lazyshard import StreamReader
from lazyshard.errors import RowInvalid, SkipSample
from lazyshard_producer.cli import main
from lazyshard_producer.rows.encoding import load_counter
from tests.harness.processes.producing import assert_one_line, lengths, refused, rows, run_arguments
from tests.producer.rows.draining import making
from tests.stream.streams import produce, raised

WORDS = ("one", "two", "three", "four")


def tenfold(row: dict[str, Any]) -> int:
    return 10 * int(row["id"]) + 1


def in_another_process(row: dict[str, Any]) -> int:
    """The number of the process that measures."""
    return os.getpid()


def odd(row: dict[str, Any]) -> Any:
    """Neither a length nor a sample of some rows."""
    number = row["id"]
    if number == 1:
        raise SkipSample("too long")
    if number == 2:
        raise ValueError("no such \udc80 image")
    return {3: "3", 4: True, 5: -1, 6: 2**32, 7: None}.get(number, number)


def publish(out: Path, source: Path, measure: object, *more: object) -> int:
    name = f"{__name__}:{measure}" if isinstance(measure, str) else measure
    return main(run_arguments(out, [source], 4, "--measure", name, *more))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_bytes(rows(0, 10))
    return path


def test_function_measures_rows_that_stay_as_they_are(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert publish(out, source, "tenfold") == 0
    assert b"".join(path.read_bytes() for path in sorted(out.glob("chunk_*.jsonl"))) == rows(0, 10)
    assert lengths(out) == list(range(1, 101, 10))


def test_stream_is_measured_anew(tmp_path: Path) -> None:
    """The lengths that were sealed count no longer."""
    old, out = produce(tmp_path / "old", 5), tmp_path / "out"
    assert publish(tmp_path / "first", old, "in_another_process") == 0
    assert publish(out, tmp_path / "first", "tenfold", "--shuffle", 3) == 0
    assert lengths(out) == [10 * row["id"] + 1 for row in StreamReader(out)]


def test_measured_lengths_make_packs_and_stripes(source: Path, tmp_path: Path) -> None:
    assert publish(tmp_path / "packs", source, "tenfold", "--pack", 91) == 0
    packs = [[10 * row["id"] + 1 for row in pack["pack"]] for pack in StreamReader(tmp_path / "packs")]
    assert sorted(length for pack in packs for length in pack) == list(range(1, 101, 10))
    assert all(sum(pack) <= 91 for pack in packs)
    assert publish(tmp_path / "dealt", source, "tenfold", "--balance", 2) == 0
    assert lengths(tmp_path / "dealt") == [10 * row["id"] + 1 for row in StreamReader(tmp_path / "dealt")]


def test_rows_without_a_length_are_bad_rows(source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert publish(out, source, "odd") == 3
    assert_one_line(capfd.readouterr().err, f"{source}:2", "too long")
    assert publish(out, source, "odd", "--on-bad-row", "quarantine") == 0
    assert lengths(out) == [0, 8, 9]
    reasons = [entry["reason"] for entry in refused(out)]
    assert reasons[1].startswith("--measure raised ValueError: no such \\udc80 image")
    assert all("--measure returned" in reason for reason in reasons[2:]) and len(reasons) == 7


def test_going_on_with_another_measure(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert publish(out, source, "odd") == 3
    assert publish(out, source, "tenfold") == 0
    assert publish(out, source, "odd") == 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of four words, in whose chat template each message begins with a token of its own."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate((*WORDS, "<m>", "<unk>"))}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
    fast.chat_template = "{% for message in messages %}<m> {{ message.content }} {% endfor %}"
    folder = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(folder)
    return folder


def test_tokenizer_measures_text_and_messages(tokenizer: Path) -> None:
    count = load_counter(making(measure=str(tokenizer)))
    assert count({"text": "one two three"}) == 3
    assert count({"messages": [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "four"}]}) == 5
    named = load_counter(making(measure=str(tokenizer), measure_field="answer"))
    assert named({"text": "one two three", "answer": "one"}) == 1
    for row in ({"id": 1}, {"text": 3}):
        raised(RowInvalid, count, row)


def test_what_is_no_tokenizer_is_refused(source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for measure in (tmp_path / "nothing", tmp_path, "nothing"):
        assert publish(tmp_path / "out", source, measure) == 2
        assert_one_line(capfd.readouterr().err, "--measure")
