"""Each example runs as its README says, prints what it is about, and leaves a stream behind that is whole."""

import ast
import re
import sys
from collections import Counter
from pathlib import Path
from subprocess import CompletedProcess
from typing import Final, NamedTuple

import pytest

import lazyshard
from tests.cli.commands import lazyshard as command
from tests.harness.processes.environment import environment, run_command

pytestmark = pytest.mark.full

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / "examples"
ROW: Final = re.compile(r"^\| \[(\S+)\]\((\S+)\) \| .* \| `python (\S+)` \| \d+ s \|$", re.MULTILINE)


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
        ("ok: 2,048 texts trained, each once; at most ",), {"stream": "8 chunks, from 64 on, 256 samples, "}
    ),
    "many_writers.py": Expected(
        ("generator-0 was killed when ", "ok: 960 answers of 4 generators trained, each once"),
        {"stream": "96 chunks, 960 samples, "},
    ),
    "transcribe_folder.py": Expected(
        ("ok: each recording was transcribed once and trained once, except for 4, fewer than a step takes",),
        {"stream": "25 chunks, 196 samples, "},
    ),
    "webdataset_tars.py": Expected(
        ("the producer was killed after 60 samples", "ok: 120 samples of 3 tars, each once and with the bytes"),
        {"stream": "12 chunks, 120 samples, "},
    ),
    "blend_schedule.py": Expected(
        ("ok: no stream was ever more than 0.8 samples away from its share",),
        {"web": "40 chunks, 2,000 samples, ", "maths": "12 chunks, 600 samples, ", "code": "16 chunks, 800 samples, "},
    ),
    "fewer_gpus.py": Expected(
        ("ok: 496 of 500 samples were trained, each once, by four ranks and then by three",),
        {"stream": "50 chunks, 500 samples, "},
        ("run",),
    ),
    "loss_spike.py": Expected(
        ("ok: 8 lines of b.jsonl caused the spike, all other samples were trained once",),
        {"stream": "50 chunks, 400 samples, "},
        ("first", "second"),
    ),
}


def listed() -> dict[str, str]:
    """The examples of the README: of each name the program of its command."""
    rows = ROW.findall((FOLDER / "README.md").read_text(encoding="utf-8"))
    assert all((FOLDER / link).is_file() for _, link, _ in rows)
    return {name: program for name, _, program in rows}


def run(program: str, *arguments: object, cwd: Path) -> "CompletedProcess[str]":
    # Python 3.12 and later warn at every fork of a process with threads, as pyproject.toml says of the tests.
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error,ignore:This process:DeprecationWarning"}
    return run_command(sys.executable, ROOT / program, *arguments, env=environment() | quiet, cwd=cwd)


def test_the_readme_lists_every_example() -> None:
    there = {path.name for path in FOLDER.iterdir() if path.suffix == ".py" or (path / "run.py").is_file()}
    assert set(listed()) == set(EXPECTED) == there


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_shows_its_point_and_leaves_whole_streams(name: str, tmp_path: Path) -> None:
    expected = EXPECTED[name]
    done = run(listed()[name], tmp_path / "made", cwd=tmp_path)
    assert done.returncode == 0, done
    lines = iter(done.stdout.splitlines())
    for piece in expected.says:
        assert any(piece in line for line in lines), f"not printed, or not here: {piece}\n{done.stdout}"
    assert [path.name for path in tmp_path.iterdir()] == ["made"], "it has written outside of its folder"
    for stream, told in expected.streams.items():
        verified = command("verify", tmp_path / "made" / stream)
        assert (verified.returncode, verified.stderr) == (0, "")
        assert verified.stdout.startswith(f"{tmp_path}/made/{stream}: {told}"), verified.stdout
    for stream in expected.streams if expected.audits else ():
        folders = [tmp_path / "made" / folder for folder in expected.audits]
        audited = command("audit", tmp_path / "made" / stream, *folders)
        assert audited.returncode == 0, audited.stdout
        assert "proven: no sample was trained twice, and none was passed over" in audited.stdout


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    done = run("examples/blend_schedule.py", "mine", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "mine already exists: remove it, or give another folder\n"
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
    assert used["LazyShardedDataset"] == 7 and used["ChunkWriter"] == 5
