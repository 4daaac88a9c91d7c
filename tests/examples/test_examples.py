"""Each example runs as its README says, prints what it is about, and leaves a stream behind that is whole."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Final, NamedTuple

import pytest

import lazyshard
from tests.cli.commands import lazyshard as command

pytestmark = pytest.mark.full

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / "examples"
ROW: Final = re.compile(r"^\| \[(\S+)\]\((\S+)\) \| .* \| `python (\S+)` \| \d+ s \|$", re.MULTILINE)
DEADLINE_S: Final = 110.0


class Expected(NamedTuple):
    """What an example leaves behind.

    Attributes:
        says: pieces of what it prints, in order; of each line at most one.
        streams: what `lazyshard verify` says of each stream, behind its path.
        audits: folders with checkpoints, for `lazyshard audit`.
    """

    says: tuple[str, ...]
    streams: dict[str, str]
    audits: tuple[str, ...] = ()


EXPECTED: Final = {
    "live_distillation": Expected(
        (
            "$ lazyshard-producer run --source python:teacher:rows --out ",
            "  teacher: 8 chunks published; 8 are there, from chunk_00000.jsonl on",
            "waits: --max-ahead 8 chunks: 8 chunks with 256 samples published; no consumer has registered yet",
            "  student: 64 steps, 1,024 texts; loss 2.8",
            "  teacher: 40 chunks published; 8 are there, from chunk_00032.jsonl on",
            "waits: --max-ahead 8 chunks: 40 chunks with 1,280 samples published; consumer 'student' is at chunk 32, ",
            "  student: 128 steps, 2,048 texts; loss 2.8",
            "  teacher: 72 chunks published; 8 are there, from chunk_00064.jsonl on",
            "waits: --max-ahead 8 chunks: 72 chunks with 2,304 samples published; consumer 'student' is at chunk 64, ",
            "ok: 2,048 texts trained, each once; of 72 chunks no more than ",
        ),
        {"stream": "8 chunks, from 64 on, 256 samples, "},
    ),
    "transcribe_folder.py": Expected(
        (
            "recorded 98 of 196: 96 of them are transcribed and trained already",
            "196 rows in 25 chunks; the first one:",
            "  0000-dhahdhgh.wav: 'dhahdhgh', features (8, 16) float16",
            "trained 192 on 2 ranks; loss 3.24 at first, 0.01 at last",
            "ok: each recording was transcribed once, and trained once but for 4, fewer than a step takes",
        ),
        {"stream": "25 chunks, 196 samples, "},
    ),
    "blend_schedule.py": Expected(
        (
            "                    web              maths              code",
            "steps           wanted   came     wanted   came     wanted   came",
            "  1 to  10      234.0    234        6.0      6        0.0      0",
            " 21 to  30      210.0    210       30.0     30        0.0      0",
            "           stopped; goes on with micro batches of 4",
            " 31 to  40      198.0    198       42.0     42        0.0      0",
            " 61 to  70      162.0    162       48.0     48       30.0     30",
            " 91 to 100       72.0     72       48.0     48      120.0    120",
            "ok: no stream was ever more than 0.9 samples away from its share",
        ),
        {"web": "40 chunks, 2,000 samples, ", "maths": "12 chunks, 600 samples, ", "code": "16 chunks, 800 samples, "},
    ),
    "fewer_gpus.py": Expected(
        (
            "four ranks: killed after step 25; checkpoint-10, checkpoint-20",
            "three ranks: went on with step 21 and finished after step 76",
            "checkpoint-20  on the course  160 samples in 20 steps",
            "checkpoint-76  audited        496 samples in 76 steps",
            "epoch 0: 500 samples: 496 trained, 4 left over (490, 492, 496 to 497)",
            "proven: no sample was trained twice, and none was passed over",
            "sample 0: chunk 0, row 0",
            "  epoch 0: trained at step 4 by rank 0 (part 0, position 6)",
            "sample 168: chunk 16, row 8",
            "  epoch 0: trained at step 23 by rank 0 (part 1, position 4)",
            "ok: 496 of 500 samples were trained, each once, by four ranks and then by three",
        ),
        {"stream": "50 chunks, 500 samples, "},
        ("run",),
    ),
    "loss_spike.py": Expected(
        (
            "what was trained at step 33?",
            "  33     0     0       260      0     280     35    0  b.jsonl:81",
            "  step 33  sample 280  b.jsonl:81  {'rooms': 2, 'age': 8, 'price': 1220}",
            "  step 36  sample 286  b.jsonl:87  {'rooms': 4, 'age': 23, 'price': 1870}",
            "the second try, from checkpoint-30, without these 8:",
            "sample 280: chunk 35, row 0",
            "  epoch 0: skipped on purpose: left out from part 1 on",
            "epoch 0: 400 samples: 392 trained, 8 skipped on purpose (280 to 287)",
            "proven: no sample was trained twice, and none was passed over",
            "ok: 8 lines of b.jsonl made the spike, all else was trained once",
        ),
        {"stream": "50 chunks, 400 samples, "},
        ("first", "second"),
    ),
}


def listed() -> dict[str, str]:
    """The examples of the README: of each name the program of its command."""
    rows = ROW.findall((FOLDER / "README.md").read_text(encoding="utf-8"))
    assert all((FOLDER / link).is_file() for _, link, _ in rows)
    return {name: program for name, _, program in rows}


def run(program: str, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    paths = [ROOT, ROOT / "producer"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    # Python 3.12 and later warn at every fork of a process with threads, as pyproject.toml says of the tests.
    warnings = ["-W", "error", "-W", "ignore:This process:DeprecationWarning"]
    call = [sys.executable, *warnings, ROOT / program, *arguments]
    return subprocess.run(
        [str(part) for part in call], cwd=cwd, env=environment, capture_output=True, text=True, timeout=DEADLINE_S
    )


def test_the_readme_lists_every_example() -> None:
    there = {path.name for path in FOLDER.iterdir() if path.suffix == ".py" or (path / "run.py").is_file()}
    assert set(listed()) == set(EXPECTED) == there


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_shows_what_it_is_about_and_leaves_whole_streams(name: str, tmp_path: Path) -> None:
    expected = EXPECTED[name]
    done = run(listed()[name], tmp_path / "made", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = iter(done.stdout.splitlines())
    for piece in expected.says:
        assert any(piece in line for line in lines), f"not printed, or not here: {piece}\n{done.stdout}"
    assert [path.name for path in tmp_path.iterdir()] == ["made"], "it has written outside of its folder"
    for stream, said in expected.streams.items():
        verified = command("verify", tmp_path / "made" / stream)
        assert (verified.returncode, verified.stderr) == (0, "")
        assert verified.stdout.startswith(f"{tmp_path}/made/{stream}: {said}"), verified.stdout
    for stream in expected.streams if expected.audits else ():
        folders = [tmp_path / "made" / folder for folder in expected.audits]
        audited = command("audit", tmp_path / "made" / stream, *folders)
        assert audited.returncode == 0, audited.stdout
        assert "proven: no sample was trained twice, and none was passed over" in audited.stdout


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    done = run("examples/blend_schedule.py", "mine", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "mine is there already: remove it, or give another folder\n")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_examples_use_what_is_exported_and_nothing_else() -> None:
    used: Counter[str] = Counter()
    for path in sorted(FOLDER.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0].startswith("lazyshard"):
                assert node.module == "lazyshard", f"{path.name}: from {node.module}"
                used.update(alias.name for alias in node.names)
            elif isinstance(node, ast.Import):
                assert not any(alias.name.startswith("lazyshard") for alias in node.names), path.name
    assert set(used) <= set(lazyshard.__all__)
    assert used["LazyShardedDataset"] == 5 and used["ChunkWriter"] == 3
