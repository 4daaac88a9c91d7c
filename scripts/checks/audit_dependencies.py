"""Queries a vulnerability service for the packages installed in this environment, by pip-audit.

    scripts/audit_dependencies                  checks .venv
    scripts/audit_dependencies --if-possible    the same, but exits with 0 if the service cannot be reached

Uses pip-audit from this environment or from PATH (`pipx install pip-audit`); installs and changes nothing. pip-audit
queries pypi.org for known vulnerabilities of each package.

Distinguishes a machine without network access from one without vulnerabilities: pip-audit itself exits with 0 and
reports none if it could not look up any package, for example behind a mirror that only has the files.

Exit codes:
    0   no known vulnerabilities in the packages that the service knows
    1   vulnerabilities, one per line, with the releases that fix them
    2   usage error
   75   no answer: pip-audit is not installed, the service did not answer, or it knows none of the packages
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
"""EX_TEMPFAIL of sysexits.h: try again later."""

TIMEOUT_S: Final = 15
"""Timeout of each request to the service."""

_NAMED: Final = 5
"""Number of unknown packages that are listed."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result.

    Attributes:
        asked: Number of packages that the service knows.
        skipped: Names of unknown packages: from another index, built locally, or not reachable.
        lines: One line per vulnerability.
    """

    asked: int
    skipped: tuple[str, ...]
    lines: tuple[str, ...]


def find_tool() -> list[str] | None:
    """Returns the command of pip-audit, or None if it is not installed."""
    if importlib.util.find_spec("pip_audit") is not None:
        return [sys.executable, "-m", "pip_audit"]
    found = shutil.which("pip-audit")
    return None if found is None else [found]


def ask(tool: list[str], place: str) -> tuple[Answer | None, str]:
    """Queries the packages in a folder; returns the result, or None and the reason."""
    command = [*tool, "--path", place, "--format", "json", "--progress-spinner", "off"]
    done = subprocess.run(
        [*command, "--timeout", str(TIMEOUT_S), "--skip-editable"], capture_output=True, text=True, check=False
    )
    try:
        return read_answer(json.loads(done.stdout)), ""
    except (ValueError, KeyError, TypeError):
        said = done.stderr.strip().splitlines()
        return None, said[-1] if said else f"pip-audit exited with code {done.returncode} and no output"


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
    """Returns the exit code and the lines to print."""
    if answer is None:
        return NOT_ASKED, [f"could not check for vulnerabilities: {why}"]
    if not answer.asked:
        count = len(answer.skipped)
        return NOT_ASKED, [f"could not check for vulnerabilities: none of {count} packages is known to the service"]
    lines = list(answer.lines)
    if answer.skipped:
        more = f" and {len(answer.skipped) - _NAMED} more" if len(answer.skipped) > _NAMED else ""
        lines.append(f"not known to the service: {', '.join(answer.skipped[:_NAMED])}{more}")
    known = len(answer.lines)
    noun = "vulnerability" if known == 1 else "vulnerabilities"
    lines.append(f"checked {answer.asked} packages: {known} known {noun}")
    return (FOUND if known else 0), lines


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(prog="scripts/audit_dependencies", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--if-possible", action="store_true", help="exit with 0 if the service cannot be reached")
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
