"""The configuration file, alone and under flags."""

import os
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lazyshard_producer.configuration.assembly import assemble
from lazyshard_producer.configuration.command_line import Flags, sort_arguments
from lazyshard_producer.configuration.config import ConfigFile, read_config, sort_config
from lazyshard_producer.configuration.quantities import Amount
from lazyshard_producer.configuration.settings import Limits, Settings, SourceSettings
from lazyshard_producer.errors import ExtraMissing, SettingInvalid, SettingsInvalid
from tests.harness.processes.producing import plain_sources

FULL = """
out = "out"
samples_per_chunk = 10
rate = 2.5
metrics_port = 9464
metrics_host = "0.0.0.0"
log_every_seconds = 5

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
transform = "m:f"
where = "m:g"
columns = { new = "old", same = "same" }
shuffle = 100
seed = 7
workers = 2
on_bad_row = "quarantine"
max_bad_rows = 5
max_row_bytes = "1MiB"

[encoding]
encode = "swift"
model = "/m"
template = "t"
max_length = 512
encode_option = { truncation_strategy = "left", packing = false, seed = 3 }

[limits]
max_ahead = "20GB"
max_disk = "1TB"
min_free_disk = 1000
retain = "last 100"
consumers = ["train", "eval"]
"""

SETTINGS = Settings(
    out="out",
    samples_per_chunk=10,
    rate=2.5,
    metrics_port=9464,
    metrics_host="0.0.0.0",
    log_every_s=5.0,
    sources=(
        SourceSettings(path="a", weight=1.5),
        SourceSettings(path="b", weight=1.5),
        SourceSettings(
            path="d",
            weight=1.0,
            follow=True,
            pattern="p*",
            finished_by="marker",
            marker="{name}.ok",
            end_marker="END",
        ),
        SourceSettings(path="-", weight=1.0, resume="append"),
    ),
    transform="m:f",
    where="m:g",
    columns=(("new", "old"), ("same", "same")),
    shuffle=100,
    seed=7,
    workers=2,
    on_bad_row="quarantine",
    max_bad_rows=5,
    max_row_bytes=1 << 20,
    encode="swift",
    model="/m",
    template="t",
    max_length=512,
    encode_option=(("truncation_strategy", "left"), ("packing", "false"), ("seed", "3")),
    limits=Limits(
        max_ahead=Amount(number=20 * 10**9, unit="bytes"),
        max_disk=10**12,
        min_free_disk=1000,
        retain=100,
        consumers=("train", "eval"),
    ),
)

