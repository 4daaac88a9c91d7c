"""However rows are mixed, made, ordered and put together: continuing after any of them gives the rest, each once."""

import contextlib
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from lazyshard_producer.configuration.settings import Settings
from lazyshard_producer.errors import SettingInvalid, SourceRefused, WorkerFailed, exit_code
from lazyshard_producer.rows.recipe import Workers
from tests.harness.processes.environment import ROOT, environment
from tests.producer.rows.draining import make, making, numbers, samples, take, write
from tests.stream.streams import raised

RECIPES = "tests.producer.recipes"
ENCODE = "tests.producer.recipes:tokenized"
TWICE = {"transform": f"{RECIPES}:twice"}
DEALT = {"balance": 2, "micro_batch_size": 2, "samples_per_chunk": 4}
PACKED_AND_DEALT = {"pack": 10, "balance": 2, "pack_buffer": 5}
FORMS: list[dict[str, Any]] = [
    *({}, {"shuffle": 1}, {"shuffle": 4}, {"shuffle": 100}, {"pad": 10}, {"pad": 10, "shuffle": 4}),
    *({"pack": 10, "pack_buffer": 5}, {"pack": 10, "pack_buffer_bytes": 1}, {"pack": 12, "pack_buffer_bytes": 300}),
    *({"balance": 1}, {"balance": 3}, {"pack": 10, "balance": 3, "pack_buffer_bytes": 300}, {"pack": 12, "balance": 1}),
    *(DEALT, PACKED_AND_DEALT),
]
FILES = ([6, 5, 4, 6, 5, 4, 3, 8], [3, 9])
MADE_TOGETHER: list[dict[str, Any]] = [
    *({"shuffle": 8}, {"pack": 10}, {"pack": 10, "balance": 2, "encode": ENCODE}, DEALT),
    *({"split": 4}, {"split": 4, "encode": ENCODE}),
]


