"""A simulated run as numbers: all of it in one place, for JSON, and the table for people."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from lazyshard.cli.units import size
from lazyshard.storage.pacing import format_seconds
from lazyshard_producer.configuration.quantities import show_amount
from scripts.simulation.simulate_disk import Disk, disk_use
from scripts.simulation.simulate_files import Files, count_files
from scripts.simulation.simulate_model import Timeline, simulate
from scripts.simulation.simulate_reading import tail_chunks, tail_openings
from scripts.simulation.simulate_setting import Setting
from scripts.simulation.simulate_shuffle import Shuffle, shuffle_quality

MAX_WAIT_S: Final = 600.0
"""A reader gives up after so long, unless it is told otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All that is known of a simulated run."""

    setting: Setting
    timeline: Timeline
    disk: Disk
    files: Files
    shuffle: Shuffle

    @property
    def limited_by(self) -> Literal["producer", "reading", "training"]:
        """What is slowest in the long run, whatever the head start."""
        setting, step_s = self.setting, self.timeline.step_s
        if setting.producer_rate * step_s < setting.step_rows:
            return "producer"
        return "reading" if step_s > 1.01 * setting.step_seconds else "training"

    def figures(self) -> dict[str, Any]:
        """Returns all figures by name, plain values."""
        setting, timeline, files = self.setting, self.timeline, self.files
        given = asdict(setting) | {"max_ahead": setting.max_ahead and show_amount(setting.max_ahead)}
        return given | {
            "steps": setting.steps,
            "chunks": setting.chunks,
            "limited_by": self.limited_by,
            "first_step_s": timeline.first_step_s,
            "end_s": timeline.end_s,
            "stalled_s": timeline.stalled_s,
            "stall_share": timeline.stall_share,
            "longest_wait_s": float(timeline.waits[1:].max(initial=0.0)),
            "waits": len(timeline.waits) - 1,
            "peak_chunks": self.disk.peak_chunks,
            "peak_bytes": self.disk.peak_bytes,
            "peak_at_s": self.disk.peak_at_s,
            "cursor_writes": self.disk.commits,
            "metadata_a_second": files.a_second,
            "metadata_a_second_and_node": files.a_second_and_node,
            "polls_a_second": files.waiting,
            "stripe_operations": files.stripe,
            "head_opens": files.looks,
            "chunk_opens": files.chunk_opens,
            "tail_chunks": tail_chunks(setting),
            "tail_openings": tail_openings(setting),
            "neighbour_draws": self.shuffle.neighbours,
            "in_turn_distance": self.shuffle.in_turn,
            "batch_distance": self.shuffle.batch,
            "full_distance": self.shuffle.full,
        }


def outcome(setting: Setting) -> Outcome:
    """Simulates a run and counts everything."""
    timeline = simulate(setting)
    disk = disk_use(timeline)
    return Outcome(
        setting=setting,
        timeline=timeline,
        disk=disk,
        files=count_files(timeline, disk),
        shuffle=shuffle_quality(setting),
    )


def lines(found: Outcome) -> list[str]:
    """Returns the table for people."""
    setting, timeline, disk, files = found.setting, found.timeline, found.disk, found.files
    trained, computed = setting.step_rows / timeline.step_s, setting.step_rows / setting.step_seconds
    longest = float(timeline.waits[1:].max(initial=0.0))
    rows = [
        ("run", f"{setting.ranks:,} ranks, {setting.step_rows:,} rows a step of {setting.step_seconds:g} s"),
        ("stream", f"{setting.rows:,} rows in {setting.chunks:,} chunks of {size(setting.chunk_bytes)}"),
        ("published", f"{setting.producer_rate:,.1f} rows a second"),
        ("trained at most", f"{trained:,.1f} rows a second" + ("" if trained > 0.99 * computed else _slow(computed))),
        ("limited by", found.limited_by),
        ("", ""),
        ("first step after", _time(timeline.first_step_s)),
        ("last step after", _time(timeline.end_s)),
        (
            "stalled",
            f"{_time(timeline.stalled_s)}, {timeline.stall_share:.1%} of the time, the first step's wait included",
        ),
        ("later waits", f"{len(timeline.waits) - 1:,}, the longest {_time(longest)}"),
        ("disk peak", f"{disk.peak_chunks:,} chunks, {size(disk.peak_bytes)}, after {_time(disk.peak_at_s)}"),
        ("cursor", f"written {disk.commits:,} times"),
        ("", ""),
        ("filesystem", f"{files.a_second:,.1f} metadata operations a second, {files.total:,} in all"),
        ("  a node", f"{files.a_second_and_node:,.1f} a second from the readers of each of {files.nodes:,}"),
        ("  while waiting", f"{files.waiting:,.1f} opens a second by {files.processes:,} processes"),
        ("  a new stripe", f"{files.stripe:,} operations at once"),
        ("  the end", f"{tail_chunks(setting):,} chunks fill no stripe, opened {tail_openings(setting):,} times"),
        ("", ""),
        ("neighbours", f"drawn {found.shuffle.neighbours:,.1f} samples of a rank apart{_in_steps(found)}"),
        ("drawn in turn", f"{_distance(found.shuffle.in_turn, setting)} apart in the stream"),
        ("a global batch", f"{_distance(found.shuffle.batch, setting)} apart"),
        ("all shuffled", f"would be {_distance(found.shuffle.full, setting)}"),
    ]
    return [f"{name:17}{value}".rstrip() for name, value in rows] + _warnings(found)


def _warnings(found: Outcome) -> list[str]:
    setting, waits = found.setting, float(found.timeline.waits.max())
    told = []
    if waits > MAX_WAIT_S:
        told.append(
            f"a wait of {_time(waits)} is longer than readers wait by default, {_time(MAX_WAIT_S)}: raise max_wait, or "
            f"take smaller chunks or windows"
        )
    if setting.span_rows > setting.rows:
        told.append(
            f"one window of all ranks takes {setting.span_rows:,} rows, more than the stream has: nothing can be "
            f"trained before the stream has ended"
        )
    if setting.retain == "consumed" and not setting.checkpoint_steps:
        told.append("without --checkpoint-steps no cursor is written, so nothing is deleted")
    return [f"warning: {text}" for text in told]


def _slow(computed: float) -> str:
    return f"; reading keeps it from {computed:,.1f}"


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else format_seconds(seconds)


def _in_steps(found: Outcome) -> str:
    return f" ({found.shuffle.neighbours / found.setting.draws:,.2f} steps)"


def _distance(rows: float | None, setting: Setting) -> str:
    if rows is None:
        return "-"
    return f"{rows:,.1f} rows ({rows / setting.samples_per_chunk:,.2f} chunks)"
