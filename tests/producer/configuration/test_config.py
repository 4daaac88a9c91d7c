"""The configuration file, alone and under flags; `init` and docs/producer.md: examples that are right."""

import contextlib
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lazyshard_producer.cli import main
from lazyshard_producer.configuration.given import Given, assemble, example, read_config, sort_arguments, sort_config
from lazyshard_producer.configuration.settings import OPTIONS, SOURCE_OPTIONS, Amount, Limits, Settings, SourceSettings
from lazyshard_producer.display import Metrics
from lazyshard_producer.errors import SettingInvalid, SettingsInvalid
from tests.harness.processes.environment import ROOT
from tests.harness.processes.producing import plain_sources, rows
from tests.producer.commands import Fails
from tests.producer.display.test_display import scrape
from tests.stream.streams import raised, refusal_of

FULL = """
out = "out"
samples_per_chunk = 10
rate = 2.5
metrics_port = 9464

[[source]]
path = ["a", "b"]
weight = 3

[[source]]
follow = "d"
weight = 1
pattern = "p*"
finished_by = "marker"
marker = "{name}.ok"
end_marker = "END"

[[source]]
path = "-"
weight = 1
resume = "append"

[rows]
columns = { new = "old", same = "same" }
on_bad_row = "quarantine"
max_bad_rows = 5

[encoding]
encode = "swift"
model = "/m"
encode_option = { truncation_strategy = "left", packing = false, seed = 3 }

[limits]
max_ahead = "20GB"
max_disk = "1TB"
min_free_disk = 1000
retain = "last 100"
consumers = ["train", "eval"]
"""
ALL = (*SOURCE_OPTIONS, *OPTIONS)
LISTS = {option.name for option in ALL if option.repeat}
DOCS = (ROOT / "docs" / "producer.md").read_text("utf-8")
pytestmark = pytest.mark.usefixtures("here")
LEAST = "--source a --out o --samples-per-chunk 3"
ARGUMENTS = (
    "--source a b --weight 3 --follow d --weight 1 --source - --weight 1 --pattern p* --finished-by marker "
    "--marker {name}.ok --end-marker END --resume append --out out --samples-per-chunk 10 --rate 2.5 "
    "--metrics-port 9464 --columns new=old,same --on-bad-row quarantine --max-bad-rows 5 --encode swift --model /m "
    "--max-ahead 20GB --max-disk 1TB --min-free-disk 1000 --retain 100 --consumers train,eval"
)


def config(text: str) -> Given:
    Path("run.toml").write_text(text, "utf-8")
    return read_config("run.toml")


def flags(line: str) -> Given:
    """As typer would sort them: every flag here has one value."""
    found = sort_arguments(["run", *shlex.split(line)])
    names = [flag.removeprefix("--").replace("-", "_") for flag in found.rest[1::2]]
    values = zip(names, found.rest[2::2], strict=True)
    return found.with_values({name: [value] if name in LISTS else value for name, value in values})


def problems(given: Given, file: Given | None = None) -> list[tuple[str, str]]:
    error = raised(SettingsInvalid, assemble, given, file)
    return [(problem.option, problem.text) for problem in error.problems]


def test_a_file_says_all_that_flags_can_say() -> None:
    settings = assemble(Given(), config(FULL))
    assert settings.sources == (
        SourceSettings(path="a", weight=1.5),
        SourceSettings(path="b", weight=1.5),
        SourceSettings(
            path="d", weight=1.0, follow=True, pattern="p*", finished_by="marker", marker="{name}.ok", end_marker="END"
        ),
        SourceSettings(path="-", weight=1.0, resume="append"),
    )
    ahead = Amount(number=20 * 10**9, unit="bytes")
    assert settings.limits == Limits(
        max_ahead=ahead, max_disk=10**12, min_free_disk=1000, retain=100, consumers=("train", "eval")
    )
    assert (settings.out, settings.samples_per_chunk, settings.rate, settings.metrics_port) == ("out", 10, 2.5, 9464)
    assert (settings.on_bad_row, settings.max_bad_rows) == ("quarantine", 5)
    assert settings.encode_option == (("truncation_strategy", "left"), ("packing", "false"), ("seed", "3"))
    given = flags(ARGUMENTS)
    # Typer gives a flag that may be repeated as a list.
    options = {"encode_option": ("truncation_strategy=left", "packing=false", "seed=3")}
    assert assemble(replace(given, values={**given.values, **options}), None) == settings