@pytest.mark.timeout(400)  # 140 whole runs, each of which is continued after every row
@hypothesis_settings(max_examples=140, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_going_on_after_any_row(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = tmp_path_factory.mktemp("run")
    files = data.draw(st.lists(st.lists(st.integers(1, 10), max_size=14), min_size=1, max_size=3))
    form = data.draw(st.sampled_from(FORMS))
    weighted, encoded, bad = (data.draw(st.booleans()) for _ in range(3))
    transform = data.draw(st.sampled_from([None, "twice", "some", "none", "five"]))
    settings = make(
        directory / "out",
        write(directory, *files, bad=bad),
        [random.Random(file).uniform(0.1, 2) for file in range(len(files))] if weighted else None,
        encode=ENCODE if encoded else None,
        transform=transform and f"{RECIPES}:{transform}",
        on_bad_row="skip",
        seed=data.draw(st.integers(0, 3)),
        **form,
    )
    whole = list(take(settings))
    ids = [(file, number) for file, lengths in enumerate(files) for number in range(len(lengths))]
    tokens = iter(range(10, 1000))
    tokens_of = {(file, number): [next(tokens) for _ in range(files[file][number])] for file, number in ids}
    found = samples(whole)
    for sample in found:
        assert sample["length"] == len(tokens_of[tuple(sample["id"])])
        assert list(sample["input_ids"])[: sample["length"]] == tokens_of[tuple(sample["id"])]
    if transform == "some":
        # Of which a third is dropped and a third doubled: as many as before, but for the last ones.
        assert {tuple(sample["id"]) for sample in found} <= set(ids)
    else:
        times = {None: 1, "twice": 2, "none": 0, "five": 5}[transform]
        assert sorted(tuple(sample["id"]) for sample in found) == sorted(ids * times)
    for number, taken in enumerate(whole, 1):
        if form.keys() & {"pack", "balance", "pad"}:
            assert taken.tokens == sum(sample["length"] for sample in samples([taken]))
        if "pack" in form:
            assert taken.row["lengths"] == [sample["length"] for sample in taken.row["pack"]]
            assert taken.tokens is not None and taken.tokens <= form["pack"]
        # The same rows with the same positions, so seals come out the same too.
        assert list(take(settings, taken.position, number)) == whole[number:]


@pytest.mark.parametrize(
    "more",
    [
        {"shuffle": 6, "transform": f"{RECIPES}:some", "workers": 2},
        {**PACKED_AND_DEALT, "encode": ENCODE},
        {"split": 6, "split_eos": 1, "encode": ENCODE, **TWICE},
    ],
)
def test_workers_make_the_same_rows_and_positions(tmp_path: Path, more: dict[str, Any]) -> None:
    paths = write(tmp_path, [6, 5, 4, 5, 4, 9, 1], [2, 3, 2, 3], bad=True)
    there = make(tmp_path / "out", paths, on_bad_row="skip", **{"workers": 1, **more})
    here = list(take(make(tmp_path / "out", paths, on_bad_row="skip", **{**more, "workers": 0})))
    assert list(take(there)) == here
    middle = len(here) // 2
    assert list(take(there, here[middle].position, middle + 1)) == here[middle + 1 :]


def test_shuffled_order_is_pinned(tmp_path: Path) -> None:
    settings = make(tmp_path / "out", write(tmp_path, [1] * 10), shuffle=5, seed=7)
    assert numbers(list(take(settings))) == [3, 1, 4, 0, 2, 8, 6, 5, 7, 9]


def begun(settings: Settings) -> tuple[Any, int]:
    """The last position in the middle of rows that are made together, and the rows before it."""
    whole = list(take(settings))
    number = max(number for number, taken in enumerate(whole, 1) if taken.position["skip"])
    return whole[number - 1].position, number


@pytest.mark.parametrize(
    ("before", "in_the_middle", "changes"),
    [
        (TWICE, True, [{"transform": None}]),
        ({"shuffle": 8}, True, [{"shuffle": 9}, {"seed": 1}, {"where": f"{RECIPES}:even"}]),
        ({"pack": 10}, True, [{"pack": 11}, {"pack_buffer": 4}, {"pack_buffer_bytes": 99}, {"pack": 0}]),
        (DEALT, True, [{"balance": 4}, {"micro_batch_size": 1}, {"cost_per_token_squared": 1.0}, {"seed": 1}]),
        ({"pack": 10, "balance": 2}, True, [{"pack": 11}, {"balance": None}]),
        ({"split": 5}, True, [{"split": 7}, {"split_eos": 0}, {"split_overlap": 1}, {"shuffle": 2}, {"split": 0}]),
        # Rows of one kind do not follow those of another one anywhere.
        ({"split": 6}, False, [{"split": 0}, {"split": 0, "pad": 9}]),
        ({"where": f"{RECIPES}:even"}, False, [{"split": 6, "where": None}]),
        ({"pad": 9}, False, [{"pad": 0}]),
        ({"pack": 10}, False, [{"pack": 0}]),
        ({}, False, [{"pack": 10}]),
    ],
)
def test_what_may_not_change(
    tmp_path: Path, before: dict[str, Any], in_the_middle: bool, changes: list[dict[str, Any]]
) -> None:
    paths = write(tmp_path, *FILES)
    settings = make(tmp_path / "out", paths, **before)
    whole = list(take(settings))
    position, rows = begun(settings) if in_the_middle else (whole[-1].position, len(whole))
    for changed in changes:
        after = make(tmp_path / "out", paths, **{**before, **changed})
        refused = raised(SettingInvalid, list, take(after, position, rows))
        name = next(iter(changed))
        assert refused.option == ("--split" if name.startswith("split") else f"--{name.replace('_', '-')}")


def test_other_weights_are_refused_only_where_stripes_share_a_buffer(tmp_path: Path) -> None:
    paths = write(tmp_path, [10] * 9, [10] * 9)
    for more, refused in ((PACKED_AND_DEALT, True), ({"pack": 10, "pack_buffer": 6}, False)):
        fifth = list(take(make(tmp_path / "out", paths, [1, 2], **more)))[4]
        rest = take(make(tmp_path / "out", paths, [2, 1], **more), fifth.position, 5)
        if refused:
            raised(SettingInvalid, list, rest)
        else:
            assert len(list(rest)) == 13


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ({}, TWICE, f"transform (was None, now '{RECIPES}:twice')"),
        ({"pack": 10, "pack_buffer": 2}, {"pack": 12, "pack_buffer": 2}, "pack (was 10, now 12)"),
        ({"pack": 10, "pack_buffer": 2}, {"pack_patches": 9}, "pack_patches (was None, now 9)"),
        ({**DEALT, "samples_per_chunk": 2}, {"micro_batch_size": 1}, "micro_batch_size (was 2, now 1)"),
        ({**DEALT, "samples_per_chunk": 2}, {"cost_per_patch": 0.5}, "cost_per_patch (was None, now 0.5)"),
        ({"split": 11}, {"split": 15}, "split (was {'size': 11, 'overlap': 0}, now {'size': 15, 'overlap': 0})"),
    ],
)
def test_another_recipe_is_told(tmp_path: Path, before: dict[str, Any], after: dict[str, Any], told: str) -> None:
    paths, warnings = write(tmp_path, *FILES), list[str]()
    whole = list(take(make(tmp_path / "out", paths, **before)))
    number = next(number for number, taken in enumerate(whole, 1) if not taken.position["skip"])
    settings = make(tmp_path / "out", paths, **{**before, **after})
    rest = list(take(settings, whole[number - 1].position, number, warnings))
    assert [text.partition(": ")[2] for text in warnings] == [told]
    found = {token for one in samples([*whole[:number], *rest]) for token in one["input_ids"]}
    assert found == set(range(10, 10 + sum(map(sum, FILES))))


