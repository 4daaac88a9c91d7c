"""`lazyshard audit`: histories that are in order are proven, and each mutation of a state is found or refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lazyshard.cli.main import main
from lazyshard.format.state import PartState, RunState
from lazyshard.stream.retire import retire
from tests.cli.commands import lazyshard
from tests.cli.traced_runs import changed, commit, make_stream, run_of, save, two_ranks, with_parts

THREE = PartState(3, 1, 2, first_step=2, draws_per_step=1)
"""Two steps of three ranks, after two steps of two."""


def report(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str], str]:
    code = main(["audit", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out.splitlines(), err


@pytest.fixture
def history(tmp_path: Path) -> tuple[Path, RunState]:
    """A run of two starts: checkpoints 1 and 2 of two ranks, 4 of three. Returns the stream and the newest state."""
    stream_id = make_stream(tmp_path / "stream")
    state = run_of(stream_id, two_ranks(2), THREE)
    for steps in (1, 2):
        save(tmp_path / "out" / "v0-20251121-101500", steps, run_of(stream_id, two_ranks(steps)))
    save(tmp_path / "out" / "v1-20251121-111500", 4, state)
    commit(tmp_path / "stream", state)
    return tmp_path / "stream", state


def test_a_history_that_is_in_order_is_proven(history: tuple[Path, RunState]) -> None:
    stream, _ = history
    out = stream.parent / "out"
    done = lazyshard("audit", stream, out)
    assert (done.returncode, done.stderr) == (0, "")
    width = len(f"{out}/v0-20251121-101500/checkpoint-1")
    assert done.stdout.splitlines() == [
        f"{stream}: 8 chunks, 24 samples, ended",
        f"  {out}/v0-20251121-101500/checkpoint-1  on the course  4 samples in 1 step",
        f"  {out}/v0-20251121-101500/checkpoint-2  on the course  8 samples in 2 steps",
        f"  {f'{stream}/cursors/sft.json':{width}}  on the course  14 samples in 4 steps",
        f"  {out}/v1-20251121-111500/checkpoint-4  audited        14 samples in 4 steps",
        "epoch 0: 24 samples: 14 trained, 9 to come, 1 left over (23)",
        "proven: no sample was trained twice, and none was passed over",
    ]


def test_a_branch_that_was_given_up_is_told_apart(
    history: tuple[Path, RunState], capsys: pytest.CaptureFixture[str]
) -> None:
    """Lanes 0 1 2 6 | 7 8 and 3 4 5 9 | 10 11, of which the three ranks trained 7 8, 10 and 11 again."""
    stream, state = history
    out = stream.parent / "out"
    save(out / "v0-20251121-101500", 3, run_of(state.stream_id, two_ranks(3)))
    code, lines, _ = report(capsys, stream, out)
    assert code == 0
    assert f"  {out}/v0-20251121-101500/checkpoint-3  abandoned      12 samples in 3 steps" in lines
    assert lines[-4:] == [
        f"{out}/v0-20251121-101500/checkpoint-3 left the course after 8 samples: it trained 4 more, which are not in "
        f"the audited model",
        "  4 of them were trained again on the course in epoch 0: 7 to 8, 10 to 11",
        "epoch 0: 24 samples: 14 trained, 9 to come, 1 left over (23)",
        "proven: no sample was trained twice, and none was passed over",
    ]


def test_another_state_is_audited_on_request(
    history: tuple[Path, RunState], capsys: pytest.CaptureFixture[str]
) -> None:
    stream, _ = history
    out = stream.parent / "out"
    code, lines, _ = report(capsys, stream, out, "--state", out / "v0-20251121-101500/checkpoint-1")
    assert code == 0
    assert [line.split()[1] for line in lines[1:5]] == ["audited", "beyond", "beyond", "beyond"]
    assert lines[5] == "epoch 0: 24 samples: 4 trained, 20 to come"


def test_what_was_skipped_and_left_over_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream_id = make_stream(tmp_path / "stream")
    parts = [
        PartState(2, 2, 2, draws_per_step=2),
        PartState(2, 2, 2, trained=False, first_step=1, draws_per_step=2),
        PartState(2, 2, 6, skip=((8, 9),), first_step=1, draws_per_step=2),
    ]
    save(tmp_path / "out", 4, run_of(stream_id, *parts))
    assert report(capsys, tmp_path / "stream", tmp_path / "out")[1][-2] == (
        "epoch 0: 24 samples: 16 trained, 3 left over (19 to 20, 23), 5 skipped on purpose (2, 5 to 6, 8 to 9)"
    )


def test_json(history: tuple[Path, RunState], capsys: pytest.CaptureFixture[str]) -> None:
    stream, state = history
    out = stream.parent / "out"
    save(out, 3, run_of(state.stream_id, two_ranks(3)))
    code, lines, _ = report(capsys, stream, out, "--json")
    assert (code, len(lines)) == (0, 1)
    values = json.loads(lines[0])
    assert [one["relation"] for one in values.pop("states")] == [
        "on the course",
        "on the course",
        "abandoned",
        "on the course",
        "audited",
    ]
    [epoch] = values.pop("epochs")
    assert epoch == {
        "epoch": 0,
        "proven": True,
        "samples": 24,
        "trained": 14,
        "to_come": {"samples": 9, "ranges": [[12, 15], [16, 18], [19, 23]]},
        "left_over": {"samples": 1, "ranges": [[23, 24]]},
        "skipped": {"samples": 0, "ranges": []},
        "twice": {"samples": 0, "ranges": []},
        "again": {"samples": 0, "ranges": []},
        "missing": {"samples": 0, "ranges": []},
        "fewer_than_step": None,
    }
    assert values == {
        "stream": str(stream),
        "ok": True,
        "proven": True,
        "consistent": True,
        "stream_id": state.stream_id,
        "samples_per_chunk": 3,
        "chunks": 8,
        "samples": 24,
        "ended": True,
        "retired": 0,
        "audited": f"{out}/v1-20251121-111500/checkpoint-4/lazyshard.json",
        "consumed": 14,
        "steps": 4,
        "findings": [],
        "notes": [],
    }


def without_first_part(state: RunState) -> RunState:
    return with_parts(state, state.parts[1:])


def begun_again(state: RunState) -> RunState:
    return with_parts(state, [*state.parts, PartState(2, 1, 2, 0, first_step=4, draws_per_step=2)])


@pytest.mark.parametrize(
    ("mutate", "expected"),
    [
        # Ahead and behind: by a step, by a micro batch.
        (lambda state: changed(state, 1, draws=3), "it is of step 4, but the state has trained 5 steps"),
        (lambda state: changed(state, 1, draws=1), "it is of step 4, but the state has trained 3 steps"),
        (lambda state: changed(state, 0, draws=5), "part 0 ends within a step: 5 draws a rank"),
        # Draws of an earlier part.
        (lambda state: changed(state, 0, draws=6), "part 1 begins after 2 steps, the parts before it have 3"),
        (without_first_part, "part 0 begins after 2 steps, the parts before it have 0"),
        (lambda state: replace(state, seed=1), "seed 0, not 1: it drew in another order, so it is of another run"),
        (lambda state: replace(state, unit=1), "unit 3, not 1: it drew in another order"),
        (begun_again, "epoch 0: 4 samples were trained more than once"),
    ],
)
def test_mutations_of_the_newest_state_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mutate: Callable[[RunState], RunState], expected: str
) -> None:
    stream_id = make_stream(tmp_path / "stream")
    save(tmp_path / "out", 1, run_of(stream_id, two_ranks(1)))
    save(tmp_path / "out", 4, mutate(run_of(stream_id, two_ranks(2), THREE)))
    code, lines, _ = report(capsys, tmp_path / "stream", tmp_path / "out")
    assert code == 5
    assert any(expected in line for line in lines if line.startswith("not in order: ")), lines


def test_samples_that_were_trained_twice_or_passed_over_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream_id = make_stream(tmp_path / "stream")
    state = run_of(stream_id, two_ranks(2), PartState(2, 1, 2, 0, first_step=2, draws_per_step=2))
    save(tmp_path / "out", 3, state)
    code, lines, _ = report(capsys, tmp_path / "stream", tmp_path / "out")
    assert code == 5
    file = f"{tmp_path}/out/checkpoint-3/lazyshard.json"
    assert lines[-4:] == [
        "epoch 0: 24 samples: 8 trained, 16 to come, 4 TRAINED TWICE (0 to 1, 3 to 4), 4 TRAINED AND COMING AGAIN "
        "(2, 5 to 6, 9)",
        f"not in order: {file}: epoch 0: 4 samples were trained more than once",
        f"not in order: {file}: epoch 0: 4 samples were trained and come again",
        "NOT proven: see what is trained twice or passed over",
    ]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"state": {"parts": []}}, "field 'state.parts': expected at least one part"),
        ({"state": {"consumed": 13}}, "field 'state.consumed': expected 14, the sum of dp * draws"),
        ({"consumed": 13}, "expected consumed = 14 as in the state, found 13"),
        ({"step": 5}, "it is of step 5, but the state has trained 4 steps"),
        ({"state": {"stream_id": "f" * 32}}, "of stream ffffffffffffffffffffffffffffffff, not of"),
    ],
)
def test_damaged_checkpoints_are_found(
    history: tuple[Path, RunState], capsys: pytest.CaptureFixture[str], change: dict[str, Any], expected: str
) -> None:
    stream, state = history
    out = stream.parent / "out"
    file = save(out, 4, state, saved_at=50.0) / "lazyshard.json"
    values = json.loads(file.read_text())
    state_values = values["state"] | change.get("state", {})
    file.write_text(json.dumps(values | change | {"state": state_values}))
    code, lines, _ = report(capsys, stream, out)
    assert code == 5
    assert any(expected in line for line in lines), lines
    assert "proven: " in lines[-1]


def test_a_checkpoint_ahead_of_a_live_stream_is_found_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream_id = make_stream(tmp_path / "stream", 12, end=False)
    save(tmp_path / "out", 2, run_of(stream_id, two_ranks(2)))
    save(tmp_path / "out", 5, run_of(stream_id, two_ranks(5)), saved_at=1.0)
    code, lines, _ = report(capsys, tmp_path / "stream", tmp_path / "out")
    assert code == 5
    assert any("has drawn what needs 24 samples, but 12 are published" in line for line in lines)
    code, lines, err = report(capsys, tmp_path / "stream", "--state", tmp_path / "out" / "checkpoint-5")
    assert (code, lines) == (5, [])
    assert "it is ahead of the stream, which may be an older copy" in err


def test_a_live_stream_is_counted_as_far_as_it_is_published(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream_id = make_stream(tmp_path / "stream", 15, end=False)
    save(tmp_path / "out", 2, run_of(stream_id, two_ranks(2)))
    code, lines, _ = report(capsys, tmp_path / "stream", tmp_path / "out")
    assert (code, lines[-2]) == (0, "epoch 0: 15 samples published so far: 8 trained, 7 to come")


def test_chunks_that_only_older_checkpoints_need_may_go(
    history: tuple[Path, RunState], capsys: pytest.CaptureFixture[str]
) -> None:
    """Checkpoints 1 and 2 stand in the first stripes, whose chunks are 0 to 3; checkpoint 4 needs chunk 4."""
    stream, state = history
    out = stream.parent / "out"
    commit(stream, state, chunks_before=2)
    code, lines, _ = report(capsys, stream, out)
    assert code == 0
    assert (
        f"note: {out}/v0-20251121-101500/checkpoint-1/lazyshard.json: may soon no longer be gone on from: needs chunk "
        f"0, and those below 2 may be deleted, by the run's cursor" in lines
    )
    assert lines[-1] == "proven: no sample was trained twice, and none was passed over"
    retire(stream, 2, 8)
    code, lines, _ = report(capsys, stream, out)
    assert (code, lines[0]) == (0, f"{stream}: 8 chunks, those below 2 deleted, 24 samples, ended")
    told = f"{out}/v0-20251121-101500/checkpoint-1/lazyshard.json"
    what = "can no longer be gone on from: needs chunk 0, and those below 2 are deleted"
    assert f"note: {told}: {what}" in lines
    assert not any("checkpoint-4/lazyshard.json" in line for line in lines)
    values = json.loads(report(capsys, stream, out, "--json")[1][0])
    assert (values["ok"], {"where": told, "what": what, "files": []} in values["notes"]) == (True, True)


def test_checkpoints_whose_chunks_go_are_told_in_one_note(
    history: tuple[Path, RunState], capsys: pytest.CaptureFixture[str]
) -> None:
    """As the checkpoints of a run that lasts are hundreds."""
    stream, state = history
    out = stream.parent / "out"
    commit(stream, state, chunks_before=4)
    first, second = (f"{out}/v0-20251121-101500/checkpoint-{steps}" for steps in (1, 2))
    code, lines, _ = report(capsys, stream, out)
    assert (code, [line for line in lines if line.startswith("note: ")]) == (
        0,
        [
            f"note: {stream}: 2 checkpoints may soon no longer be gone on from: they need chunks from 0 on, and those "
            f"below 4 may be deleted, by the run's cursor: {first}, {second}"
        ],
    )
    retire(stream, 4, 8)
    what = "2 checkpoints can no longer be gone on from: they need chunks from 0 on, and those below 4 are deleted"
    files = [f"{first}/lazyshard.json", f"{second}/lazyshard.json"]
    notes = json.loads(report(capsys, stream, out, "--json")[1][0])["notes"]
    assert notes == [{"where": str(stream), "what": f"{what}: {first}, {second}", "files": files}]


def test_of_many_checkpoints_whose_chunks_go_a_few_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream_id = make_stream(tmp_path / "stream")
    for steps in range(1, 7):
        save(tmp_path / "out", steps, run_of(stream_id, two_ranks(steps)))
    commit(tmp_path / "stream", run_of(stream_id, two_ranks(6)), chunks_before=8)
    notes = json.loads(report(capsys, tmp_path / "stream", tmp_path / "out", "--json")[1][0])["notes"]
    assert [len(note["files"]) for note in notes] == [5]
    assert notes[0]["what"].endswith(f"/out/checkpoint-2, {tmp_path}/out/checkpoint-3 and 2 more")


def test_what_is_too_little_for_a_step_is_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two steps of 8 and one of 6 leave 3: a micro batch of 2, which no step takes that is whole, and one sample."""
    stream_id = make_stream(tmp_path / "stream", 25)
    parts = [PartState(2, 2, 8, draws_per_step=4), PartState(1, 2, 6, first_step=2, draws_per_step=6)]
    save(tmp_path / "out", 3, run_of(stream_id, *parts))
    code, lines, _ = report(capsys, tmp_path / "stream", tmp_path / "out")
    assert (code, lines[-2]) == (
        0,
        "epoch 0: 25 samples: 22 trained, 2 to come (fewer than the 6 of a step: left over too, if training stops "
        "here), 1 left over (24)",
    )
    [epoch] = json.loads(report(capsys, tmp_path / "stream", tmp_path / "out", "--json")[1][0])["epochs"]
    assert (epoch["to_come"]["samples"], epoch["fewer_than_step"]) == (2, 6)


