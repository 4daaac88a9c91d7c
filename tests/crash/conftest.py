"""Where streams are made whose writers are killed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.disks import fast_folder


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    with fast_folder(tmp_path) as directory:
        yield directory
