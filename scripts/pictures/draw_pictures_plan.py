"""Pictures of the order of samples, whose numbers and colours are computed by `lazyshard.plan`."""

from __future__ import annotations

from typing import Final

from lazyshard.part import Part
from lazyshard.plan.course import Course
from lazyshard.plan.deal import Deal, Rules
from scripts.pictures.draw_pictures_svg import DONE, EMPTY, FAINT, INK, MARGIN, RANKS, Drawing

CELL: Final = 22


def stripes() -> str:
    """Draws which rank reads which chunk: 10 chunks of 4 samples and 4 ranks, a stripe in each line."""
    deal, chunks = Deal(dp=4, unit=4), 10
    total = chunks * deal.unit
    drawing = Drawing("Ten chunks dealt to four ranks: chunk k to rank k mod 4, the last two row by row", 278)
    drawing.words(MARGIN, 26, "10 chunks of 4 samples, 4 ranks", 13, bold=True)
    drawing.words(MARGIN, 44, "a box is a sample, its number the rank that trains it", colour=FAINT)
    width = deal.unit * CELL
    for chunk in range(chunks):
        line, column = divmod(chunk, deal.dp)
        x, y = MARGIN + column * (width + 10), 78 + line * 56
        drawing.words(x, y - 5, f"chunk {chunk}", 11, colour=FAINT)
        for within in range(deal.unit):
            lane, _ = deal.place(chunk * deal.unit + within, total)
            drawing.cell(x + within * CELL, y, CELL, str(lane), RANKS[lane])
    whole = deal.whole_positions(total) // deal.unit
    drawing.lines(
        MARGIN + 2 * (width + 10) + 4,
        78 + whole * 56 + 9,
        ["the tail fills no whole stripe:", "row by row, to all ranks"],
        11,
    )
    drawing.lines(
        MARGIN,
        248,
        [f"The first {whole} lines are whole stripes: each rank reads one", "chunk of each, and opens no other file."],
    )
    return drawing.text