ARGUMENTS = (
    "--source a b --weight 3 --follow d --weight 1 --source - --weight 1 --pattern p* --finished-by marker "
    "--marker {name}.ok --end-marker END --resume append --out out --samples-per-chunk 10 --rate 2.5 "
    "--metrics-port 9464 --metrics-host 0.0.0.0 --log-every-seconds 5 --transform m:f --where m:g "
    "--columns new=old,same --shuffle 100 --seed 7 --workers 2 --on-bad-row quarantine --max-bad-rows 5 "
    "--max-row-bytes 1MiB --encode swift --model /m --template t "
    "--max-length 512 --max-ahead 20GB --max-disk 1TB --min-free-disk 1000 --retain 100 --consumers train,eval"
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def config(text: str) -> ConfigFile:
    Path("run.toml").write_text(text, "utf-8")
    return read_config("run.toml")


def flags(line: str) -> Flags:
    """As typer would sort them: every flag here has one value."""
    found = sort_arguments(["run", *shlex.split(line)])
    names = [flag.removeprefix("--").replace("-", "_") for flag in found.rest[1::2]]
    return Flags(found.sources, {name: [value] for name, value in zip(names, found.rest[2::2], strict=True)})


def problems(given: Flags, file: ConfigFile | None) -> list[str]:
    with pytest.raises(SettingsInvalid) as error:
        assemble(given, file)
    return [f"{problem.option}: {problem.text}" for problem in error.value.problems]


def test_a_file_says_all_that_flags_can_say() -> None:
    assert assemble(Flags(), config(FULL)) == SETTINGS
    given = flags(ARGUMENTS)
    # Typer gives a flag that may be repeated as a list.
    options = {"encode_option": ["truncation_strategy=left", "packing=false", "seed=3"]}
    assert assemble(replace(given, values={**given.values, **options}), None) == SETTINGS


def test_the_least_that_is_needed() -> None:
    expected = Settings(sources=plain_sources(["a"]), out="o", samples_per_chunk=3)
    assert assemble(flags("--source a --out o --samples-per-chunk 3"), None) == expected
    text = 'out = "o"\nsamples_per_chunk = 3\n[[source]]\npath = "a"\n'
    assert assemble(Flags(), config(text)) == expected


def test_flags_come_before_the_file() -> None:
    settings = assemble(flags("--rate 7 --retain all --pattern q*"), config(FULL))
    assert (settings.rate, settings.limits.retain) == (7.0, "all")
    assert settings.limits.max_disk == 10**12
    assert [source.pattern for source in settings.sources] == ["*.jsonl", "*.jsonl", "q*", "*.jsonl"]


def test_none_takes_away_what_the_file_sets() -> None:
    none = "--rate none --metrics-port none --max-bad-rows none --max-ahead none --max-disk none --min-free-disk none"
    settings = assemble(flags(none), config(FULL))
    assert (settings.rate, settings.metrics_port, settings.max_bad_rows) == (None, None, None)
    assert settings.limits == Limits(retain=100, consumers=("train", "eval"))


def test_a_file_can_say_none_too() -> None:
    names = ("max_ahead", "max_disk", "min_free_disk")
    limits = "".join(f'{name} = "none"\n' for name in names)
    text = f'out = "o"\nsamples_per_chunk = 3\nrate = "none"\n[[source]]\npath = "a"\n[limits]\n{limits}'
    expected = Settings(sources=plain_sources(["a"]), out="o", samples_per_chunk=3)
    assert assemble(Flags(), config(text)) == expected


def test_sources_given_as_flags_take_the_place_of_those_of_the_file() -> None:
    settings = assemble(flags("--source z"), config(FULL))
    assert settings.sources == (SourceSettings(path="z"),)


def test_a_pattern_stands_for_its_files_which_share_the_weight() -> None:
    for name in ("a2", "a1", "b"):
        Path(name).touch()
    settings = assemble(flags("--source a* --weight 1 --source b --weight 2 --out o --samples-per-chunk 3"), None)
    assert [(source.path, source.weight) for source in settings.sources] == [("a1", 0.5), ("a2", 0.5), ("b", 2.0)]


@pytest.mark.parametrize(
    ("arguments", "most"),
    [
        ("--on-bad-row skip", 1000),
        ("--on-bad-row quarantine", 1000),
        ("--on-bad-row skip --max-bad-rows 0", 0),
        ("--on-bad-row skip --max-bad-rows none", None),
        ("--on-bad-row fail", None),
    ],
)
def test_bad_rows_that_do_not_end_a_run_have_a_cap(arguments: str, most: int | None) -> None:
    given = flags(f"--source a --out o --samples-per-chunk 3 {arguments}")
    assert assemble(given, None).max_bad_rows == most


def test_all_that_is_wrong_is_said_at_once_in_the_words_of_the_user() -> None:
    text = """
    samples_per_chunk = "many"
    rates = 5
    max_ahead = 3
    [limit]
    [[source]]
    path = "a"
    weight = "half"
    wheight = 1
    [[source]]
    path = "b"
    [[source]]
    follow = "d"
    path = "d"
    [[source]]
    follow = "e"
    weight = 0
    finished_by = "luck"
    marker = "{name}.ok"
    [rows]
    on_bad_row = "explode"
    max_bad_rows = 5
    shuffle = -1
    seed = 1.5
    """
    found = problems(flags("--rate fast --workers 3 --max-disk 0"), config(text))
    place = re.compile(r"--[a-z-]+|run\.toml: (\[\[source\]\] [0-9]: )?[a-z_.]+")
    assert [match[0] for match in map(place.match, found) if match] == [
        "run.toml: rates",
        "run.toml: max_ahead",
        "run.toml: limit",
        "run.toml: [[source]] 1: wheight",
        "run.toml: [[source]] 1: weight",
        "run.toml: [[source]] 3: either",
        "run.toml: [[source]] 4: finished_by",
        "run.toml: samples_per_chunk",
        "--rate",
        "run.toml: rows.shuffle",
        "run.toml: rows.seed",
        "run.toml: rows.on_bad_row",
        "--max-disk",
        "--out",
        "run.toml: [[source]] 4: weight",
        "run.toml: [[source]] 2: weight",
        "--workers",
    ]
    assert {
        "run.toml: rates: unknown here; is rate meant?",
        "run.toml: max_ahead: unknown here; it belongs in [limits]",
        "run.toml: samples_per_chunk: N is needed, got 'many': should be a valid integer",
        "--out: needed, found none; give --out STREAM, or out in run.toml",
    } < set(found)


def test_a_problem_of_a_pattern_is_said_once() -> None:
    for number in range(5):
        Path(f"a{number}").touch()
    given = flags("--source a* --weight 0 --out o --samples-per-chunk 3")
    assert problems(given, None) == [
        "--weight: a0: a number above 0 is needed, got 0; for no rows of it leave the source out"
    ]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("--pattern *", "--pattern: it is for directories given with --follow, and there are none; leave it out"),
        (
            "--idle-seconds soon",
            "--idle-seconds: it is for directories given with --follow, and there are none; leave it out",
        ),
    ],
)
def test_flags_about_sources_that_are_not_there(arguments: str, problem: str) -> None:
    given = flags(f"--source a --out o --samples-per-chunk 3 {arguments}")
    assert problem in problems(given, None)


