"""`lazyshard inspect --plot`: how long the rows of a stream are, as a picture. matplotlib is imported for it alone."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import typer

from lazyshard.cli import exits
from lazyshard.cli.output import complain, count
from lazyshard.errors import StreamInvalid
from lazyshard.inspection.inspection import Overview
from lazyshard.inspection.row_facts import Lengths

_FORMATS: Final = (".png", ".svg")

_BINS: Final = 80

_LABEL: Final = {"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.8}

_SHARES: Final = (("median", 0.5), ("p90", 0.9), ("p99", 0.99))


def check_plot(name: str) -> Path:
    """Returns the file of a picture, before anything is looked at.

    Raises:
        typer.BadParameter: it is none that can be written.
        typer.Exit: matplotlib is not installed; that was said.
    """
    path = Path(name)
    if path.suffix.lower() not in _FORMATS:
        raise typer.BadParameter(f"{name!r} ends in neither {' nor '.join(_FORMATS)}", param_hint="--plot")
    if not path.parent.is_dir():
        raise typer.BadParameter(f"{str(path.parent)!r} is not a directory", param_hint="--plot")
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as cause:
        if (cause.name or "").partition(".")[0] != "matplotlib":
            raise
        complain("--plot needs matplotlib, which is not installed: pip install 'lazyshard[plots]'")
        raise typer.Exit(exits.NO_EXTRA) from None
    return path


def draw_lengths(found: Overview, path: Path) -> None:
    """Draws a histogram of the rows' lengths: in tokens where they are known, else in bytes.

    Raises:
        StreamInvalid: there is no row yet.
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    lengths, unit = (found.tokens, "tokens") if found.tokens.count else (found.lengths, "bytes")
    if not lengths.count:
        raise StreamInvalid(
            f"{found.directory}: there is no row yet whose length could be drawn", directory=str(found.directory)
        )
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    bins = lengths.spread(_BINS)
    axes.bar(
        [one.low for one in bins],
        [one.count for one in bins],
        width=bins[0].high - bins[0].low,
        align="edge",
        color="#4878a8",
    )
    for name, share in _SHARES:
        at = lengths.quantile(share)
        axes.axvline(at, color="black", linewidth=0.8, linestyle=":")
        axes.annotate(
            f"{name} {at:,}",
            (at, 1),
            xycoords=("data", "axes fraction"),
            rotation=90,
            va="top",
            ha="right",
            bbox=_LABEL,
        )
    axes.set_xlabel(f"row length in {unit}")
    axes.set_ylabel("rows")
    # As text, not as a formula: a directory may have any name.
    axes.set_title(_title(found, lengths, unit), fontsize="medium", parse_math=False)
    figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def _title(found: Overview, lengths: Lengths, unit: str) -> str:
    return (
        f"{found.directory.name or found.directory}: {count(lengths.count, 'row')}, {lengths.total:,} {unit}, "
        f"mean {lengths.mean:,.1f}"
    )