def test_chunks_that_the_newest_checkpoint_needs_must_be_kept(
    history: tuple[Path, RunState], capsys: pytest.CaptureFixture[str]
) -> None:
    stream, state = history
    out = stream.parent / "out"
    commit(stream, state, chunks_before=7)
    newest = f"{out}/v1-20251121-111500/checkpoint-4/lazyshard.json"
    code, lines, _ = report(capsys, stream, out)
    assert code == 5
    [found] = [line for line in lines if line.startswith("not in order: ")]
    assert found.startswith(
        f"not in order: {stream}/cursors/sft.json: it lets the chunks below 7 be deleted, but {newest} needs chunk "
    )
    assert lines[-1] == (
        "proven: no sample was trained twice, and none was passed over; but 1 thing not in order, see above"
    )
    retire(stream, 7, 8)
    code, lines, _ = report(capsys, stream, out)
    assert code == 5
    assert any(line.startswith(f"not in order: {newest}: it cannot be gone on from: that needs") for line in lines)


def test_cursors_that_are_not_looked_at_are_named(
    history: tuple[Path, RunState], capsys: pytest.CaptureFixture[str]
) -> None:
    stream, state = history
    plain = stream.parent / "checkpoint-4" / "lazyshard.json"
    plain.parent.mkdir()
    plain.write_bytes(state.encode())
    commit(stream, state, consumer="other")
    code, lines, _ = report(capsys, stream, plain)
    assert code == 0
    assert (
        f"note: {stream}: no cursor is looked at: there are those of other, sft, and the checkpoints name none; name "
        f"one with --consumer" in lines
    )
    assert not any(line.startswith("note: ") for line in report(capsys, stream, plain, "--consumer", "sft")[1])
    save(stream.parent / "named", 4, state, consumer="gone")
    assert (
        f"note: {stream}: no cursor is looked at: the checkpoints are of gone, and there are the cursors of other, "
        f"sft; name the run's with --consumer" in report(capsys, stream, stream.parent / "named")[1]
    )


