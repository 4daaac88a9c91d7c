"""`lazyshard verify` in a process of its own; what it finds: tests/inspection/test_verification*.py."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lazyshard.cli.main import main
from lazyshard.stream.retire import retire
from tests.cli.commands import DEADLINE_S, contents, environment, lazyshard, on_terminal
from tests.stream.damage import cut, delete, each, flip, put, stream
from tests.stream.foreign_seals import seal_rows
from tests.stream.streams import foreign, forked, needs_root

EFFORT = re.compile(r" \(\d+\.\d s, [0-9.,]+ (bytes|kB|MB|GB)/s\)\n")

C1, C2 = "chunk_00001.jsonl", "chunk_00002.jsonl"


def report(*arguments: object) -> tuple[int, list[str]]:
    """Exit code and lines, without how long it took."""
    done = lazyshard("verify", *arguments)
    assert done.stderr == ""
    assert len(EFFORT.findall(done.stdout)) == 1
    return done.returncode, EFFORT.sub("\n", done.stdout).splitlines()


def test_damage_and_leftovers(tmp_path: Path) -> None:
    """In the order of the chunks, whoever found it."""
    directory = stream(tmp_path / "stream", 200)
    each(
        delete("chunk_00090.jsonl"),
        delete(*(f"chunk_{chunk:05d}.jsonl{end}" for chunk in range(20, 30) for end in ("", ".completed"))),
        cut("chunk_00005.jsonl", 10),
        flip(C1, 1),
        flip(C1, 10),
        put(".tmp/chunk_00100.jsonl.0123456789abcdef", b"x"),
        put("cursors/run.json", b"{}"),
    )(directory)
    seal_rows(directory, 3, b'{"id":6}\n', b"[]\n")
    wanted = [
        "leftover: .tmp/chunk_00100.jsonl.0123456789abcdef: expected nothing, found what a producer was writing; "
        "nothing to do: the producer's next start removes it",
        "damage: cursors/run.json: field 'format': expected an integer from 1 to 2147483648, found no such field; "
        "restore the file from a copy",
        "damage: chunk_00001.jsonl: row 0 (byte 0) and 1 more: expected XXH3 964cfaf49568ec35 as sealed, found "
        "106a13a834b7c9e2; restore the file from a copy",
        "damage: chunk_00003.jsonl: row 1 (byte 9): expected a JSON object on a line, found an array (byte "
        "9); restore the file from a copy, or have its producer make it anew: readers refuse this row",
        "damage: chunk_00005.jsonl: expected 20 bytes as sealed, found 10 bytes; restore the file from a copy",
        "damage: chunk_00020.jsonl: expected the chunks 20 to 29 and their seals, found none of these 10; restore the "
        "files from a copy",
        "damage: chunk_00090.jsonl: expected the rows of the chunk, found no such file although a seal is there; "
        "restore the file from a copy",
        f"{directory}: 100 chunks, 178 samples, 1.9 kB, ended: 6 damaged, 1 left over",
    ]
    for jobs in (1, 3):
        assert report(directory, "--jobs", jobs) == (5, wanted)


OF_ANOTHER = "2 chunks, 3 samples, 9 bytes, ended, without stream.json, so there are no digests"


def another(directory: Path) -> None:
    foreign(directory, b"{}\n{}\n", b"{}\n", end=True)


def unfinished(directory: Path) -> None:
    put("chunk_00002.jsonl", b"x")(stream(directory, 4, end=False))


@pytest.mark.parametrize(
    ("make", "options", "code", "summary"),
    [
        (stream, [], 0, "3 chunks, 5 samples, 45 bytes, ended: all is well"),
        (unfinished, [], 0, "2 chunks, 4 samples, 36 bytes, open: 1 left over"),
        (
            lambda directory: retire(stream(directory, 6, end=False), 2, 3),
            [],
            0,
            "1 chunk, from 2 on, 2 samples, 18 bytes, open: all is well",
        ),
        (another, [], 0, f"{OF_ANOTHER}: all is well"),
        (another, ["--samples-per-chunk", 3], 5, f"{OF_ANOTHER}: 1 damaged"),
    ],
)
def test_summary(
    make: Callable[[Path], object], options: list[object], code: int, summary: str, tmp_path: Path
) -> None:
    make(tmp_path / "stream")
    before = contents(tmp_path / "stream")
    found, lines = report(tmp_path / "stream", *options)
    assert (found, lines[-1]) == (code, f"{tmp_path}/stream: {summary}")
    assert contents(tmp_path / "stream") == before


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(C1, 10)(stream(tmp_path))
    assert main(["verify", str(tmp_path), "--json"]) == 5
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    values = json.loads(out)
    assert values.pop("seconds") >= 0
    assert values.pop("stream_id") == json.loads((tmp_path / "stream.json").read_bytes())["stream_id"]
    assert values == {
        "stream": str(tmp_path),
        "ok": False,
        "damage": 1,
        "unchecked": 0,
        "leftovers": 0,
        "native": True,
        "samples_per_chunk": 2,
        "retired": 0,
        "chunks": 3,
        "samples": 5,
        "bytes": 45,
        "ended": True,
        "running": False,
        "quick": False,
        "findings": [
            {
                "severity": "damage",
                "kind": "digest",
                "file": C1,
                "expected": "XXH3 dabf1e4ca7f659b6 as sealed",
                "found": "d9fd6f4cf524f861",
                "remedy": "restore the file from a copy",
                "chunk": 1,
                "field": None,
                "row": 1,
                "byte": 9,
                "rows": 1,
            }
        ],
    }


def test_quick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(C1, 10)(stream(tmp_path))
    assert main(["verify", str(tmp_path), "--quick"]) == 0
    assert re.fullmatch(
        rf"{tmp_path}: 3 chunks, 5 samples, 45 bytes, ended: all is well \(\d\.\d s, rows not read\)\n",
        capsys.readouterr().out,
    )


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["/", "--jobs", "0"], 2, "--jobs"),
        (["{tmp}"], 5, "there is no stream: neither stream.json nor any chunk file"),
        (["{tmp}/bare"], 5, "1 chunk files, but no .completed marker"),
        (["{tmp}/later"], 5, "written in stream format 3"),
        (["{tmp}/stream", "--samples-per-chunk", "3"], 5, "has 2 samples per chunk, asked for 3"),
    ],
)
def test_refusal(
    arguments: list[str], code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream(tmp_path / "stream")
    for name, file, content in (("later", "stream.json", b'{"format":3}'), ("bare", C1, b"{}\n")):
        (tmp_path / name).mkdir()
        put(file, content)(tmp_path / name)
    assert main(["verify", *(argument.replace("{tmp}", str(tmp_path)) for argument in arguments)]) == code
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert shown.err.startswith("lazyshard: error: ")
    assert message in shown.err


@needs_root
def test_what_may_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stream(tmp_path).chmod(0o755)
    (tmp_path / C1).chmod(0)
    # A relative path, as the directories above are closed to the other user; and all is imported before they are.
    monkeypatch.chdir(tmp_path)
    assert main(["verify", ".", "--jobs", "1"]) == 0
    capfd.readouterr()

    def other_user() -> None:
        os.setgid(65534)
        os.setuid(65534)
        assert main(["verify", ".", "--jobs", "1"]) == 7

    assert forked(other_user) == 0
    [line, summary] = EFFORT.sub("\n", capfd.readouterr().out).splitlines()
    assert line == (
        "unchecked: chunk_00001.jsonl: expected a readable file, found that uid 65534 may not read it; check the "
        "permissions, and run the same command again"
    )
    assert summary == ".: 3 chunks, 5 samples, 45 bytes, ended: 1 not to be read"


@pytest.mark.parametrize(("samples", "bar"), [(80, True), (6, False)])
def test_bar_on_a_terminal_where_chunks_are_many(samples: int, bar: bool, tmp_path: Path) -> None:
    code, shown = on_terminal("verify", stream(tmp_path / "stream", samples))
    assert code == 0
    assert ("verifying" in shown and "40/40" in shown) is bar
    assert "all is well" in shown.replace("\r\n", "\n").rstrip("\n").rpartition("\n")[2]


BEGUN = """
import os, sys
from lazyshard.inspection import verification, verification_chunks
check = verification.check_in_order

def check_by_others(batches, jobs):
    for found in check(batches * 1000, 2, alone_s=0.0):
        os.write(1, b"begun\\n")  # not by print, which an interrupt may have write a part once more
        yield found

verification.check_in_order = check_by_others
from lazyshard.cli.main import main
sys.exit(main(["verify", sys.argv[1]]))
"""


def test_interrupt(tmp_path: Path) -> None:
    stream(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", BEGUN, str(tmp_path)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert error == "lazyshard: interrupted; run the same command again to go on\n"
    assert set(out.splitlines()) <= {"begun"}
