"""`lazyshard trace`: literal answers and exit codes; over blends what each stream has given, as it was read."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lazyshard.part import Part
from lazyshard.stream.listing import retire
from lazyshard.stream.stream import open_now
from tests.cli.commands import commit, lazyshard, make_stream, run_of, save, two_ranks
from tests.data.runs import State, Stream, blend, take, write
from tests.harness.processes.producing import run as produce
from tests.stream.streams import sequence, write_pieces

Run = tuple[Path, Path]
STREAMS = (Stream("a", 120, 6), Stream("b", 90, 5), Stream("c", 80, 4))
WEIGHTS = st.dictionaries(st.sampled_from("abc"), st.integers(1, 3), min_size=1).map(lambda one: {"a": 1, **one})
STAGE = st.tuples(st.integers(1, 3), WEIGHTS, st.integers(1, 2))
Stages = list[tuple[int, dict[str, float], int]]
Seen = dict[tuple[str, int], list[str]]  # What each rank has read at each step, by letter and step from 1


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Two steps of two ranks, two of three; the first skipped sample is 16."""
    stream = tmp_path / "stream"
    parts = [two_ranks(2), Part(3, 1, 2, skip=((16, 18),), first_step=2, draws_per_step=1)]
    return stream, save(tmp_path / "out", 4, run_of(make_stream(stream), *parts))


def told(run: Run, *arguments: object, code: int = 0) -> list[str]:
    stream, checkpoint = run
    done = lazyshard("trace", stream, "--state", checkpoint, *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (code, int(code > 0)), done
    return done.stdout.splitlines() if code == 0 else [done.stderr]


def values(run: Run, *arguments: object) -> list[dict[str, Any]]:
    return [json.loads(line) for line in told(run, *arguments, "--json")]


def test_steps_over_a_change_of_ranks_and_their_rows(run: Run) -> None:
    lines = told(run, "--step", "2:6")
    drawn = {step: [int(line.split()[5]) for line in lines[1:-1] if line.split()[0] == step] for step in "2345"}
    assert drawn == {"2": [2, 6, 5, 9], "3": [7, 10, 11], "4": [8, 15, 20], "5": [12, 18, 21]}
    assert lines[0] == "step  part  rank  position  epoch  sample  chunk  row"
    assert lines[-2] == "   5     1     2         2      0      21      7    0  to come"
    assert lines[-1].startswith("The state has trained 4 steps; ")
    assert "These steps reach epoch 7, beyond the end of epoch 0" in told(run, "--step", 50)[-1]
    one = ("--step", 3, "--rank", 1, "--rows")
    assert json.loads("\n".join(told(run, *one)[2:])) == {"id": 10, "text": "row 10"}
    assert told(run, *one, "--json") == [
        '{"step": 3, "part": 1, "rank": 1, "position": 0, "epoch": 0, "sample": 10, "chunk": 3, "row": 1, '
        '"became": "trained", "deleted": false, "byte": 24, "bytes": 26, "tokens": null, '
        '"value": {"id":10,"text":"row 10"}}'
    ]


def test_the_course_of_a_run_and_the_fates_of_samples(run: Run) -> None:
    assert told(run)[-1] == "skipped from part 1 on: 2 samples: 16 to 17"
    [found] = values(run)
    assert (found["steps"], found["consumed"], found["epochs"], found["total"]) == (4, 14, [0, 0], 24)
    assert told(run, "--sample", "8,12,16") == [
        "sample 8: chunk 2, row 2",
        "  epoch 0: trained at step 4 by rank 0 (part 1, position 1)",
        "sample 12: chunk 4, row 0",
        "  epoch 0: to come at step 5, on rank 0, if the run continues unchanged (part 1, position 2)",
        "sample 16: chunk 5, row 1",
        "  epoch 0: skipped on purpose from part 1 on",
    ]
    assert told(run, "--chunk", 5, "--row", 1, "--json") == [
        '{"step": null, "part": 1, "rank": null, "position": null, "epoch": 0, "sample": 16, "chunk": 5, "row": 1, '
        '"became": "skipped", "deleted": false, "fewer_than_step": null}'
    ]


def test_a_sample_in_a_step_that_its_epoch_does_not_fill_may_be_left_over(tmp_path: Path) -> None:
    """Two steps of 8 and one of 6 leave 22 and 23 of 24, and the next step takes 4 of the next epoch as well."""
    stream = tmp_path / "stream"
    parts = [Part(2, 2, 8, draws_per_step=4), Part(1, 2, 6, first_step=2, draws_per_step=6)]
    run = stream, save(tmp_path / "out", 3, run_of(make_stream(stream), *parts))
    trained, coming = told(run, "--sample", "21,22")[1::2]
    assert "trained at step 3 by rank 0 (part 1, position 5)" in trained
    assert "to come at step 4, on rank 0" in coming and "fewer samples left than the 6 of that step" in coming
    assert [one["fewer_than_step"] for one in values(run, "--sample", "21,22")] == [None, 6]


def test_texts(run: Run) -> None:
    assert told(run, "--text", "row 11")[0] == "sample 11: chunk 3, row 2"
    lines = told(run, "--text", "row")
    assert (len(lines), "--all" in lines[-1]) == (41, True)
    assert len(told(run, "--text", "row", "--all")) == 48
    told(run, "--text", "nobody", code=3)


def test_deleted_chunks_are_still_told_of_and_not_searched(run: Run) -> None:
    retire(run[0], 3, 8)
    lines = told(run, "--sample", 6, "--rows")
    assert lines[1] == "  epoch 0: trained at step 2 by rank 0 (part 0, position 3)"
    assert (len(lines), "below 3" in lines[0], "deleted" in lines[2]) == (3, True, True)
    [found] = values(run, "--sample", 6, "--rows")
    assert (found["deleted"], found["value"]) == (True, None)
    assert told(run, "--text", "row 11")[-1].startswith("3 chunks not searched")
    assert "3 chunks not searched" in told(run, "--text", "row 1,", code=3)[0]


def test_the_only_cursor_is_taken(tmp_path: Path) -> None:
    commit(tmp_path, run_of(make_stream(tmp_path, 18, end=False), two_ranks(2)))
    done = lazyshard("trace", tmp_path, "--sample", "4,7,19", "--json")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(one["step"], one["became"]) for one in found] == [(1, "trained"), (3, "to come"), (None, "not published")]
    commit(tmp_path, None, consumer="other")
    done = lazyshard("trace", tmp_path, "--sample", 4)
    assert (done.returncode, "other, sft" in done.stderr) == (2, True)
    for name, code in (("other", 3), ("third", 3), ("sft", 0)):
        assert lazyshard("trace", tmp_path, "--consumer", name).returncode == code


