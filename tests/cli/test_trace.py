"""`lazyshard trace`: literal answers, exit codes and messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lazyshard.cli.main import main
from lazyshard.part import Part
from lazyshard.stream.retire import retire
from lazyshard.stream.stream import open_now
from tests.cli.commands import lazyshard
from tests.cli.traced_runs import commit, make_stream, run_of, save, two_ranks
from tests.harness.processes.producing import run as produce
from tests.stream.streams import foreign


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, Path]:
    """Two steps of two ranks, two of three; the first skipped sample is 16. Returns the stream and the checkpoint."""
    stream = tmp_path / "stream"
    parts = [two_ranks(2), Part(3, 1, 2, skip=((16, 18),), first_step=2, draws_per_step=1)]
    return stream, save(tmp_path / "out", 4, run_of(make_stream(stream), *parts))


def answer(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str], str]:
    code = main(["trace", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out.splitlines(), err


def test_in_a_process_of_its_own(run: tuple[Path, Path]) -> None:
    stream, checkpoint = run
    done = lazyshard("trace", stream, "--state", checkpoint, "--sample", 6)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == ("sample 6: chunk 2, row 0\n  epoch 0: trained at step 2 by rank 0 (part 0, position 3)\n")
    done = lazyshard("trace", stream, "--state", checkpoint, "--step", 0)
    assert done.returncode == 2
    assert done.stderr == (
        "lazyshard: error: Invalid value for --step: '0': expected N, or N:M for steps N to M - 1; the first step is "
        "1 (see `lazyshard trace --help`)\n"
    )


def test_steps_over_a_change_of_ranks(run: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    stream, checkpoint = run
    assert answer(capsys, stream, "--state", checkpoint, "--step", "2:6") == (
        0,
        [
            "step  part  rank  position  epoch  sample  chunk  row",
            "   2     0     0         2      0       2      0    2",
            "   2     0     0         3      0       6      2    0",
            "   2     0     1         2      0       5      1    2",
            "   2     0     1         3      0       9      3    0",
            "   3     1     0         0      0       7      2    1",
            "   3     1     1         0      0      10      3    1",
            "   3     1     2         0      0      11      3    2",
            "   4     1     0         1      0       8      2    2",
            "   4     1     1         1      0      15      5    0",
            "   4     1     2         1      0      20      6    2",
            "   5     1     0         2      0      12      4    0  to come",
            "   5     1     1         2      0      18      6    0  to come",
            "   5     1     2         2      0      21      7    0  to come",
            "The state has trained 4 steps; what is to come holds if the run goes on with the same ranks.",
        ],
        "",
    )


def test_one_rank_with_rows(run: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    stream, checkpoint = run
    code, lines, _ = answer(capsys, stream, "--state", checkpoint, "--step", 3, "--rank", 1, "--rows")
    assert code == 0
    assert lines[1:] == [
        "   3     1     1         0      0      10      3    1",
        "  {",
        '    "id": 10,',
        '    "text": "row 10"',
        "  }",
    ]
    code, lines, _ = answer(capsys, stream, "--state", checkpoint, "--step", 3, "--rank", 1, "--rows", "--json")
    assert lines == [
        '{"step": 3, "part": 1, "rank": 1, "position": 0, "epoch": 0, "sample": 10, "chunk": 3, "row": 1, '
        '"became": "trained", "deleted": false, "byte": 24, "bytes": 26, "tokens": null, '
        '"value": {"id":10,"text":"row 10"}}'
    ]


def test_the_fates_of_samples(run: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    stream, checkpoint = run
    assert answer(capsys, stream, "--state", checkpoint, "--sample", "8,12,16")[1] == [
        "sample 8: chunk 2, row 2",
        "  epoch 0: trained at step 4 by rank 0 (part 1, position 1)",
        "sample 12: chunk 4, row 0",
        "  epoch 0: to come at step 5, on rank 0, if the run goes on as it is (part 1, position 2)",
        "sample 16: chunk 5, row 1",
        "  epoch 0: skipped on purpose: left out from part 1 on",
    ]
    assert answer(capsys, stream, "--state", checkpoint, "--chunk", 5, "--row", 1, "--json")[1] == [
        '{"step": null, "part": 1, "rank": null, "position": null, "epoch": 0, "sample": 16, "chunk": 5, "row": 1, '
        '"became": "skipped", "deleted": false, "fewer_than_step": null}'
    ]


def test_a_sample_in_a_step_that_its_epoch_does_not_fill_may_be_left_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two steps of 8 and one of 6 leave 22 and 23 of 24, and the next step takes 4 of the next epoch as well."""
    stream = tmp_path / "stream"
    parts = [Part(2, 2, 8, draws_per_step=4), Part(1, 2, 6, first_step=2, draws_per_step=6)]
    checkpoint = save(tmp_path / "out", 3, run_of(make_stream(stream), *parts))
    assert answer(capsys, stream, "--state", checkpoint, "--sample", "21,22")[1] == [
        "sample 21: chunk 7, row 0",
        "  epoch 0: trained at step 3 by rank 0 (part 1, position 5)",
        "sample 22: chunk 7, row 1",
        "  epoch 0: to come at step 4, on rank 0, if the run goes on as it is (part 1, position 6); its epoch has too "
        "few left for the 6 of that step: left over, if training stops there",
    ]
    _, lines, _ = answer(capsys, stream, "--state", checkpoint, "--sample", "21,22", "--json")
    assert [json.loads(line)["fewer_than_step"] for line in lines] == [None, 6]