@pytest.mark.parametrize(
    ("line", "rows", "option", "text"),
    [
        ("--encode m:f --pack 8", "length_field = 'length'", "length_field", "--encode tells the tokens of a row"),
        ("--encode m:f --balance 3", "length_field = 'length'", "length_field", "--encode tells the tokens of a row"),
        ("", "length_field = 'length'", "length_field", "it is for --pack and --balance, and there is neither"),
        ("", "pack_buffer = 10000", "pack_buffer", "it is for --pack, and there is none"),
        ("", "pack_buffer_bytes = '1GiB'", "pack_buffer_bytes", "it is for --pack, and there is none"),
        ("", "micro_batch_size = 1", "micro_batch_size", "it is for --balance, and there is none"),
        ("", "cost_per_token = 1", "cost_per_token", "it is for --balance, and there is none"),
    ],
)
def test_a_default_that_is_given_is_refused_where_another_value_would_be(
    line: str, rows: str, option: str, text: str
) -> None:
    run = f"--source a --out o --samples-per-chunk 3 {line}"
    (problem,) = problems(flags(run), config(f"[rows]\n{rows}"))
    assert problem.startswith(f"run.toml: rows.{option}: {text}")
    flag, value = f"--{option.replace('_', '-')}", rows.partition(" = ")[2].strip("'")
    (problem,) = problems(flags(f"{run} {flag} {value}"), None)
    assert problem.startswith(f"{flag}: {text}")
    # Nobody has asked for it, and it is what it is by default.
    assemble(flags(run), None)


def test_a_default_that_is_given_where_it_counts_is_taken() -> None:
    run = "--source a --out o --samples-per-chunk 3 --pack 8 --balance 3"
    given = "--length-field length --pack-buffer 10000 --micro-batch-size 1"
    assert assemble(flags(f"{run} {given}"), None) == assemble(flags(run), None)


UNHELD = "nothing is deleted without --retain, so it has no effect; give --retain consumed with it, or leave it out"


def test_consumers_without_retain_are_refused() -> None:
    run = "--source a --out o --samples-per-chunk 3"
    assert problems(flags(f"{run} --consumers train"), None) == [f"--consumers: {UNHELD}"]
    file = config("[limits]\nconsumers = ['train']")
    assert problems(flags(run), file) == [f"run.toml: limits.consumers: {UNHELD}"]
    for retain in ("consumed", "5"):
        assert assemble(flags(f"{run} --consumers train --retain {retain}"), None).limits.consumers == ("train",)
    # That all are kept is said, over a file that says otherwise.
    file = config("[limits]\nretain = 'consumed'\nconsumers = ['train']")
    assert assemble(flags(f"{run} --retain all"), file).limits == Limits(consumers=("train",))
    # What the other mistake brings with it is not told.
    (problem,) = problems(flags(f"{run} --consumers train --retain consumd"), None)
    assert problem.startswith("--retain: ")