@pytest.fixture
def produced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    (tmp_path / "in.jsonl").write_text("".join(f'{{"id":{number}}}\n' for number in range(23)))
    done = produce("run", "--source", "in.jsonl", "--out", "stream", "--samples-per-chunk", 3, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    stream_id = open_now(tmp_path / "stream").stream_id
    return tmp_path / "stream", save(tmp_path / "out", 2, run_of(stream_id, two_ranks(2)))


def test_origins_of_steps_and_samples(produced: Run) -> None:
    lines = told(produced, "--step", 2, "--rank", 0, "--origins")
    assert [line.split()[-1] for line in lines[1:]] == ["in.jsonl:3", "in.jsonl:7"]
    assert told(produced, "--sample", 6, "--origins")[2] == "  from in.jsonl:7"
    for more in ([], ["--rows"]):
        [found] = values(produced, "--sample", 6, "--origins", *more)
        assert found["origins"] == [{"path": "in.jsonl", "lines": [7], "among": [7, 10], "why": None}]
    assert "origins" not in values(produced, "--sample", 6)[0]
    Path("in.jsonl").unlink()
    assert told(produced, "--sample", 6, "--origins")[2].startswith("  from in.jsonl, lines 7 to 9 (")


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("traced")
    for stream in STREAMS:
        write(directory, stream)
    return directory


def trained(directory: Path, stages: Stages, **options: Any) -> tuple[Seen, State]:
    state: State | None = None
    seen: Seen = defaultdict(list)
    step = 0
    for dp, weights, steps in stages:
        more = {"num_samples": 9000, "batch_size": 2, "micro_batches_per_step": 2, **options}
        ranks = [blend(directory, weights, rank, dp, state, **more) for rank in range(dp)]
        for one in ranks:
            for place, row in enumerate(take(one, 4 * steps, 2)):
                seen[row[0], step + place // 4 + 1].append(row)
        state = ranks[0].state_dict(ranks[0].consumed + dp * 4 * steps)
        step += steps
    assert state is not None
    return seen, state


def save_blend(place: Path, step: int, state: State) -> Path:
    folder = place / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "lazyshard.json").write_text(json.dumps({"state": state, "step": step, "consumed": state["consumed"]}))
    return folder


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(STAGE, min_size=1, max_size=3), st.sampled_from([0, 2]))
def test_what_was_read(streams: Path, tmp_path_factory: pytest.TempPathFactory, stages: Stages, window: int) -> None:
    seen, state = trained(streams, stages, shuffle_window=window)
    steps = sum(stage[2] for stage in stages)
    file = save_blend(tmp_path_factory.mktemp("out"), steps, state)
    letters = {letter for _, weights, _ in stages for letter in weights}
    for letter in letters:
        drawn_at = defaultdict(list)
        for drawn in values((streams / letter, file), "--step", f"1:{steps + 1}"):
            assert drawn["became"] == "trained"
            drawn_at[letter, drawn["step"]].append(f"{letter}{drawn['sample']}")
        assert drawn_at == {key: rows for key, rows in seen.items() if key[0] == letter}
        samples = {int(row[1:]): key[1] for key, rows in seen.items() if key[0] == letter for row in rows}
        asked = ",".join(map(str, samples))
        if asked:
            fates = values((streams / letter, file), "--sample", asked)
            assert {one["sample"]: one["step"] for one in fates if one["became"] == "trained"} == samples