def test_the_course_of_a_run(run: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    stream, checkpoint = run
    assert answer(capsys, stream, "--state", checkpoint)[1] == [
        f"{checkpoint}/lazyshard.json: 14 samples trained in 4 steps, the last of them in epoch 0",
        "part  ranks  micro batch   steps  positions  samples",
        "   0      2            1  1 to 2          4        8",
        "   1      3            1  3 to 4          2        6",
        "left out from part 1 on: 2 samples: 16 to 17",
    ]
    values = json.loads(answer(capsys, stream, "--state", checkpoint, "--json")[1][0])
    assert (values["steps"], values["consumed"], values["epochs"], values["total"]) == (4, 14, [0, 0], 24)


def test_texts(run: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    stream, checkpoint = run
    code, lines, _ = answer(capsys, stream, "--state", checkpoint, "--text", "row 11")
    assert (code, lines[0]) == (0, "sample 11: chunk 3, row 2")
    code, lines, _ = answer(capsys, stream, "--state", checkpoint, "--text", "row")
    assert (len(lines), lines[-1]) == (41, "These are the first 20; --all shows all.")
    assert len(answer(capsys, stream, "--state", checkpoint, "--text", "row", "--all")[1]) == 48
    code, lines, err = answer(capsys, stream, "--state", checkpoint, "--text", "nobody")
    assert (code, lines) == (3, [])
    assert err == f"lazyshard: error: {stream}: no row in the chunks that are there holds this text\n"


def test_deleted_chunks_are_still_told_of(run: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    stream, checkpoint = run
    retire(stream, 3, 8)
    assert answer(capsys, stream, "--state", checkpoint, "--sample", 6, "--rows")[1] == [
        "sample 6: chunk 2, row 0; the producer has deleted the chunks below 3",
        "  epoch 0: trained at step 2 by rank 0 (part 0, position 3)",
        "  its row cannot be shown: the chunk is deleted",
    ]
    _, lines, _ = answer(capsys, stream, "--state", checkpoint, "--sample", 6, "--rows", "--json")
    assert json.loads(lines[0])["deleted"] is True
    assert json.loads(lines[0])["value"] is None


def test_chunks_that_are_not_searched_are_counted(run: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    stream, checkpoint = run
    retire(stream, 3, 8)
    _, lines, _ = answer(capsys, stream, "--state", checkpoint, "--text", "row 11")
    assert lines[-1] == "3 chunks not searched: deleted by the producer."
    code, lines, err = answer(capsys, stream, "--state", checkpoint, "--text", "row 1,")
    assert (code, lines) == (3, [])
    assert err.endswith("holds this text; 3 chunks not searched: deleted by the producer\n")


def test_steps_beyond_the_end_of_the_epoch_say_so(run: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    stream, checkpoint = run
    assert answer(capsys, stream, "--state", checkpoint, "--step", 50)[1][-1] == (
        "The state has trained 4 steps; what is to come holds if the run goes on with the same ranks. It reaches "
        "epoch 7, beyond the end of epoch 0, in which the state stands."
    )


def test_the_only_cursor_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream_id = make_stream(tmp_path, 18, end=False)
    commit(tmp_path, run_of(stream_id, two_ranks(2)))
    _, lines, _ = answer(capsys, tmp_path, "--sample", "4,7,19")
    assert lines == [
        "sample 4: chunk 1, row 1",
        "  epoch 0: trained at step 1 by rank 1 (part 0, position 1)",
        "sample 7: chunk 2, row 1",
        "  epoch 0: to come at step 3, on rank 0, if the run goes on as it is (part 0, position 4)",
        "sample 19: chunk 6, row 1",
        "  not published yet",
    ]
    commit(tmp_path, None, consumer="other")
    code, _, err = answer(capsys, tmp_path, "--sample", 4)
    assert code == 2
    assert f"{tmp_path} has the cursors of other, sft: choose one by --consumer, or give a checkpoint" in err
    code, _, err = answer(capsys, tmp_path, "--consumer", "other")
    assert (code, err.count("the cursor of 'other' holds no state of its run; give a checkpoint")) == (3, 1)
    assert answer(capsys, tmp_path, "--consumer", "third")[0] == 3
    assert answer(capsys, tmp_path, "--consumer", "sft")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--step", "5:5"], "--step"),
        (["--sample", "1,x"], "--sample"),
        (["--sample", "7,24,99"], "no sample 24, 99"),
        (["--step", "3", "--rank", "3"], "--rank"),
        (["--step", "3", "--sample", "1"], "--sample"),
        (["--rank", "3"], "--rank"),
        (["--chunk", "3"], "--chunk"),
        (["--chunk", "7", "--row", "3"], "--row"),
        (["--source", "in.jsonl"], "--source"),
        (["--source", "in.jsonl:L0"], "--source"),
        (["--text", ""], "--text"),
        (["--all"], "--all"),
        (["--consumer", "a"], "--consumer"),
    ],
)
def test_usage(run: tuple[Path, Path], capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str) -> None:
    stream, checkpoint = run
    code, lines, err = answer(capsys, stream, "--state", checkpoint, *arguments)
    assert (code, lines) == (2, [])
    assert expected in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("state", "arguments", "expected"),
    [
        ({"stream_id": "f" * 32}, [], "the state was saved with stream_id ffff"),
        ({"parts": (Part(2, 1, 4),)}, ["--step", "1"], "does not tell what step 1 took: part 0 of 1 does not say"),
    ],
)
def test_states_that_do_not_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], state: dict[str, Any], arguments: list[str], expected: str
) -> None:
    parts = state.get("parts", (two_ranks(2),))
    stream_id = make_stream(tmp_path / "stream")
    saved = run_of(state.get("stream_id", stream_id), *parts)
    (tmp_path / "state.json").write_bytes(saved.encode())
    code, lines, err = answer(capsys, tmp_path / "stream", "--state", tmp_path / "state.json", *arguments)
    assert (code, lines) == (5, [])
    assert expected in err


