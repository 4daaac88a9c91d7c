"""`lazyshard inspect --plot`: a picture of how long rows are, or why there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lazyshard.cli import exits
from lazyshard.cli.main import main
from tests.stream.lengths import sealed
from tests.stream.streams import produce


def inspect(stream: Path, *arguments: object) -> int:
    return main(["inspect", str(stream), *map(str, arguments)])


def test_picture_shows_lengths_in_tokens_where_they_are_known(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    # A name with what would begin a formula.
    stream = sealed(tmp_path / "a $x", [10, 20, 20, 500])
    assert inspect(stream, "--plot", tmp_path / "lengths.png") == exits.DONE
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert "row length in tokens, of 4 rows: 550 tokens in all" in capfd.readouterr().out
    assert inspect(stream, "--plot", tmp_path / "lengths.svg", "--json") == exits.DONE
    picture = (tmp_path / "lengths.svg").read_text(encoding="utf-8")
    assert "a $x: 4 rows, 550 tokens, mean 137.5" in picture
    assert "row length in tokens" in picture
    assert inspect(produce(tmp_path / "b", 3), "--plot", tmp_path / "lengths.svg") == exits.DONE
    assert "row length in bytes" in (tmp_path / "lengths.svg").read_text(encoding="utf-8")


def test_stream_without_rows_has_no_picture(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    stream = produce(tmp_path / "s", 0, end=False)
    assert inspect(stream, "--plot", tmp_path / "lengths.png") == exits.REFUSED
    assert "there is no row yet whose length could be drawn" in capfd.readouterr().err
    assert not (tmp_path / "lengths.png").exists()


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert inspect(produce(tmp_path / "s", 2), "--plot", tmp_path / "lengths.png") == exits.NO_EXTRA
    assert "pip install 'lazyshard[plots]'" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--plot", "x.pdf"], "ends in neither .png nor .svg"),
        (["--plot", "/nowhere/x.png"], "is not a directory"),
        (["0", "--plot", "x.png"], "goes with the overview alone"),
        (["--chunk", "0", "--plot", "x.png"], "goes with the overview alone"),
        (["--shuffle", "--plot", "x.png"], "goes with the overview alone"),
    ],
)
def test_impossible_arguments_are_usage(
    arguments: list[str], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert inspect(produce(tmp_path / "s", 2), *arguments) == exits.USAGE
    assert said in capfd.readouterr().err
