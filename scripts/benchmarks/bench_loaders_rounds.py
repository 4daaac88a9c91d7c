"""The rounds of `scripts/bench_loaders`: converts for each loader, then lets all of them take turns."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from scripts.benchmarks.bench_loaders_cases import CASES, Settings
from scripts.benchmarks.bench_loaders_data import Data
from scripts.benchmarks.bench_loaders_peers import FLOOR, OURS, Loader, LoaderFailed, Taken, checked, run_process


class Key(NamedTuple):
    """What a figure belongs to.

    Attributes:
        which: A or B.
        case: one of `CASES`.
        name: the loader's; the floor is taken anew for each case.
    """

    which: str
    case: str
    name: str


@dataclass
class Found:
    """What was measured.

    Attributes:
        taken: one for each round.
        conversions: seconds and MB (10^6 bytes on the disk) by data and loader.
        left_out: loaders that did not run, with the reason.
    """

    taken: dict[Key, list[Taken]] = field(default_factory=dict)
    conversions: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


class Rounds:
    """Measures loaders on data.

    Args:
        loaders: those that take part, the floor first.
        environments: the directory of the others' environments.
        place: where the rows are converted to.
        cases: which of `CASES`.
        timeout_s: for one process.
    """

    def __init__(
        self, loaders: Sequence[Loader], environments: Path, place: Path, cases: Sequence[str], timeout_s: float
    ) -> None:
        self.found = Found()
        self._loaders = loaders
        self._environments = environments
        self._place = place
        self._cases = cases
        self._timeout_s = timeout_s

    def run(self, data: Sequence[Data], rounds: int) -> Found:
        """Returns what was measured; a first round, to warm up, is not counted.

        Raises:
            LoaderFailed: ours or a floor failed; another loader that fails is left out.
            WrongRows: one did not return the rows.
        """
        for one in data:
            self._convert(one)
        for number in range(rounds + 1):
            for one in data:
                for case in self._cases:
                    print(f"round {number} of {rounds}, {one.which}, {CASES[case]}", file=sys.stderr, flush=True)
                    self._turn(one, case, number)
        return self.found

    def _settings(self, data: Data, case: str, native: str) -> Settings:
        converted = str(self._place / f"{data.which}.{native}")
        directory, offsets = str(data.directory), str(data.offsets)
        return Settings(directory, converted, offsets, data.which, case, data.rows, data.samples_per_chunk)

    def _convert(self, data: Data) -> None:
        natives = dict.fromkeys(loader.native for loader in self._loaders if loader.native)
        for native in natives:
            loader = next(one for one in self._loaders if one.native == native)
            settings = self._settings(data, "order", native)
            try:
                found, _ = run_process(loader, self._environments, "convert", settings, self._timeout_s)
            except LoaderFailed as error:
                for one in self._loaders:
                    if one.native == native:
                        self.found.left_out.setdefault(one.name, f"conversion of {data.which}: {error.reason}")
                continue
            finally:
                shutil.rmtree(f"{settings.native}.cache", ignore_errors=True)
            size = sum(path.stat().st_size for path in Path(settings.native).rglob("*") if path.is_file())
            self.found.conversions[data.which, native] = found["seconds"], size / 1e6

    def _turn(self, data: Data, case: str, number: int) -> None:
        floors = [loader for loader in self._loaders if loader.name == FLOOR]
        others = [
            loader
            for loader in self._loaders
            if case in loader.cases and loader.name not in (FLOOR, *self.found.left_out)
        ]
        # Not always after the same neighbour.
        others = others[number % len(others) :] + others[: number % len(others)]
        for loader in (*floors, *others):
            settings = self._settings(data, "order" if loader in floors else case, loader.native)
            key = Key(data.which, case, loader.name)
            try:
                found, peak = run_process(loader, self._environments, "read", settings, self._timeout_s)
            except LoaderFailed as error:
                if loader.reference or loader.name == OURS:
                    raise
                self.found.left_out[loader.name] = f"data {data.which}, {CASES[case]}: {error.reason}"
                for old in [old for old in self.found.taken if old.name == loader.name]:
                    del self.found.taken[old]
                continue
            taken = checked(loader.name, found, peak, settings, data.bytes, data.row(settings.probe))
            if number:
                self.found.taken.setdefault(key, []).append(taken)
