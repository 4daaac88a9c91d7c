"""`--encode` and `--measure`: what is published, the lengths in seals, what is refused. Kills: test_exactly_once."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lazyshard import StreamReader
from lazyshard.errors import RowInvalid, SkipSample
from lazyshard_producer.cli import main
from lazyshard_producer.rows.encoding import load_counter
from tests.harness.processes.producing import assert_one_line, lengths, refused, rows, run_arguments
from tests.producer.rows.draining import making
from tests.stream.streams import raised, seal, sealed

HERE = "tests.producer.recipes"
ROWS = 60
PER_CHUNK = 7
SKIP = ("--on-bad-row", "skip")
GOOD = [number for number in range(ROWS) if number % 10 != 7]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    lines = [{"id": number, "text": chr(97 + number % 26) * (number % 9)} for number in range(ROWS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "rows.jsonl"


def encode(source: Path, *options: object, name: str = "tokens", out: str = "out") -> int:
    more = ("--no-progress", "--encode", f"{HERE}:{name}", *options)
    return main(run_arguments(source.parent / out, [source], PER_CHUNK, *more))


@pytest.mark.parametrize("shuffle", [(), ("--shuffle", 16)])
def test_rows_hold_arrays_and_seals_the_lengths(source: Path, tmp_path: Path, shuffle: tuple[object, ...]) -> None:
    assert encode(source, *SKIP, *shuffle) == 0
    reader = StreamReader(tmp_path / "out")
    rows = [reader.read(sample) for sample in range(len(GOOD))]
    ids = [row["id"] for row in rows]
    assert (sorted(ids), ids == GOOD) == (GOOD, not shuffle)
    for row in rows:
        text = chr(97 + row["id"] % 26) * (row["id"] % 9)
        assert row["input_ids"].dtype == np.int32
        assert row["input_ids"].tolist() == list(text.encode())
        assert row["mask"].tolist() == [letter > 100 for letter in text.encode()]
    assert lengths(tmp_path / "out") == [number % 9 for number in ids]
    facts = {"vocabulary": "bytes", "size": 256, "kind": "function", "function": f"{HERE}:tokens"}
    assert reader.encoding == facts


def test_worker_processes_encode(source: Path, tmp_path: Path) -> None:
    assert encode(source, "--workers", 1, name="pid") == 0
    assert StreamReader(tmp_path / "out").read(0)["pid"] != os.getpid()


def test_encoder_gets_what_a_transform_makes_although_it_is_no_json(source: Path, tmp_path: Path) -> None:
    assert encode(source, "--transform", f"{HERE}:features", name="nested") == 0
    row = StreamReader(tmp_path / "out").read(3)
    assert row["features"]["mel"].tolist() == [[3.0] * 3] * 2
    assert row["features"]["mel"].dtype == np.float16


def test_lengths_that_are_not_told_are_not_in_the_seals(source: Path, tmp_path: Path) -> None:
    assert encode(source, name="without_length") == 0
    assert seal(tmp_path / "out", 0).tokens is None


def test_bad_row_ends_a_run_which_only_the_same_encoder_may_continue(
    source: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Row 7 ends it, behind the first chunk.
    assert encode(source) == 3
    assert_one_line(capsys.readouterr().err, f"{source}:8: --encode raised ValueError")
    assert encode(source, name="otherwise") == 5
    assert_one_line(capsys.readouterr().err, "size is 256 there and 512 here")
    arguments = run_arguments(out, [source], PER_CHUNK)
    assert main([*arguments, "--no-progress"]) == 5
    assert main(["check", *arguments[1:], "--encode", f"{HERE}:otherwise"]) == 5
    assert encode(source, "--on-bad-row", "quarantine") == 0
    assert [one["line"] for one in refused(out)] == [8, 18, 28, 38, 48, 58]
    assert json.loads(refused(out)[0]["row"])["id"] == 7


def tenfold(row: dict[str, Any]) -> int:
    return 10 * int(row["id"]) + 1


def odd(row: dict[str, Any]) -> Any:
    """Neither a length nor a sample of some rows."""
    number = row["id"]
    if number == 1:
        raise SkipSample("too long")
    if number == 2:
        raise ValueError("no such \udc80 image")
    return {3: "3", 4: True, 5: -1, 6: 2**32, 7: None}.get(number, number)


def publish(out: Path, ten: Path, measure: object, *more: object) -> int:
    name = f"{__name__}:{measure}" if isinstance(measure, str) else measure
    return main(run_arguments(out, [ten], 4, "--measure", name, *more))


@pytest.fixture
def ten(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_bytes(rows(0, 10))
    return tmp_path / "a.jsonl"


def test_function_measures_rows_that_stay_as_they_are(ten: Path, out: Path) -> None:
    assert publish(out, ten, "tenfold") == 0
    assert b"".join(path.read_bytes() for path in sorted(out.glob("chunk_*.jsonl"))) == rows(0, 10)
    assert lengths(out) == list(range(1, 101, 10))


def test_stream_is_measured_anew(out: Path, tmp_path: Path) -> None:
    """The lengths that were sealed count no longer."""
    assert publish(out, sealed(tmp_path / "old", [7] * 5), "tenfold", "--shuffle", 3) == 0
    assert lengths(out) == [10 * row["id"] + 1 for row in StreamReader(out)]


def test_measured_lengths_make_packs_and_stripes(ten: Path, tmp_path: Path) -> None:
    assert publish(tmp_path / "packs", ten, "tenfold", "--pack", 91) == 0
    packs = [[10 * row["id"] + 1 for row in pack["pack"]] for pack in StreamReader(tmp_path / "packs")]
    assert sorted(length for pack in packs for length in pack) == list(range(1, 101, 10))
    assert all(sum(pack) <= 91 for pack in packs)
    assert publish(tmp_path / "dealt", ten, "tenfold", "--balance", 2) == 0
    assert lengths(tmp_path / "dealt") == [10 * row["id"] + 1 for row in StreamReader(tmp_path / "dealt")]


def test_rows_without_a_length_are_bad_rows(ten: Path, out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert publish(out, ten, "odd") == 3
    assert_one_line(capfd.readouterr().err, f"{ten}:2", "too long")
    assert publish(out, ten, "odd", "--on-bad-row", "quarantine") == 0
    assert lengths(out) == [0, 8, 9]
    reasons = [entry["reason"] for entry in refused(out)]
    assert reasons[1].startswith("--measure raised ValueError: no such \\udc80 image")
    assert all("--measure returned" in reason for reason in reasons[2:]) and len(reasons) == 7


def test_going_on_with_another_measure(ten: Path, out: Path) -> None:
    assert publish(out, ten, "odd") == 3
    assert publish(out, ten, "tenfold") == 0
    assert publish(out, ten, "odd") == 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of four words, in whose chat template each message begins with a token of its own."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(("one", "two", "three", "four", "<m>", "<unk>"))}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
    fast.chat_template = "{% for message in messages %}<m> {{ message.content }} {% endfor %}"
    folder = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(folder)
    return folder


def test_tokenizer_measures_text_and_messages(tokenizer: Path) -> None:
    count = load_counter(making(measure=str(tokenizer)))
    assert count({"text": "one two three"}) == (3, 0)
    assert (
        count({"messages": [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "four"}]})[0] == 5
    )
    named = load_counter(making(measure=str(tokenizer), measure_field="answer"))
    assert named({"text": "one two three", "answer": "one"})[0] == 1
    for row in ({"id": 1}, {"text": 3}):
        raised(RowInvalid, count, row)


def test_what_is_no_tokenizer_is_refused(ten: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for measure in (tmp_path / "nothing", tmp_path, "nothing"):
        assert publish(tmp_path / "out", ten, measure) == 2
        assert_one_line(capfd.readouterr().err, "--measure")
