"""Between two runs sources grow and are added, weights change: still each row once, wherever the first run stopped."""

import itertools
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from lazyshard_producer.configuration.settings import Settings
from tests.producer.rows.draining import Taken, make, numbers, take

HERE = "tests.producer.recipes"


def grow(directory: Path, counts: Sequence[int]) -> list[Path]:
    """Files of so many rows each; those that are there are added to."""
    paths = [directory / f"{file}.jsonl" for file in range(len(counts))]
    for file, (path, count) in enumerate(zip(paths, counts, strict=True)):
        with path.open("ab") as opened:
            begin = opened.tell() // len(b'{"id":[0,0]}\n')
            opened.write(b"".join(b'{"id":[%d,%d]}\n' % (file, number) for number in range(begin, count)))
    return paths


weightings = st.one_of(st.none(), st.lists(st.integers(1, 5), min_size=5, max_size=5))


@hypothesis_settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    before=st.lists(st.integers(0, 7), min_size=1, max_size=3),
    growth=st.lists(st.integers(0, 4), min_size=3, max_size=3),
    added=st.lists(st.integers(0, 4), max_size=2),
    weights=weightings,
    weights_then=st.one_of(st.just("same"), weightings),
    shuffle=st.sampled_from([0, 4, 100]),
    transform=st.sampled_from([None, "twice"]),
    stop=st.integers(1, 40),
    again=st.integers(0, 10),
)
def test_growth_further_sources_and_other_weights(
    tmp_path_factory: pytest.TempPathFactory,
    before: list[int],
    growth: list[int],
    added: list[int],
    weights: list[float] | None,
    weights_then: Any,
    shuffle: int,
    transform: str | None,
    stop: int,
    again: int,
) -> None:
    directory = tmp_path_factory.mktemp("run")
    more: dict[str, Any] = {"shuffle": shuffle, "transform": transform and f"{HERE}:{transform}"}
    first = make(directory / "out", grow(directory, before), weights and weights[: len(before)], **more)
    taken = list(itertools.islice(take(first), stop))
    position = taken[-1].position if taken else None

    then = [*(count + more for count, more in zip(before, growth, strict=False)), *added]
    chosen = weights if weights_then == "same" else weights_then
    second = make(directory / "out", grow(directory, then), chosen and chosen[: len(then)], **more)
    middle = list(itertools.islice(take(second, position), again))
    rest = list(take(second, middle[-1].position if middle else position))
    found = Counter(tuple(one.row["id"]) for one in [*taken, *middle, *rest])
    there = [(file, number) for file, count in enumerate(then) for number in range(count)]
    assert found == Counter(dict.fromkeys(there, 2 if transform else 1))
    # Where the second run stopped makes no difference either.
    assert [one.line for one in take(second, position)] == [one.line for one in [*middle, *rest]]


def piped(given: Sequence[int], run: Settings, start: Any, warnings: list[str]) -> Iterator[Taken]:
    """The rows of a run whose pipe gives these."""
    pipe = Path(run.sources[0].path)
    text = b"".join(b'{"id":[0,%d]}\n' % number for number in given)
    feeder = threading.Thread(target=lambda: pipe.write_bytes(text))
    feeder.start()
    yield from take(run, start, warnings=warnings)
    feeder.join()


@pytest.mark.parametrize("new", [[5, 6, 7, 8], [0, 1, 2, 3, 4, 9]])
def test_an_appended_input_goes_on_with_new_rows_or_with_those_that_it_repeats(new: list[int], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    run = make(tmp_path / "out", [tmp_path / "pipe"], shuffle=5)
    run = replace(run, sources=(replace(run.sources[0], resume="append"),))
    warnings: list[str] = []
    first = list(piped(range(5), run, None, warnings))
    assert first[1].position["skip"] == 2
    second = list(piped(new, run, first[1].position, warnings))
    if new[0] == 0:
        # Begun by an earlier run, the block comes out as it did there.
        assert [one.line for one in second[:3]] == [one.line for one in first[2:]]
        assert (len(second), warnings) == (4, [])
    else:
        assert sorted(numbers(second)) == new
        assert [text.partition(": ")[0] for text in warnings] == [run.sources[0].path]