def windows() -> str:
    """Draws one rank's shuffle: two windows of two chunks, each chunk of four samples."""
    deal, rules = Deal(dp=2, unit=4), Rules(unit=4, window=8)
    course = Course(rules, [Part(2)])
    positions = 16
    drawing = Drawing("One rank's samples, shuffled within windows of two of its chunks", 300)
    drawing.words(MARGIN, 26, "What rank 0 of 2 reads, shuffle_window=2", 13, bold=True)
    in_order = [deal.sample(0, position) for position in range(positions)]
    drawn = [course.draw(0, position, None).sample for position in range(positions)]
    step = CELL + 2
    for window in range(2):
        first = window * rules.window
        drawing.box(MARGIN - 6 + first * step, 40, rules.window * step - 1, 212, "#f1f3f1", line="#d6dad6")
        drawing.words(MARGIN + first * step, 58, f"window {window}", 11, colour=FAINT)
    for position, sample in enumerate(in_order):
        x = MARGIN - 5 + position * step
        if position % deal.unit == 0:
            drawing.words(x + 1, 84, f"chunk {sample // deal.unit}", 11, colour=FAINT)
        drawing.cell(x, 90, CELL, str(sample), RANKS[sample // deal.unit])
    for position, sample in enumerate(drawn):
        x = MARGIN - 5 + position * step
        origin = MARGIN - 5 + in_order.index(sample) * step
        drawing.line(origin + CELL / 2, 90 + CELL + 1, x + CELL / 2, 198, "#98a0a8")
        drawing.cell(x, 200, CELL, str(sample), RANKS[sample // deal.unit])
    drawing.words(MARGIN - 4, 242, "as they are trained", 11, colour=FAINT)
    drawing.lines(
        MARGIN - 6,
        272,
        [
            "No sample leaves its window: so a rank waits for the chunks",
            "of one window, and those behind it may be deleted.",
        ],
    )
    return drawing.text


BEFORE: Final = 8
AFTER: Final = 6
DRAWN: Final = 3
"""Ranks before and after the change, and samples that each rank had trained before it."""


def rescaling() -> str:
    """Draws a run of 8 ranks that continues with 6: chunks of 2 samples, the cursor in the middle of a stripe."""
    rules = Rules(unit=2)
    shown, columns = 56, BEFORE * rules.unit
    before = Course(rules, [Part(BEFORE, draws=DRAWN)])
    after = Course(rules, [Part(BEFORE, draws=DRAWN), Part(AFTER)])
    trained = {before.draw(lane, position, None).sample: lane for position in range(DRAWN) for lane in range(BEFORE)}
    place = {sample: after.place(sample, None, 0) for sample in range(shown) if sample not in trained}
    drawing = Drawing("Eight ranks have trained 24 samples; six ranks continue with exactly the other ones", 462)
    drawing.words(MARGIN, 26, f"{BEFORE} ranks, until the cursor", 13, bold=True)
    drawing.words(MARGIN, 44, f"each has trained {DRAWN} samples; a chunk holds {rules.unit}", colour=FAINT)

    def grid(top: float, text: dict[int, tuple[str, str]]) -> None:
        for sample in range(shown):
            line, column = divmod(sample, columns)
            word, fill = text.get(sample, ("", EMPTY))
            x = MARGIN + column * (CELL + 1) + column // rules.unit * 2
            drawing.cell(x, top + line * (CELL + 10), CELL, word, fill)

    grid(58, {sample: (str(lane), RANKS[lane]) for sample, lane in trained.items()})
    drawing.words(MARGIN, 210, f"{AFTER} ranks, from the cursor on", 13, bold=True)
    drawing.words(MARGIN, 228, "grey is trained; a number is the rank that trains a sample", colour=FAINT)
    later = {sample: (str(one.lane), RANKS[one.lane]) for sample, one in place.items() if one is not None}
    grid(242, dict.fromkeys(trained, ("", DONE)) | later)
    drawing.lines(
        MARGIN,
        394,
        [
            f"The {_open(trained, columns)} samples that the open stripe still held are dealt",
            f"first. Behind them begin stripes of {AFTER} chunks. No rank asks",
            "another: all compute it from the cursor, which says",
            f"{BEFORE} ranks, {DRAWN} samples each.",
        ],
    )
    return drawing.text


def _open(trained: dict[int, int], columns: int) -> int:
    """Returns the number of untrained samples in started stripes."""
    begun = (max(trained) // columns + 1) * columns
    return begun - len(trained)


def watermark() -> str:
    """Draws how many samples each of two ranks may train, for each number of published chunks."""
    course = Course(Rules(unit=4), [Part(2, batch_size=2)])
    unit, dp = course.rules.unit, course.dp
    drawing = Drawing("How far ranks may draw while chunks are published", 300)
    drawing.words(MARGIN, 26, "How far two ranks may read, chunks of 4 samples", 13, bold=True)
    drawing.words(MARGIN, 52, "published", colour=FAINT)
    drawing.words(228, 52, "each rank may train", colour=FAINT)
    for published in range(6):
        y = 64 + published * 32
        for chunk in range(5):
            there = chunk < published
            fill = RANKS[chunk % dp] if there else EMPTY
            drawing.box(MARGIN + chunk * 38, y, 34, 22, fill, dashed=not there)
            drawing.words(
                MARGIN + chunk * 38 + 17, y + 15, str(chunk), 11, anchor="middle", colour=INK if there else FAINT
            )
        drawn = course.drawable(published * unit)
        for position in range(drawn):
            drawing.box(228 + position * 15, y + 4, 13, 14, "#7aa37a", line="#5d855d")
        waits = f"{drawn} samples" if drawn else "waits for chunk 1" if published else "waits"
        drawing.words(228 + drawn * 15 + (6 if drawn else 0), y + 15, waits, 11, colour=FAINT)
    drawing.lines(
        MARGIN,
        270,
        [
            "All ranks continue together, a whole stripe at a time. Once the",
            "stream has ended, what is left is dealt row by row.",
        ],
    )
    return drawing.text