def test_what_is_to_come_and_what_is_left_out(streams: Path, tmp_path: Path) -> None:
    _, state = trained(streams, [(1, {"a": 1, "b": 1}, 2), (1, {"a": 1, "c": 1}, 1)])
    file = save_blend(tmp_path, 3, state)
    for letter, sample, became, step in (("c", "4", "to come", 5), ("b", "7", "left out", None)):
        (found,) = values((streams / letter, file), "--sample", sample)
        assert (found["became"], found["step"]) == (became, step)
    assert values((streams / "b", file), "--step", "3:6") == []
    assert told((streams / "b", file), "--step", "3:6")[1:] == ["No sample of this stream was drawn at steps 3 to 5."]
    left_out = told((streams / "b", file), "--sample", "7")[1]
    assert left_out == "  epoch 0: not trained: its stream is no longer in the blend"


def test_the_parts_of_a_run(streams: Path, tmp_path: Path) -> None:
    _, state = trained(streams, [(1, {"a": 3, "b": 1}, 2), (2, {"a": 1, "b": 1}, 1), (1, {"a": 1}, 1)])
    file = save_blend(tmp_path, 4, state)
    lines = told((streams / "a", file))
    assert lines[0].endswith(": 14 samples trained in 4 steps, the last of them in epoch 0")
    assert "blend of 1 stream with 20 samples trained; this stream's share is 100.00% now" in lines[1]
    assert [line.split()[-2:] for line in lines[3:]] == [["6", "6"], ["2", "4"], ["4", "4"]]
    lines = told((streams / "b", file))
    assert "6 samples trained in 4 steps" in lines[0] and "without this stream now" in lines[1]


def test_an_audit_of_each_stream(streams: Path, tmp_path: Path) -> None:
    stages: Stages = [(1, {"a": 1, "b": 1}, 2), (2, {"a": 1, "b": 1, "c": 2}, 2)]
    for count in (1, 2):
        save_blend(tmp_path, 2 * count, trained(streams, stages[:count])[1])
    for letter in "abc":
        done = lazyshard("audit", streams / letter, tmp_path, "--json")
        found = json.loads(done.stdout)
        assert (done.returncode, found["steps"], found["consumed"]) == (0, 4, 8)
    other = write(tmp_path, Stream("z", 4, 2))
    assert lazyshard("audit", other, tmp_path).returncode == 3
    assert lazyshard("trace", other, "--state", tmp_path / "checkpoint-2").returncode == 5


def test_rows_of_a_stream_that_no_run_has_read(tmp_path: Path) -> None:
    write_pieces(stream := tmp_path / "s", "a", 9, 1)
    sequence(stream)
    done = lazyshard("trace", stream, "--chunk", 1, "--row", 2)
    assert (done.returncode, done.stderr) == (0, "")
    place, unknown, origin = done.stdout.splitlines()
    assert (place, origin) == ("sample 6: chunk 1, row 2", f"  from row 6 of writer a: {tmp_path}/a.jsonl:7")
    assert "--state" in unknown
    commit(stream, None)
    for question in (("--sample", 6), ("--source", f"{tmp_path}/a.jsonl:L7"), ("--text", "a-6")):
        (one,) = map(json.loads, lazyshard("trace", stream, *question, "--json").stdout.splitlines())
        assert (one["sample"], one["chunk"], one["row"], one["became"]) == (6, 1, 2, None)
        assert (one["writer"], one["writer_row"], one["origins"][0]["lines"]) == ("a", 6, [7])
    assert lazyshard("trace", stream, "--sample", 9).returncode == 2
    assert [lazyshard("trace", stream, *more).returncode for more in ([], ["--step", 1])] == [3, 3]
    assert lazyshard("trace", stream, "--sample", 6, "--consumer", "sft").returncode == 3
