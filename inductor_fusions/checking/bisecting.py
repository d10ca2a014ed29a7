"""Bisection over fused sites: finds the one that changes the behaviour of a script."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from ..reasons import Reason
from ..sites import SCHEMA, Site


class By(str, Enum):
    """How a wrong run is recognised."""

    exit = "exit"
    output = "output"


class NotFound(Exception):
    """No site changes the result; the message says why."""


@dataclass(frozen=True)
class Found:
    """The site that changes the result.

    Attributes:
        number: its position among the fused sites of the process, from 1. With fewer sites the result is
            right.
        sites: the number of fused sites; None if a run with all of them ends without a report.
        site: the site.
    """

    number: int
    sites: int | None
    site: Site

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "schema": SCHEMA, "found": True, "number": self.number, "sites": self.sites,
            "site": asdict(self.site),
        }  # fmt: skip

    def __str__(self) -> str:
        of_all = f" of {self.sites}" if self.sites else ""
        return (
            f"site {self.number}{of_all} changes the result:\n{self.site}\n"
            f"The result is right with INDUCTOR_FUSIONS_MAX={self.number - 1}, and wrong with "
            f"INDUCTOR_FUSIONS_MAX={self.number}"
        )


@dataclass(frozen=True)
class _Run:
    """One run of the script.

    Attributes:
        fused: the fused sites, in order.
        following: the first site that was left out for the limit; None if there is none.
        killed: whether a signal ended it, so that it has no report.
    """

    code: int
    output: str
    fused: list[Site]
    following: Site | None = None
    killed: bool = False


def bisect(
    script: Sequence[str],
    arguments: Sequence[str],
    by: By = By.exit,
    rtol: float = 1e-2,
    say: Callable[[str], None] = lambda line: None,
) -> Found:
    """Run a script with only the first fused sites, and halve their number.

    Args:
        script: a file, or "-m" and a module.
        arguments: of the script.
        by: when a run counts as wrong.
        rtol: with `By.output`: the allowed relative difference of numbers on stdout.
        say: called with one line about each run.

    Raises:
        NotFound: no site changes the result.
    """
    reference = _run(script, arguments, 0)

    def right(run: _Run) -> bool:
        if by is By.exit:
            return run.code == 0
        return run.code == reference.code and same_numbers(run.output, reference.output, rtol)

    say(f"no site fused: exit code {reference.code}")
    if not right(reference):
        raise NotFound(
            f"the script fails without fusions too (exit code {reference.code}), so no site is the cause"
        )

    def tried(most: int) -> tuple[_Run, bool]:
        run = _run(script, arguments, most)
        count = most if run.killed else len(run.fused)
        say(f"{'all' if count == sys.maxsize else count} sites fused: {'right' if right(run) else 'wrong'}")
        return run, right(run)

    last, good = tried(sys.maxsize)
    total = None if last.killed else len(last.fused)
    if good:
        raise NotFound(f"the result is right with all {total} sites fused, so there is nothing to find")
    if total == 0:
        raise NotFound("the result differs although nothing was fused, so no fusion is the cause")
    low, high, first = 0, total, reference  # right with `low` sites, wrong with `high`
    while high is None or high - low > 1:
        middle = max(1, 2 * low) if high is None else (low + high) // 2
        run, good = tried(middle)
        if not good:
            high, last = middle, run
        elif high is None and run.following is None:
            break
        else:
            low, first = middle, run
    site = first.following if last.killed else next(iter(last.fused[(high or 1) - 1 :]), None)
    if high is None or site is None:
        raise NotFound("the script fuses different sites in each run: make it deterministic")
    return Found(high, total, site)


def _run(script: Sequence[str], arguments: Sequence[str], most: int) -> _Run:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        run = [sys.executable, "-m", "inductor_fusions", "run", "--json", str(report)]
        env = {**os.environ, "INDUCTOR_FUSIONS_MAX": str(most)}
        done = subprocess.run([*run, *script, *arguments], env=env, capture_output=True, text=True)
        try:
            sites = [Site.from_dict(site) for site in json.loads(report.read_text("utf-8"))["sites"]]
        except (OSError, ValueError):
            if done.returncode < 0 and most:
                return _Run(done.returncode, done.stdout, [], killed=True)
            raise NotFound(f"the script ended without a report: {done.stderr.strip()[-300:]}") from None
    following = next((site for site in sites if site.code == Reason.LEFT_OUT.code), None)
    if following is not None:  # as it is where a run that fuses it is killed
        kernel = "unknown, because the process was killed"
        following = replace(following, verdict="fused", reason="", hint="", code="", kernel=kernel)
    fused = [site for site in sites if site.verdict == "fused"]
    return _Run(done.returncode, done.stdout, fused, following)


_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\bnan\b|\binf\b)")


def same_numbers(output: str, reference: str, rtol: float) -> bool:
    """Whether two texts have the same numbers, up to a relative distance, in the same places."""
    ours, theirs = _NUMBER.findall(output), _NUMBER.findall(reference)
    if len(ours) != len(theirs):
        return False
    return all(
        a == b or math.isclose(float(a), float(b), rel_tol=rtol, abs_tol=1e-12)
        for a, b in zip(ours, theirs, strict=True)
    )