def test_a_flag_for_standard_input_and_pipes_alone() -> None:
    given = flags("--source a --source python:m:f --out o --samples-per-chunk 3 --resume append")
    assert problems(given, None) == ["--resume: it is for standard input and pipes, and there are none; leave it out"]
    os.mkfifo("a")
    given = flags("--source b a --out o --samples-per-chunk 3 --resume append")
    assert [source.resume for source in assemble(given, None).sources] == ["append", "append"]


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({"source": {"path": "a"}}, "x: source: tables [[source]] are needed, with two brackets on each side"),
        ({"source": ["a"]}, "x: source: tables [[source]] are needed, with two brackets on each side"),
        ({"limits": 3}, "x: limits: a table [limits] is needed, got 3"),
        ({"transform": {"workers": 3}}, "x: transform: unknown here; it belongs in [rows]"),
        ({"path": "a"}, "x: path: unknown here; it belongs in [[source]]"),
        (
            {"limits": {"rate": 3}},
            "x: limits.rate: unknown here; it belongs at the top of the file, before the first table",
        ),
        ({"limits": {"source": []}}, "x: limits.source: unknown here; it belongs as a table [[source]]"),
        ({"samples-per-chunk": 3}, "x: samples-per-chunk: unknown here; is samples_per_chunk meant?"),
        ({"rows": {"max_disk_": 3}}, "x: rows.max_disk_: unknown here; is max_disk meant, in [limits]?"),
        (
            {"limits": {"zzz": 3}},
            "x: limits.zzz: unknown here; known are max_ahead, max_disk, min_free_disk, retain, consumers",
        ),
        (
            {"zzz": 3},
            "x: zzz: unknown here; known are out, samples_per_chunk, rate, metrics_port, metrics_host, "
            "log_every_seconds, spool, max_spool, store_patience_seconds, [rows], [encoding], [limits], "
            "[[source]]",
        ),
    ],
)
def test_names_that_nobody_knows(document: dict[str, Any], problem: str) -> None:
    assert [f"{found.option}: {found.text}" for found in sort_config("x", document).problems] == [problem]


@pytest.mark.parametrize("path", [[], [1], 1, {"a": 1}])
def test_a_path_that_is_none(path: Any) -> None:
    file = sort_config("x", {"out": "o", "samples_per_chunk": 3, "source": [{"path": path}]})
    (found,) = problems(Flags(), file)
    assert found.startswith("x: [[source]] 1: path: a path or a list of paths is needed, got ")


def test_no_source_at_all() -> None:
    file = sort_config("x", {"out": "o", "samples_per_chunk": 3})
    (found,) = problems(Flags(), file)
    assert found.startswith("--source: at least one source is needed, got none")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"rate = \n", "no TOML: Invalid value (at line 1, column 8)"),
        (
            b"# x\nrate = none # no limit\n",
            'no TOML: Invalid value (at line 2, column 8); text has to be quoted: rate = "none"',
        ),
        (b"out = /a/b", 'no TOML: Invalid value (at line 1, column 7); text has to be quoted: out = "/a/b"'),
        (b"rate = 1\nrate = 2\n", "no TOML: Cannot overwrite a value"),
        (b"a = " + b"[" * 100_000, "no TOML: "),
        (b"\xff", "'utf-8' codec can't decode byte 0xff in position 0"),
    ],
)
def test_a_file_that_is_no_toml(data: bytes, reason: str) -> None:
    Path("run.toml").write_bytes(data)
    with pytest.raises(SettingInvalid) as error:
        read_config("run.toml")
    assert str(error.value).startswith(f"run.toml: cannot be read as a configuration file: {reason}")
    assert error.value.option == "--config"


@pytest.mark.parametrize("kind", ["missing", "directory"])
def test_a_file_that_cannot_be_read(kind: str) -> None:
    if kind == "directory":
        os.mkdir("run.toml")
    with pytest.raises(SettingInvalid, match=r"run\.toml: cannot be read as a configuration file: (No such|Is a dir)"):
        read_config("run.toml")


def test_a_byte_order_mark_is_no_part_of_the_file() -> None:
    Path("run.toml").write_bytes(b"\xef\xbb\xbfrate = 3\n")
    assert read_config("run.toml").values == {"rate": 3}


def test_python_3_10_without_tomli_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.version_info", (3, 10, 0))
    monkeypatch.setitem(__import__("sys").modules, "tomli", None)
    Path("run.toml").write_text("rate = 3\n")
    with pytest.raises(ExtraMissing, match=r"pip install 'lazyshard\[producer\]'") as error:
        read_config("run.toml")
    assert error.value.package == "tomli"


def test_tomli_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tomli", reason="tomli is installed for Python 3.10 only")
    expected = config(FULL)
    monkeypatch.setattr("sys.version_info", (3, 10, 0))
    assert config(FULL) == expected