def test_there_is_no_stream(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "state.json").write_bytes(run_of("0" * 32, two_ranks(1)).encode())
    (tmp_path / "empty").mkdir()
    assert answer(capsys, tmp_path / "empty", "--state", tmp_path / "state.json")[0] == 5
    assert answer(capsys, tmp_path / "nowhere")[0] == 2
    assert answer(capsys, tmp_path / "empty", "--state", tmp_path / "nowhere")[0] == 2


@pytest.fixture
def produced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A stream that the producer has made of a file, and the checkpoint of a run over it; the folder is the current."""
    (tmp_path / "in.jsonl").write_text("".join(f'{{"id":{number}}}\n' for number in range(23)))
    done = produce("run", "--source", "in.jsonl", "--out", "stream", "--samples-per-chunk", 3, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    stream = open_now(tmp_path / "stream")
    assert stream.stream_id is not None
    return tmp_path / "stream", save(tmp_path / "out", 2, run_of(stream.stream_id, two_ranks(2)))


def test_origins_of_steps_and_samples(produced: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    stream, checkpoint = produced
    code, lines, _ = answer(capsys, stream, "--state", checkpoint, "--step", 2, "--rank", 0, "--origins")
    assert (code, lines[1:]) == (
        0,
        [
            "   2     0     0         2      0       2      0    2  in.jsonl:3",
            "   2     0     0         3      0       6      2    0  in.jsonl:7",
        ],
    )
    assert answer(capsys, stream, "--state", checkpoint, "--sample", 6, "--origins") == (
        0,
        [
            "sample 6: chunk 2, row 0",
            "  epoch 0: trained at step 2 by rank 0 (part 0, position 3)",
            "  from in.jsonl:7",
        ],
        "",
    )


def test_origins_as_json(produced: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    stream, checkpoint = produced
    for more in ([], ["--rows"]):
        _, (line,), _ = answer(capsys, stream, "--state", checkpoint, "--sample", 6, "--origins", "--json", *more)
        assert json.loads(line)["origins"] == [{"path": "in.jsonl", "lines": [7], "among": [7, 10], "why": None}]
    _, (line,), _ = answer(capsys, stream, "--state", checkpoint, "--sample", 6, "--json")
    assert "origins" not in json.loads(line)


def test_origins_in_a_file_that_is_gone(produced: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    stream, checkpoint = produced
    Path("in.jsonl").unlink()
    _, lines, _ = answer(capsys, stream, "--state", checkpoint, "--sample", 6, "--origins")
    assert lines[2] == "  from in.jsonl, lines 7 to 9 (the file cannot be read: No such file or directory)"


def test_origins_in_a_directory_that_another_program_fills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign(tmp_path / "stream", *[b'{"id":0}\n{"id":1}\n{"id":2}\n'] * 4)
    checkpoint = save(tmp_path / "out", 1, run_of(None, two_ranks(1)))
    code, _, err = answer(capsys, tmp_path / "stream", "--state", checkpoint, "--sample", 0, "--origins")
    assert code == 2
    assert "--origins" in err
