"""Asks a vulnerability service about the packages that are installed in this environment, by pip-audit.

    scripts/audit_dependencies                  of .venv
    scripts/audit_dependencies --if-possible    the same; where nobody could be asked it says so and exits with 0

pip-audit is taken from PATH, or from this environment; it need not be installed in it (`pipx install pip-audit`), and
nothing is installed or changed here. It asks pypi.org for known vulnerabilities of each package.

A machine without a way to the network is told from one without vulnerabilities: pip-audit itself exits with 0 and says
that none are known where it could not find out about any package, for instance behind a mirror that only has the files.

Exit codes:
    0   asked, and nothing is known of the packages that the service knows
    1   something is known: a line each, with the releases in which it is fixed
    2   usage
   75   nobody could be asked: pip-audit is not installed, the service did not answer, or it knows none of the packages
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from typing import Any, Final

FOUND: Final = 1
NOT_ASKED: Final = 75
"""EX_TEMPFAIL of sysexits.h: it can be tried again."""

TIMEOUT_S: Final = 15
"""For each answer of the service."""

_NAMED: Final = 5
"""So many packages of which nothing could be found out are named."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What is known.

    Attributes:
        asked: packages that the service knows.
        skipped: names of those that it does not know: of another index, of a local build, or not to be reached.
        lines: a line for each vulnerability.
    """

    asked: int
    skipped: tuple[str, ...]
    lines: tuple[str, ...]


def find_tool() -> list[str] | None:
    """Returns the command of pip-audit, None where there is none."""
    if importlib.util.find_spec("pip_audit") is not None:
        return [sys.executable, "-m", "pip_audit"]
    found = shutil.which("pip-audit")
    return None if found is None else [found]


def ask(tool: list[str], place: str) -> tuple[Answer | None, str]:
    """Asks about the packages in a folder; returns what is known, or None and why nobody answered."""
    command = [*tool, "--path", place, "--format", "json", "--progress-spinner", "off"]
    done = subprocess.run(
        [*command, "--timeout", str(TIMEOUT_S), "--skip-editable"], capture_output=True, text=True, check=False
    )
    try:
        return read_answer(json.loads(done.stdout)), ""
    except (ValueError, KeyError, TypeError):
        said = done.stderr.strip().splitlines()
        return None, said[-1] if said else f"pip-audit ended with code {done.returncode} and said nothing"


def read_answer(values: Any) -> Answer:
    """Reads what pip-audit prints.

    Raises:
        KeyError, TypeError: it is something else.
    """
    asked, skipped, lines = 0, [], []
    for package in values["dependencies"]:
        if "skip_reason" in package:
            skipped.append(str(package["name"]))
            continue
        asked += 1
        for known in package["vulns"]:
            fixed = ", ".join(known["fix_versions"]) or "no release yet"
            lines.append(f"{package['name']} {package['version']}: {known['id']}; fixed in {fixed}")
    return Answer(asked, tuple(skipped), tuple(lines))


def verdict(answer: Answer | None, why: str) -> tuple[int, list[str]]:
    """Returns the exit code and what to say."""
    if answer is None:
        return NOT_ASKED, [f"nobody could be asked about vulnerabilities: {why}"]
    if not answer.asked:
        count = len(answer.skipped)
        return NOT_ASKED, [f"nobody could be asked about vulnerabilities: nothing is known of any of {count} packages"]
    lines = list(answer.lines)
    if answer.skipped:
        more = f" and {len(answer.skipped) - _NAMED} more" if len(answer.skipped) > _NAMED else ""
        lines.append(f"not known to the service: {', '.join(answer.skipped[:_NAMED])}{more}")
    known = len(answer.lines)
    noun = "vulnerability" if known == 1 else "vulnerabilities"
    lines.append(f"asked about {answer.asked} packages: {known} known {noun}")
    return (FOUND if known else 0), lines


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(prog="scripts/audit_dependencies", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--if-possible", action="store_true", help="exit with 0 where nobody could be asked")
    parser.add_argument("--path", default=sysconfig.get_path("purelib"), help="the folder of packages (site-packages)")
    given = parser.parse_args(arguments)
    tool = find_tool()
    if tool is None:
        answer, why = None, "pip-audit is not installed (pipx install pip-audit)"
    else:
        answer, why = ask(tool, given.path)
    code, lines = verdict(answer, why)
    for line in lines:
        print(line)
    return 0 if code == NOT_ASKED and given.if_possible else code


if __name__ == "__main__":
    sys.exit(main())
