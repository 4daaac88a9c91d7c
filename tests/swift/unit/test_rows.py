"""`rows`: row by row what ms-swift's own `load_dataset` makes of the same lines."""

from pathlib import Path

from tests.swift.warm import run_warm


def test_rows_are_what_load_dataset_makes_of_them(tmp_path: Path) -> None:
    run_warm(tmp_path, Path(__file__).with_name("rows_program.py"))
