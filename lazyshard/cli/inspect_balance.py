"""`lazyshard inspect --balance`: its options, and what is done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import typer

from lazyshard.cli import exits
from lazyshard.cli.inspect_balance_view import balance_lines, balance_values
from lazyshard.cli.output import say
from lazyshard.format.dealt import DealtByCost
from lazyshard.inspection.inspection_balance import LENGTH_FIELD, Training, dealt_by_cost, report_balance
from lazyshard.plan.balance import PER_TOKEN, PER_TOKEN_SQUARED, Cost
from lazyshard.stream.opening import open_now

_MOST_RANKS: Final = 1_000_000

BalanceOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--balance",
        metavar="RANKS",
        min=1,
        max=_MOST_RANKS,
        help="Tell how even the steps of so many data-parallel ranks are: the largest cost of a rank over the mean.",
    ),
]
MicroBatchSizeOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--micro-batch-size",
        metavar="B",
        min=1,
        max=1_000_000,
        help="With --balance: rows of a rank in a micro batch. Default: that for which the stream was dealt, or 1.",
    ),
]
LengthFieldOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--length-field",
        metavar="NAME",
        help="With --balance: the field with a row's length in tokens, where neither `lazyshard measure` nor the seals "
        f"tell it. Default: that of the stream, or {LENGTH_FIELD}.",
    ),
]
CostOption: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--cost-per-token",
        metavar="NUMBER",
        min=0,
        help=f"With --balance: what a token costs by itself. Default: that of the stream, or {PER_TOKEN:g}.",
    ),
]
SquaredCostOption: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--cost-per-token-squared",
        metavar="NUMBER",
        min=0,
        help="With --balance: what a row costs for the square of its tokens. Default: that of the stream, or "
        f"{PER_TOKEN_SQUARED:g}.",
    ),
]


def show_balance(
    directory: Path,
    samples_per_chunk: int | None,
    ranks: int,
    given: tuple[int | None, str | None, float | None, float | None],
    every: bool,
    as_json: bool,
) -> int:
    """Shows how even the steps of a stream are.

    Args:
        directory: the stream's directory.
        samples_per_chunk: of a foreign directory.
        ranks: data-parallel ranks.
        given: micro batch size, field of the length, cost of a token and of its square; None for what the stream says.
        every: whether to look at all rows.
        as_json: whether for programs.

    Raises:
        typer.BadParameter: a cost cannot be.
        LazyShardError, OSError: as `report_balance`.
    """
    stream = open_now(directory, samples_per_chunk)
    default = dealt_by_cost(stream) or DealtByCost(ranks, 1, LENGTH_FIELD, PER_TOKEN, PER_TOKEN_SQUARED)
    size, field, cost, squared = given
    try:
        costs = Cost(
            default.cost_per_token if cost is None else cost,
            default.cost_per_token_squared if squared is None else squared,
        )
    except ValueError as cause:
        raise typer.BadParameter(str(cause), param_hint="--cost-per-token") from cause
    training = Training(ranks, size or default.micro_batch_size, field or default.length_field, costs)
    found = report_balance(stream, training, every=every)
    if as_json:
        say(json.dumps(balance_values(directory, found)))
    else:
        for line in balance_lines(directory, found):
            say(line)
    return exits.DONE