def test_the_least_that_is_needed_and_none_in_a_file() -> None:
    expected = Settings(sources=plain_sources(["a"]), out="o", samples_per_chunk=3)
    assert assemble(flags(LEAST), None) == expected
    text = 'out = "o"\nsamples_per_chunk = 3\nrate = "none"\n[[source]]\npath = "a"\n'
    none = "".join(f'{name} = "none"\n' for name in ("max_ahead", "max_disk", "min_free_disk"))
    # A byte order mark is no part of the file.
    assert assemble(Given(), config(f"\ufeff{text}[limits]\n{none}")) == expected


def test_flags_come_before_the_file() -> None:
    settings = assemble(flags("--rate 7 --retain all --pattern q*"), config(FULL))
    assert (settings.rate, settings.limits.retain, settings.limits.max_disk) == (7.0, "all", 10**12)
    assert [source.pattern for source in settings.sources] == ["*.jsonl", "*.jsonl", "q*", "*.jsonl"]
    assert assemble(flags("--source z"), config(FULL)).sources == (SourceSettings(path="z"),)
    none = "--rate none --metrics-port none --max-bad-rows none --max-ahead none --max-disk none --min-free-disk none"
    settings = assemble(flags(none), config(FULL))
    assert (settings.rate, settings.metrics_port, settings.max_bad_rows) == (None, None, None)
    assert settings.limits == Limits(retain=100, consumers=("train", "eval"))


def test_all_that_is_wrong_is_said_at_once_in_the_words_of_the_user() -> None:
    text = """
    samples_per_chunk = "many"
    max_ahead = 3
    [limit]
    [[source]]
    path = "a"
    wheight = 1
    [[source]]
    follow = "d"
    path = "d"
    [[source]]
    follow = "e"
    weight = 0
    finished_by = "luck"
    [rows]
    on_bad_row = "explode"
    max_bad_rows = 5
    shuffle = -1
    """
    found = problems(flags("--rate fast --workers 3 --max-disk 0"), config(text))
    assert [option for option, _ in found] == [
        *("run.toml: max_ahead", "run.toml: limit", "run.toml: [[source]] 1: wheight", "run.toml: [[source]] 2"),
        *("run.toml: [[source]] 3: weight", "run.toml: [[source]] 3: finished_by", "run.toml: samples_per_chunk"),
        *("--rate", "run.toml: rows.shuffle", "run.toml: rows.on_bad_row", "--max-disk", "--out"),
        *("run.toml: [[source]] 1: weight", "--workers"),
    ]


@pytest.mark.parametrize(
    ("line", "rows", "says"),
    [
        ("--encode m:f --pack 8", "length_field = 'length'", "--encode"),
        ("", "length_field = 'length'", "--pack"),
        ("", "pack_buffer = 10000", "--pack"),
        ("", "cost_per_token = 1", "--balance"),
    ],
)
def test_a_default_that_is_given_is_refused_where_another_value_would_be(line: str, rows: str, says: str) -> None:
    run = f"{LEAST} {line}"
    name, _, value = rows.partition(" = ")
    flag = f"--{name.replace('_', '-')}"
    for given, file, called in (
        (flags(run), config(f"[rows]\n{rows}"), f"run.toml: rows.{name}"),
        (flags(f"{run} {flag} {value}"), None, flag),
    ):
        ((option, text),) = problems(given, file)
        assert option == called and says in text
    assemble(flags(run), None)


def test_consumers_without_retain_are_refused() -> None:
    ((option, text),) = problems(flags(f"{LEAST} --consumers train"))
    assert option == "--consumers" and "--retain consumed" in text
    assert problems(flags(LEAST), config("[limits]\nconsumers = ['train']")) == [("run.toml: limits.consumers", text)]
    for retain in ("consumed", "5"):
        assert assemble(flags(f"{LEAST} --consumers train --retain {retain}"), None).limits.consumers == ("train",)
    # That all are kept is said, over a file that says otherwise.
    file = config("[limits]\nretain = 'consumed'\nconsumers = ['train']")
    assert assemble(flags(f"{LEAST} --retain all"), file).limits == Limits(consumers=("train",))
    # What the other mistake brings with it is not told.
    assert [option for option, _ in problems(flags(f"{LEAST} --consumers train --retain consumd"))] == ["--retain"]


@pytest.mark.parametrize(
    ("document", "option", "hint"),
    [
        ({"source": {"path": "a"}}, "source", "[[source]]"),
        ({"limits": 3}, "limits", "[limits]"),
        ({"transform": {"workers": 3}}, "transform", "in [rows]"),
        ({"limits": {"rate": 3}}, "limits.rate", "top of the file"),
        ({"limits": {"source": []}}, "limits.source", "a table [[source]]"),
        ({"samples-per-chunk": 3}, "samples-per-chunk", "did you mean samples_per_chunk?"),
        ({"rows": {"max_disk_": 3}}, "rows.max_disk_", "did you mean max_disk, in [limits]?"),
        ({"limits": {"zzz": 3}}, "limits.zzz", "expected one of max_ahead, max_disk, min_free_disk, retain, consumers"),
        ({"zzz": 3}, "zzz", "store_patience_seconds, [rows], [encoding], [limits], [[source]]"),
    ],
)
def test_names_that_nobody_knows(document: dict[str, Any], option: str, hint: str) -> None:
    (found,) = sort_config("x", document).problems
    assert found.option == f"x: {option}"
    assert hint in found.text


