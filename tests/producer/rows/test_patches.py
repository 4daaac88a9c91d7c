"""Patches of images, counted and sealed with the lengths: packs bounded by them too, rows dealt by their cost."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lazyshard import StreamReader
from lazyshard.cli.main import main as lazyshard
from lazyshard.errors import RowInvalid
from lazyshard.format.row import encode_row
from lazyshard.format.seal import DealtByCost
from lazyshard_producer.cli import main
from lazyshard_producer.rows.encoding import count_patches
from tests.harness.processes.producing import refused, run_arguments
from tests.producer.rows.draining import make, numbers, take
from tests.stream.streams import raised, seal

HERE = "tests.producer.rows.test_patches"
SIZES = ((5, 18), (5, 10), (4, 8), (6, 0), (9, None))  # tokens and patches
GRID = ("--encode", f"{HERE}:with_grid")
BOTH, TOKENS = [[0], [1, 2], [3], [4]], [[0, 1], [2, 3], [4]]


def write(directory: Path, *sizes: tuple[int, Any]) -> Path:
    rows = [{"id": [0, number], "length": one[0], "patches": one[1]} for number, one in enumerate(sizes)]
    (path := directory / "rows.jsonl").write_bytes(b"".join(map(encode_row, rows)))
    return path


def with_grid(row: dict[str, Any]) -> dict[str, Any]:
    """An encoded row with an image of as many patches as the row says, two in width."""
    return {"id": row["id"], "length": row["length"], "image_grid_thw": np.array([[1, (row["patches"] or 0) // 2, 2]])}


def with_pixels(row: dict[str, Any]) -> dict[str, Any]:
    return {"length": row["length"], "pixel_values": np.zeros((1, 3, 4, 4), np.float32)}


def publish(out: Path, source: Path, size: int, *options: object) -> list[Any]:
    """The patches in each seal of a stream of these rows."""
    assert main(run_arguments(out, [source], size, *options, "--no-progress")) == 0
    sealed = [seal(out, chunk).patches for chunk in range(len(list(out.glob("*.completed"))))]
    return [None if patches is None else patches.tolist() for patches in sealed]


@pytest.mark.parametrize(
    ("options", "packs", "sealed"),
    [
        (("--pack-patches", 18), BOTH, [[18, 18, 0], None]),
        (("--pack-patches", 18, *GRID, "--workers", 1), BOTH, [[18, 18, 0], None]),
        (("--pack-patches", 18, "--encode", "tests.producer.recipes:same"), BOTH, [[18, 18, 0], None]),
        (GRID, TOKENS, [[28, 8, 0]]),
        ((), TOKENS, [None]),
    ],
)
def test_packs_within_both_bounds(
    options: tuple[object, ...], packs: Any, sealed: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert publish(tmp_path / "out", write(tmp_path, *SIZES), 3, "--pack", 10, *options) == sealed
    assert [[row["id"][1] for row in pack["pack"]] for pack in StreamReader(tmp_path / "out")] == packs
    assert lazyshard(["inspect", str(tmp_path / "out")]) == 0
    assert ("  patches            36" in capsys.readouterr().out.splitlines()) is (sealed != [None])


def test_rows_with_too_many_patches_or_an_unknown_number_are_bad_rows(tmp_path: Path) -> None:
    more = ("--on-bad-row", "quarantine", "--pack", 10, "--pack-patches", 8)
    source = write(tmp_path, (1, 8), (1, 9), (1, -1), (1, 1.5), (1, "8"), (1, [8]), (1, 2**32))
    assert publish(tmp_path / "out", source, 1, *more) == [[8]]
    first, *others = [entry["reason"] for entry in refused(tmp_path / "out")]
    assert first == "--pack-patches: 9 patches, more than the 8 of a pack"
    assert len(others) == 5 and all("patches" in reason for reason in others)
    # Pixels of which nothing tells into how many patches they are cut.
    pixels = ("--encode", f"{HERE}:with_pixels")
    assert publish(tmp_path / "pixels", write(tmp_path, (1, 1)), 1, "--pack", 9, *pixels) == [None]
    dealt = run_arguments(tmp_path / "dealt", [source], 1, "--balance", 1, "--cost-per-patch", 2, *pixels)
    assert main(dealt) == 3


def test_patches_stay_with_rows_of_a_stream_and_of_several_writers(tmp_path: Path) -> None:
    assert publish(tmp_path / "first", write(tmp_path, *SIZES), 5, *GRID) == [[18, 10, 8, 0, 0]]
    assert publish(tmp_path / "again", tmp_path / "first", 2) == [[18, 10], [8, 0], None]
    bounds = ("--pack", 10, "--pack-patches", 18)
    assert publish(tmp_path / "packs", tmp_path / "first", 4, *bounds) == [[18, 18, 0, 0]]
    source = write(tmp_path, (1, 0), (1, 2), (1, 4))
    for name in "ab":
        sealed = publish(tmp_path / "shared", source, 2, *GRID, "--writer", name, "--writers", 2)
    assert sealed == [[0, 2], [0, 2], [4, 4]]


def test_a_row_costs_its_patches_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By tokens and half of the patches the rows cost 20, 6, 19 and 5; by tokens alone 10, 2, 3 and 5."""
    source = write(tmp_path, (10, 20), (2, 8), (3, 32), (5, None))
    for per_patch, steps in ((0.5, [[0, 2], [1, 3]]), (0.0, [[0, 3], [1, 2]])):
        costs: dict[str, Any] = {"cost_per_token_squared": 0.0, "cost_per_patch": per_patch}
        found = numbers(list(take(make(tmp_path / "out", [source], balance=2, **costs))))
        # Two ranks with chunks of two: rank 0 has the first two rows.
        assert sorted(sorted([found[step], found[2 + step]]) for step in range(2)) == steps
    options = ("--cost-per-token", 0, "--cost-per-token-squared", 0, "--cost-per-patch", 0.5)
    publish(tmp_path / "out", source, 2, "--balance", 2, *options)
    assert DealtByCost.read(seal(tmp_path / "out", 0).source) == DealtByCost(2, 1, "length", 0.0, 0.0, 0.5)
    assert lazyshard(["inspect", str(tmp_path / "out")]) == 0
    assert " ranks 2, micro batch size 1" in capsys.readouterr().out


def test_patches_of_a_row() -> None:
    one, two, still = np.array([[1, 2, 3]]), np.array([[1, 2, 3], [4, 2, 2]]), np.array([[4, 5]])
    expected: list[tuple[dict[str, Any], int | None]] = [
        ({"input_ids": np.arange(3)}, 0),
        ({"patches": 7, "image_grid_thw": one}, 7),
        ({"image_grid_thw": two, "video_grid_thw": {"$tensor": one}}, 28),
        ({"chosen_image_grid_thw": one, "image_grid_hws": still}, 26),
        ({"grid_thws": [one[0]], "pixel_values": np.zeros((1, 3, 2, 2))}, 6),
        ({"pixel_values": np.zeros((12, 8)), "pixel_values_videos": {"$tensor": np.zeros((3, 8))}}, 15),
        ({"pixel_values": np.zeros((12, 3, 8, 8))}, None),
        ({"patches": np.zeros((12, 8))}, None),
    ]
    assert [count_patches(row) for row, _ in expected] == [patches for _, patches in expected]
    for grid in (-one, one << 31):
        assert "patches" in str(raised(RowInvalid, count_patches, {"image_grid_thw": grid}))
