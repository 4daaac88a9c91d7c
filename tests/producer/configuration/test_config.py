"""The configuration file, alone and under flags."""

import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lazyshard_producer.configuration.given import Given, assemble, read_config, sort_arguments, sort_config
from lazyshard_producer.configuration.settings import BY_NAME, Amount, Limits, Settings, SourceSettings
from lazyshard_producer.errors import SettingInvalid, SettingsInvalid
from tests.harness.processes.producing import plain_sources
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
LEAST = "--source a --out o --samples-per-chunk 3"
ARGUMENTS = (
    "--source a b --weight 3 --follow d --weight 1 --source - --weight 1 --pattern p* --finished-by marker "
    "--marker {name}.ok --end-marker END --resume append --out out --samples-per-chunk 10 --rate 2.5 "
    "--metrics-port 9464 --columns new=old,same --on-bad-row quarantine --max-bad-rows 5 --encode swift --model /m "
    "--max-ahead 20GB --max-disk 1TB --min-free-disk 1000 --retain 100 --consumers train,eval"
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def config(text: str) -> Given:
    Path("run.toml").write_text(text, "utf-8")
    return read_config("run.toml")


def flags(line: str) -> Given:
    """As typer would sort them: every flag here has one value."""
    found = sort_arguments(["run", *shlex.split(line)])
    names = [flag.removeprefix("--").replace("-", "_") for flag in found.rest[1::2]]
    values = zip(names, found.rest[2::2], strict=True)
    return found.with_values({name: [value] if BY_NAME[name].repeat else value for name, value in values})


def problems(given: Given, file: Given | None = None) -> list[tuple[str, str]]:
    """What is refused: options, and why."""
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
    assert assemble(Given(), config(f"{text}[limits]\n{none}")) == expected


def test_flags_come_before_the_file() -> None:
    settings = assemble(flags("--rate 7 --retain all --pattern q*"), config(FULL))
    assert (settings.rate, settings.limits.retain, settings.limits.max_disk) == (7.0, "all", 10**12)
    assert [source.pattern for source in settings.sources] == ["*.jsonl", "*.jsonl", "q*", "*.jsonl"]
    # Sources take the place of those of the file.
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
    # Nobody has asked for it, and it is what it is by default.
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


@pytest.mark.parametrize("arguments", ["--pattern *", "--idle-seconds soon", "--resume append"])
def test_flags_about_sources_that_are_not_there(arguments: str) -> None:
    found = problems(flags(f"--source a --source python:m:f --out o --samples-per-chunk 3 {arguments}"))
    assert found[-1][0] == arguments.split()[0]
    assert "there are none" in found[-1][1]


def test_a_flag_for_standard_input_and_pipes_alone() -> None:
    os.mkfifo("a")
    given = flags("--source b a --out o --samples-per-chunk 3 --resume append")
    assert [source.resume for source in assemble(given, None).sources] == ["append", "append"]


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


@pytest.mark.parametrize("path", [[], [1], 1, {"a": 1}, None])
def test_a_path_that_is_none_or_no_source_at_all(path: Any) -> None:
    sources = [] if path is None else [{"path": path}]
    file = sort_config("x", {"out": "o", "samples_per_chunk": 3, "source": sources})
    assert [option for option, _ in problems(Given(), file)] == ["x: [[source]] 1: path" if sources else "--source"]


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


def test_a_byte_order_mark_is_no_part_of_the_file() -> None:
    assert config("\ufeffrate = 3\n").values == {"rate": 3}