@pytest.mark.parametrize(
    ("data", "hint"),
    [
        (b"rate = \n", "line 1"),
        (b"# x\nrate = none # no limit\n", 'rate = "none"'),
        (b"out = /a/b", 'out = "/a/b"'),
        (b"a = " + b"[" * 100_000, "not valid TOML"),
        (b"\xff", "byte 0xff in position 0"),
        (None, "No such file"),
    ],
)
def test_a_file_that_cannot_be_read(data: bytes | None, hint: str) -> None:
    if data is not None:
        Path("run.toml").write_bytes(data)
    error = refusal_of(SettingInvalid, r"^run\.toml: ", read_config, "run.toml")
    assert hint in str(error)
    assert error.option == "--config"


def test_what_is_written_is_accepted_by_check_and_sets_what_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    Path("data.jsonl").write_bytes(rows(0, 3))
    assert main(["init"]) == 0
    assert "check lazyshard-producer.toml" in capsys.readouterr().out
    assert main(["check", "lazyshard-producer.toml", "--out", "out"]) == 0
    assert '"id":2' in capsys.readouterr().out
    expected = Settings(sources=plain_sources(["data.jsonl"]), out="/shared/stream", samples_per_chunk=1000)
    assert assemble(Given(), read_config("lazyshard-producer.toml")) == expected


def test_every_setting_is_in_it_once() -> None:
    found = re.findall(r"^(?:# )?(\w+) = ", example(), re.MULTILINE)
    assert sorted(found) == sorted(["path", "follow", *(option.name for option in ALL)])


@pytest.mark.parametrize("name", [one.name for one in ALL if one.name not in ("out", "samples_per_chunk")])
def test_every_example_of_a_setting_can_be_read_where_it_stands(name: str) -> None:
    text = example().replace(f"\n# {name} = ", f"\n{name} = ")
    assert text != example()
    Path("x.toml").write_text(text)
    file = read_config("x.toml")
    assert file.problems == ()
    try:
        assemble(Given(), file)
    except SettingsInvalid as error:
        # Some of them need another one; what they are is right.
        assert not any("expected" in problem.text and ": should be " in problem.text for problem in error.problems)


def test_a_file_that_cannot_be_made_is_refused_and_what_is_there_left(fails: Fails) -> None:
    Path("file").write_bytes(b"precious")
    Path("directory").mkdir()
    Path("link").symlink_to("nowhere")
    for name in ("file", "directory", "link"):
        fails(["init", name], 2, f"{name}: ")
    fails(["init", "nowhere/x.toml"], 7, "nowhere/x.toml: No such file or directory")
    assert (Path("file").read_bytes(), sorted(os.listdir())) == (b"precious", ["directory", "file", "link"])


@pytest.mark.parametrize("flag", ["--source", "--follow", *(option.flag for option in ALL)])
def test_the_page_names_every_option(flag: str) -> None:
    assert re.search(rf"`{flag}[ `]|{flag} ", DOCS)


def test_the_page_shows_a_configuration_file_with_known_keys_only() -> None:
    (block,) = re.findall(r"^```toml\n(.*?)^```$", DOCS, re.MULTILINE | re.DOTALL)
    Path("run.toml").write_text(block)
    file = read_config("run.toml")
    assert (file.problems, len(file.sources)) == ((), 2)
    for table in {option.table for option in OPTIONS if option.table}:
        (comment,) = re.findall(rf"^\[{table}\] +# (.*)$", block, re.MULTILINE)
        assert sorted(comment.split(", ")) == sorted(option.name for option in OPTIONS if option.table == table)


def test_the_page_names_the_metrics_that_are_served() -> None:
    with contextlib.closing(Metrics("127.0.0.1", 0)) as metrics:
        metrics.taken("a", 1)
        metrics.consumers({"train": 1}, 1)
        served = {re.sub(r"(_bucket|_sum|_count)?(\{.*)?$", "", name) for name in scrape(metrics)}
    rows = re.findall(r"^\| (`.*?) \|", DOCS[DOCS.index("| metric, without") :], re.MULTILINE)
    assert {re.sub(r"\{.*", "", name) for row in rows for name in re.findall(r"`(.*?)`", row)} == served