def test_a_count_that_no_steps_bear_out_is_consistent_and_not_proven(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks trained 0 to 11, then 2 to 13: the first loop counted the samples of one rank for those of both."""
    stream_id = make_stream(tmp_path / "stream")
    blind = run_of(stream_id, PartState(2, 1, 3), PartState(2, 1, 6))
    saved = save(tmp_path / "blind", 12, blind)
    code, lines, _ = report(capsys, tmp_path / "stream", tmp_path / "blind")
    assert (code, lines[-1].split(":")[0]) == (9, "consistent, if `consumed` was counted right")
    values = json.loads(report(capsys, tmp_path / "stream", tmp_path / "blind", "--json")[1][0])
    assert (values["ok"], values["consistent"], values["proven"]) == (True, True, False)
    # With steps it is found, where something says how many there were.
    seeing = run_of(stream_id, PartState(2, 1, 3, draws_per_step=1), PartState(2, 1, 6, first_step=3, draws_per_step=1))
    save(tmp_path / "seeing", 12, seeing)
    assert report(capsys, tmp_path / "stream", tmp_path / "seeing")[0] == 5
    (saved / "lazyshard.json").write_bytes(seeing.encode())
    (tmp_path / "state.json").write_bytes(seeing.encode())
    assert report(capsys, tmp_path / "stream", saved)[0] == 5
    assert report(capsys, tmp_path / "stream", tmp_path / "state.json")[0] == 9


@pytest.mark.parametrize("values", [{"step": 40}, {"consumed": 13}])
def test_nothing_is_proven_where_states_are_contradicted(
    history: tuple[Path, RunState], capsys: pytest.CaptureFixture[str], values: dict[str, Any]
) -> None:
    stream, _ = history
    out = stream.parent / "out"
    file = out / "v1-20251121-111500" / "checkpoint-4" / "lazyshard.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    code, lines, _ = report(capsys, stream, out)
    assert code == 5
    assert lines[-1] == (
        "NOT proven: the counts hold only for what the states say, and these contradict their steps, their samples or "
        "the stream, see above"
    )
    assert json.loads(report(capsys, stream, out, "--json")[1][0])["proven"] is False


def test_a_copied_folder_is_audited_from_the_state_that_trained_most(
    history: tuple[Path, RunState], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without times in the files, and those of the files the wrong way round; then all of one time."""
    stream, state = history
    out = stream.parent / "copy"
    for step, saved in ((10, state), (2, run_of(state.stream_id, two_ranks(2)))):
        save(out, step, saved, saved_at=None)
        os.utime(out / f"checkpoint-{step}" / "lazyshard.json", (1e9 - 100 * step, 1e9 - 100 * step))
    lines = report(capsys, stream, out)[1]
    assert any(line.startswith(f"  {out}/checkpoint-10 ") and "audited" in line for line in lines)
    assert (
        f"note: {out}/checkpoint-10/lazyshard.json: audited as the one that has trained the most steps: not every "
        f"state says when it was saved, and the times of files tell nothing where they were copied; name another one "
        f"by --state" in lines
    )
    for step, saved, at in ((10, state, 500.0), (2, run_of(state.stream_id, two_ranks(2)), 501.0)):
        save(stream.parent / "same", step, saved, saved_at=at)
    lines = report(capsys, stream, stream.parent / "same")[1]
    assert any("/checkpoint-10 " in line and "audited" in line for line in lines)
    assert not any(line.startswith("note: ") for line in lines)


def test_a_cursor_without_a_state_is_compared(
    history: tuple[Path, RunState], capsys: pytest.CaptureFixture[str]
) -> None:
    stream, _ = history
    commit(stream, None, consumed=20)
    code, lines, _ = report(capsys, stream, stream.parent / "out")
    assert code == 5
    assert any("it has consumed 20 samples, the checkpoints at most 14; are all given?" in line for line in lines)


def test_how_many_samples_there_are_is_looked_up(
    history: tuple[Path, RunState], capsys: pytest.CaptureFixture[str]
) -> None:
    stream, _ = history
    for name in ("head.json", "stream.end"):
        values = json.loads((stream / name).read_bytes())
        (stream / name).write_text(json.dumps(values | {"samples": 23}))
    code, lines, _ = report(capsys, stream, stream.parent / "out")
    assert code == 5
    assert f"not in order: {stream}: 23 samples are told, but its chunks hold 24" in lines


def test_the_cursor_alone(history: tuple[Path, RunState], capsys: pytest.CaptureFixture[str]) -> None:
    stream, state = history
    code, lines, _ = report(capsys, stream)
    assert (code, lines[1]) == (9, f"  {stream}/cursors/sft.json  audited        14 samples in 4 steps")
    commit(stream, state, consumer="other")
    assert report(capsys, stream)[0] == 2
    assert report(capsys, stream, "--consumer", "other")[0] == 9
    assert report(capsys, stream, "--consumer", "third")[0] == 2


def test_nothing_to_audit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_stream(tmp_path / "stream")
    (tmp_path / "out").mkdir()
    code, lines, err = report(capsys, tmp_path / "stream", tmp_path / "out")
    assert (code, lines) == (3, [])
    assert err.startswith(
        f"lazyshard: error: {tmp_path}/out: there is no checkpoint in it: expected checkpoint-N/lazys"
    )
    code, lines, err = report(capsys, tmp_path / "stream")
    assert (code, lines) == (3, [])
    assert err.startswith(f"lazyshard: error: {tmp_path}/stream: there is no state to audit: neither in a checkpoint")
    (tmp_path / "out" / "lazyshard.json").write_text("{")
    code, _, err = report(capsys, tmp_path / "stream", tmp_path / "out")
    assert code == 5
    assert "found 1 bytes that are torn or no JSON" in err
    assert report(capsys, tmp_path / "stream", tmp_path / "nowhere")[0] == 2
    assert report(capsys, tmp_path / "nowhere")[0] == 2


def test_a_folder_without_checkpoints_is_not_passed_over_in_silence(
    history: tuple[Path, RunState], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream, _ = history
    (tmp_path / "other" / "step-5").mkdir(parents=True)
    (tmp_path / "other" / "step-5" / "lazyshard.json").write_text("{}")
    code, lines, err = report(capsys, stream, tmp_path / "other")
    assert (code, lines) == (3, [])
    assert "or none to audit the run's cursor alone" in err


def test_a_run_that_begins_its_epochs_by_itself_has_states_of_one_epoch_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream_id = make_stream(tmp_path / "stream")
    for step, epoch in ((6, None), (8, 1)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        state = run_of(stream_id, replace(two_ranks(step if epoch is None else step - 6), epoch=epoch))
        (folder / "lazyshard.json").write_bytes(state.encode())
    code, lines, _ = report(capsys, tmp_path / "stream", tmp_path, "--state", tmp_path / "checkpoint-8")
    assert code == 9
    assert [line.split()[1:3] for line in lines[1:3]] == [["audited", "8"], ["another", "epoch"]]
    assert lines[3] == "epoch 1: 24 samples: 8 trained, 16 to come"


def test_a_branch_that_is_ahead_of_the_stream_is_not_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream_id = make_stream(tmp_path / "stream", 15, end=False)
    head = run_of(stream_id, two_ranks(1), replace(THREE, draws=1, first_step=1))
    save(tmp_path / "out" / "v1", 2, head, saved_at=9e9)
    save(tmp_path / "out", 5, run_of(stream_id, two_ranks(5)))
    save(tmp_path / "out", 2, run_of(stream_id, two_ranks(2)))
    code, lines, _ = report(capsys, tmp_path / "stream", tmp_path / "out")
    assert code == 5
    assert [line.split()[1] for line in lines[1:4]] == ["audited", "abandoned", "abandoned"]
    assert lines[4].startswith(f"{tmp_path}/out/checkpoint-2 left the course after 4 samples: it trained 4 more")
    assert sum("checkpoint-5" in line and "ahead of the stream" in line for line in lines) == 1
