"""The programs of the pages of `docs` about data sets, run as they stand: they print what the page says."""

import json
import re
import shlex
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from lazyshard import BlendedDataset, ChunkWriter, LazyShardedDataset, LazyShardedSequences, Order, Pack
from tests.data.programs import AS_MODULE, programs, run_program, start_program
from tests.data.runs import open_ranks
from tests.data.streams import expected, in_batches
from tests.data.workers import DEADLINE_S
from tests.packaging.guide_programs import blocks_of as blocks
from tests.stream.streams import HERE, add, produce, publish_rows, wait_until
from tests.tiers import full


def page(name: str) -> str:
    return (HERE / "docs" / f"{name}.md").read_text(encoding="utf-8")


def chat_and_code(directory: Path) -> None:
    for name, rows in (("chat", 18), ("code", 6)):
        publish_rows(directory / name, 3, ({"id": f"{name}{number}"} for number in range(rows)))


def seven_rows(directory: Path) -> None:
    (directory / "rows.jsonl").write_text("".join(f'{{"id":{number}}}\n' for number in range(7)))


@pytest.mark.parametrize(
    ("name", "prepare", "runs", "logged"),
    [
        ("arrays", None, [[]], [[]]),
        *full(
            ("blending", chat_and_code, [["0"], ["1"]], [[], []]),
            # A second time too, in the same place.
            ("encode-cache", None, [[], []], [[], []]),
            ("streaming-shard", seven_rows, [["0"], ["1"]], [[0, 1, 4, 5], [2, 3, 6, 0]]),
        ),
    ],
)
def test_program_prints_what_the_page_says(
    tmp_path: Path, name: str, prepare: Callable[[Path], object] | None, runs: list[list[str]], logged: list[list[int]]
) -> None:
    program, *_ = blocks(page(name), "python")
    printed = blocks(page(name), "text")
    if prepare is not None:
        prepare(tmp_path)
    warnings = "ignore" if any(runs) else "error"
    done = [run_program(program, *arguments, folder=tmp_path, warn=warnings) for arguments in runs]
    assert [one.returncode for one in done] == [0] * len(runs), done
    assert [one.stdout for one in done] == (printed if any(runs) else printed * len(runs))
    assert [one.stderr.splitlines() for one in done] == [[f"tokenized {row}" for row in rows] for rows in logged]


def test_the_schedule_of_a_blend_is_what_the_page_says(tmp_path: Path) -> None:
    (scheduled,) = [program for program in blocks(page("blending"), "python") if "schedule=" in program]
    known: dict[str, Any] = {"BlendedDataset": BlendedDataset, "Order": Order}
    for name in ("web", "maths"):
        known[name] = LazyShardedDataset(produce(tmp_path / name, 1), dp_rank=0, dp_size=1)
    exec(scheduled, known)
    shares = [known["blend"].shares_at(step)[1] for step in (0, 500, 1000, 3000, 5000, 9000)]
    assert [round(share, 2) for share in shares] == [0.0, 0.05, 0.1, 0.3, 0.5, 0.5]


@pytest.mark.full
def test_iterable_prints_what_the_page_says_on_two_ranks_while_the_stream_grows(tmp_path: Path) -> None:
    program, *_ = blocks(page("iterable"), "python")
    printed = blocks(page("iterable"), "text")
    said = [tmp_path / str(rank) for rank in (0, 1)]
    with ChunkWriter(tmp_path / "stream", 3) as writer:
        add(writer, 0, 12)
        ranks = [start_program(program, rank, folder=tmp_path, out=said[rank]) for rank in (0, 1)]
        first = [text.splitlines()[0] for text in printed]
        wait_until(lambda: [out.read_text().split("\n")[0] for out in said if out.exists()] == first, "first lines")
        add(writer, 12, 17)
    assert [programs().reap(rank, DEADLINE_S).status for rank in ranks] == [0, 0]
    assert [out.read_text() for out in said] == printed
    (pad,) = re.findall(r"the ranks drew `([\d ]+)` and `([\d ]+)`", page("iterable").replace("\n", " "))
    last = [in_batches(lane, 4)[-1] for lane in expected(17, 2, 4, unit=3, at_end="pad")]
    assert [list(map(int, text.split())) for text in pad] == last


@pytest.mark.full
def test_state_of_a_run_is_as_it_is_shown(tmp_path: Path) -> None:
    shown: dict[str, Any] = json.loads(next(block for block in blocks(page("resume"), "json") if "stream_id" in block))
    dataset = open_ranks(produce(tmp_path / "s", 96, 8), 2, batch_size=4, shuffle_window=1)[0]
    batches = dataset.batches(collate_fn=list)
    assert len([*islice(batches, 3)]) == 3
    state = batches.state_dict()
    assert shown | {"stream_id": dataset.stream_id} == state
    assert list(shown) == list(state)


PACKED = """version: 1
datasets:
  - {path: raw, weight: 3, steps: [{map: my_rows:encode}]}
  - path: encoded
num_samples: 9
micro_batches_per_step: 1
sequences: {form: pack, size: 10}
"""  # The blend of the page as a file
PRINT = '    print("+".join("".join(map(chr, row["input_ids"])) for row in pack))\n'


@pytest.mark.full
def test_packing_at_run_time_prints_what_the_page_says(tmp_path: Path) -> None:
    text = page("packing")
    section = text[text.index("## At run time\n") :]
    (tmp_path / "rows.jsonl").write_text(blocks(text, "jsonl")[0])
    (tmp_path / "my_rows.py").write_text(blocks(section, "py")[0])
    *produced, audited = blocks(section, "console")
    for session in produced:
        assert run_command(session, tmp_path) == ""
    programs_of_page = blocks(section, "python")
    assert len(programs_of_page) == 3
    (tmp_path / "packed.yaml").write_text(PACKED)
    of_file = f"import lazyshard\nfor (pack,) in lazyshard.load('packed.yaml', dp_rank=0, dp_size=1).loader:\n{PRINT}"
    done = [run_program(text, folder=tmp_path, merged=True, warn="error") for text in (*programs_of_page, of_file)]
    *printed, of_loaded = [one.stdout for one in done]
    assert "".join(printed) == "".join(blocks(section, "text"))
    assert of_loaded == printed[-1]
    sequences = LazyShardedSequences(tmp_path / "raw", form=Pack(10), dp_rank=0, dp_size=2, micro_batches_per_step=1)
    (tmp_path / "out/checkpoint-1").mkdir(parents=True)
    (tmp_path / "out/checkpoint-1/lazyshard.json").write_text(json.dumps({"state": sequences.state_dict(2), "step": 1}))
    command, _, output = audited.partition("\n")
    assert run_command(command, tmp_path) == output


def run_command(line: str, folder: Path) -> str:
    modules = {"lazyshard-producer": "lazyshard_producer", "lazyshard": "lazyshard.cli"}
    name, *arguments = shlex.split(line.removeprefix("$ "))
    done = run_program(AS_MODULE + modules[name], *arguments, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout
