"""What a soak was to be, and what came of it."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from tests.harness.soak.rank import Rules

# Chunks: of less the ranks would wait for the producer's looks at them, see docs/retention.md
MAX_AHEAD: Final = 512
SEAL_BYTES: Final = 27  # Of a seal, for each row; see docs/retention.md


@dataclass(frozen=True, slots=True)
class Settings:
    seconds: float  # how long things are killed; to end the stream takes a little longer
    seed: int = 0  # of what is drawn by chance
    ranks: int = 8  # of the life that begins, and the most of any
    rules: Rules = field(default_factory=Rules)
    patience_s: float = 120.0  # so long may nothing go on

    @property
    def half_cycle_s(self) -> float:
        return min(240.0, max(8.0, self.seconds / 6))

    @property
    def look_s(self) -> float:
        return min(2.0, max(0.4, self.half_cycle_s / 60))

    def max_disk(self, batch_size: int, row_bytes: int) -> int:
        """Returns the limit in bytes: twice what docs/retention.md says is the least, and what may be ahead.
        `row_bytes`: of the longest row, its part of a seal included."""
        rules = self.rules
        interval = rules.every * batch_size * self.ranks / rules.per_chunk
        window = self.ranks * max(1, rules.window)
        ahead = 2 * 2 * batch_size * self.ranks / rules.per_chunk
        # One more than are kept, since one is written before the oldest goes; and the one that it was started from.
        chunks = (rules.keep + 2) * interval + 2 * window + ahead
        return int((2 * chunks + MAX_AHEAD) * (row_bytes * rules.per_chunk + 512))


@dataclass
class Report:
    minutes: float = 0.0  # how long it took
    seed: int = 0
    kills: int = 0  # how often anything was killed or stopped, or the disk filled
    done: Counter[str] = field(default_factory=Counter)  # by name: kills by kind, lives, resumes
    counts: dict[str, float] = field(default_factory=dict)  # by name: samples, chunks, bytes, the most that there was
    held: dict[str, dict[str, int]] = field(default_factory=dict)  # by kind of process, the most that one of them held
    violations: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what was not done and why

    def most(self, name: str, number: float) -> None:
        self.counts[name] = max(self.counts.get(name, 0), number)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"done": dict(self.done)}

    def __str__(self) -> str:
        lines = [f"{self.minutes:.1f} minutes, seed {self.seed}: {self.kills} faults"]
        lines += [f"  {name:58}{count:>16,}" for name, count in sorted(self.done.items())]
        lines += [f"  {name:58}{number:>16,.10g}" for name, number in self.counts.items()]
        lines += [f"  the most that one {kind} held: {held}" for kind, held in self.held.items()]
        lines += [f"  not done: {note}" for note in self.notes]
        lines += [f"  VIOLATION: {violation}" for violation in self.violations]
        return "\n".join([*lines, f"  {len(self.violations)} violations"])
