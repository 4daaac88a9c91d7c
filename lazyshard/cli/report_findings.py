"""What a report says of a whole stream: every part of it with its finding, in the order of the page."""

from __future__ import annotations

from typing import Final

from lazyshard.cli.report_advice import Finding, balance_finding, lengths_finding, packing_finding
from lazyshard.cli.report_advice_order import shuffle_finding
from lazyshard.cli.report_advice_run import (
    damage_finding,
    disk_finding,
    rates_finding,
    refusals_finding,
    waits_finding,
)
from lazyshard.cli.status_view import problems
from lazyshard.inspection.report_facts import ReportFacts
from lazyshard.store.urls import UrlPath

__all__ = ["TITLES", "findings_of", "problems_of"]

TITLES: Final = {
    "damage": "What could not be read",
    "lengths": "Lengths",
    "packing": "Packing",
    "balance": "Balance between ranks",
    "shuffle": "Shuffle distance",
    "rates": "Rates over time",
    "waits": "Waits",
    "refusals": "Bad rows",
    "disk": "Disk",
}
"""Of each part, in the order in which they stand."""


def problems_of(facts: ReportFacts) -> list[str]:
    """Returns what is wrong with the stream's files, a sentence each."""
    return list(dict.fromkeys([*problems(facts.outlook), *facts.unread]))


def findings_of(facts: ReportFacts) -> dict[str, Finding]:
    """Returns what is found of each part, by its name in `TITLES`; "damage" only where there is some."""
    survey, chunks = facts.outlook.survey, facts.chunks
    stream, census = str(survey.directory), survey.census
    span = facts.rows[-1].time - facts.rows[0].time if facts.rows else 0.0
    damage = damage_finding(stream, problems_of(facts), chunks.unread)
    objects = isinstance(survey.directory, UrlPath)
    return {
        **({} if damage is None else {"damage": damage}),
        "lengths": lengths_finding(stream, chunks.lengths, chunks.tokens, native=census.native, objects=objects),
        "packing": packing_finding(facts.packing, chunks.made),
        "balance": balance_finding(facts.balance, facts.no_balance, facts.training, facts.balance_of_steps),
        "shuffle": shuffle_finding(
            facts.shuffle, facts.no_shuffle, facts.training, dealt=facts.dealt is not None, made=chunks.made
        ),
        "rates": rates_finding(facts.rows, facts.sizes, facts.trained, ended=census.ended),
        "waits": waits_finding(
            facts.outlook, facts.pauses, span, facts.dry, sum(len(one) for one in facts.trained.values())
        ),
        "refusals": refusals_finding(stream, facts.refusals, chunks.made),
        "disk": disk_finding(stream, facts.outlook),
    }