@pytest.mark.parametrize("form", MADE_TOGETHER)
@pytest.mark.parametrize("change", ["rows", "cut"])
def test_rows_changed_since_they_were_begun_are_refused(tmp_path: Path, form: dict[str, Any], change: str) -> None:
    (path,) = write(tmp_path, [3, 6, 5, 4, 2, 7])
    settings = make(tmp_path / "out", [path], **form)
    position, rows = begun(settings)
    text = path.read_bytes()
    if change == "cut":
        path.write_bytes(text.splitlines(keepends=True)[0])
    elif form is DEALT:
        # The order follows from every length, also of those that are not published.
        path.write_bytes(text.replace(b'"length":', b'"length":7'))
    else:
        path.write_bytes(text.replace(b'"input_ids":[', b'"input_ids":[9'))
    refused = raised(SourceRefused, lambda: list(take(settings, position, rows)))
    assert refused.file == str(path)


@pytest.mark.parametrize("form", [{"shuffle": 8}, {"pack": 10}, {"pack": 10, "pack_buffer": 4, "balance": 4}, DEALT])
def test_what_is_begun_stays_as_it_was_though_its_file_has_grown(tmp_path: Path, form: dict[str, Any]) -> None:
    lengths = [9, 8, 7, 6, 5, 4]
    (path,) = write(tmp_path, lengths)
    settings = make(tmp_path / "out", [path], **form)
    before = list(take(settings))
    write(tmp_path, [*lengths, 3, 2])
    for number, taken in enumerate(before[:-1], 1):
        after = list(take(settings, taken.position, number))
        of_before = len(before) - number
        assert [one.line for one in after[:of_before]] == [one.line for one in before[number:]]
        assert sorted(numbers(after[of_before:])) == [6, 7]
        if number == 1:
            for more in range(1, len(after)):
                assert list(take(settings, after[more - 1].position, number + more)) == after[more:]


def test_a_worker_that_is_killed_ends_the_run() -> None:
    with contextlib.closing(Workers(making(transform=f"{RECIPES}:dies"), 1)) as workers:
        work = workers.submit([b"{}"], 0)
        with pytest.raises(WorkerFailed) as failed:
            while workers.result(work, 1.0) is None:
                pass
        assert exit_code(failed.value) == 8
        raised(WorkerFailed, workers.submit, [b"{}"], 1)


def test_closing_in_the_middle_of_what_workers_send_leaves_no_thread() -> None:
    before = threading.enumerate()
    workers = Workers(making(transform=f"{RECIPES}:large"), 2)
    under_way = [workers.submit([b"{}"] * 4, 4 * index) for index in range(8)]
    while workers.result(under_way[0], 1.0) is None:
        pass
    workers.close()
    assert threading.enumerate() == before


PROGRAM = """
import os, signal, sys
from lazyshard_producer.rows.recipe import Workers
from tests.producer.rows.draining import making
if __name__ == "__main__":
    workers = Workers(making(transform="tests.producer.recipes:twice"), 1)
    work = workers.submit([b"{}"], 0)
    # A process that is started takes far longer to come to its work than this one to its end.
    print("Made" if sys.argv[1] == "kill at once" else workers.result(work, 60), *workers._pool._processes, flush=True)
    if sys.argv[1] != "close":
        os.kill(os.getpid(), signal.SIGKILL)
    workers.close()
"""


@pytest.mark.parametrize("how", ["kill", pytest.param("kill at once", marks=pytest.mark.full), "close"])
def test_no_worker_is_left_behind(tmp_path: Path, how: str) -> None:
    program, pipe = tmp_path / "program.py", subprocess.PIPE
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), how]
    # The pipe is at its end when the last process that has it has gone.
    with subprocess.Popen(command, env=environment(), cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        out, err = process.communicate(timeout=60)
    # Nor does Python's resource tracker complain of semaphores that it removes.
    assert ("Made" in out, err) == (True, "")
    # What is left is no more than an exit status, which nobody may come to read.
    with contextlib.suppress(FileNotFoundError):
        assert Path(f"/proc/{out.split()[-1]}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
