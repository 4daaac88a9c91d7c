"""Pictures of files: how data flows, and the life of a chunk. The names are those of `lazyshard.format.records`."""

from __future__ import annotations

from typing import Final

from lazyshard.format.records import END, HEAD, RETIRED, TEMPORARY, chunk_name, seal_name
from lazyshard.plan.deal import Deal
from scripts.pictures.draw_pictures_svg import DONE, EMPTY, FAINT, MARGIN, RANKS, Drawing


def flow() -> str:
    """Draws producer, directory and ranks, from above to below."""
    drawing = Drawing("A producer publishes chunks in a directory, and each rank reads its own", 400)
    for number, name in enumerate(("a.jsonl", "b.jsonl", "your program")):
        drawing.box(MARGIN + number * 132, 16, 120, 28)
        drawing.words(MARGIN + number * 132 + 60, 34, name, anchor="middle", code=number < 2)
        drawing.line(MARGIN + number * 132 + 60, 44, 150 + number * 60, 68, arrow=True)
    drawing.box(MARGIN, 70, 384, 32, "#e9f1ee", line="#9fb9b0")
    drawing.words(210, 91, "producer: one process, the only one that writes", 13, anchor="middle", bold=True)
    drawing.line(210, 102, 210, 124, arrow=True)
    drawing.box(MARGIN, 126, 384, 132, "#f4f5f6")
    drawing.words(MARGIN + 10, 145, "a directory that all machines see, or a bucket", colour=FAINT)
    deal = Deal(dp=2, unit=1)
    for chunk in range(4):
        lane, _ = deal.place(chunk)
        x, y = MARGIN + 10 + chunk % 2 * 186, 154 + chunk // 2 * 34
        drawing.box(x, y, 178, 28, RANKS[lane])
        drawing.words(x + 89, y + 18, chunk_name(chunk), anchor="middle", code=True)
    drawing.words(MARGIN + 10, 240, HEAD, code=True)
    drawing.words(MARGIN + 80, 240, "progress", colour=FAINT)
    drawing.words(MARGIN + 196, 240, END, code=True)
    drawing.words(MARGIN + 280, 240, "nothing follows", colour=FAINT)
    for lane in range(deal.dp):
        x = MARGIN + lane * 198
        drawing.line(x + 93, 258, x + 93, 288, arrow=True)
        drawing.box(x, 290, 186, 62, RANKS[lane])
        drawing.words(x + 93, 310, f"rank {lane}", 13, anchor="middle", bold=True)
        drawing.words(x + 93, 328, "LazyShardedDataset", 11, anchor="middle", code=True)
        drawing.words(x + 93, 344, "in its DataLoader's workers", 11, anchor="middle")
    drawing.lines(MARGIN, 376, ["Chunk k is read by rank k % ranks. Ranks do not communicate."])
    return drawing.text


LIFE: Final = (
    (
        "open",
        EMPTY,
        f"{TEMPORARY}/…",
        ("rows are written here; no reader looks", "a kill now: made again, the same bytes"),
    ),
    (
        "sealed",
        RANKS[2],
        seal_name(7),
        ("the data has its name, then the seal:", "digests, row offsets, source position"),
    ),
    ("read", RANKS[0], chunk_name(7), ("by the rank it is dealt to; each row is", "checked against its digest")),
    ("done", DONE, "cursors/RUN.json", ("a durable checkpoint is past it, and the", "run's cursor says so")),
    ("deleted", EMPTY, RETIRED, ("with --retain consumed, once no run needs", "it; this file says so first")),
)
"""The states of a chunk in order: state, colour, the file that records it, and the meaning."""


def life() -> str:
    """Draws the states of a chunk, from above to below."""
    drawing = Drawing("The life of a chunk: open, sealed, read, done, deleted", 36 + len(LIFE) * 74)
    drawing.words(MARGIN, 26, "The life of chunk 7", 13, bold=True)
    for number, (state, fill, file, meaning) in enumerate(LIFE):
        y = 42 + number * 74
        drawing.box(MARGIN, y, 84, 46, fill, dashed=state in ("open", "deleted"))
        drawing.words(MARGIN + 42, y + 28, state, 13, anchor="middle", bold=True)
        drawing.words(MARGIN + 98, y + 11, file, 11.5, code=True)
        drawing.lines(MARGIN + 98, y + 28, meaning)
        if number + 1 < len(LIFE):
            drawing.line(MARGIN + 42, y + 46, MARGIN + 42, y + 72, arrow=True)
    return drawing.text
