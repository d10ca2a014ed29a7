"""`run --issue FILE SCRIPT`: environment, report, graphs and traceback in one file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import fx

from .. import reporting
from ..driver.watching import Watcher
from .environment import environment

#: Graphs that are kept, the first ones that have a site, and characters of each.
GRAPHS, LONGEST = 8, 200_000


class Collector(Watcher):
    """Keeps the first graphs in which a fusion met something, as code of Python, as they were before.

    A graph that cannot be written as code is left out: the compile must not fail for it.
    """

    def __init__(self) -> None:
        self.graphs: list[dict[str, Any]] = []
        self._before = ""

    def begins(self, stage: str, graph: fx.Graph) -> None:
        self._before = ""
        if len(self.graphs) < GRAPHS:
            with contextlib.suppress(Exception):
                self._before = graph.python_code("self", verbose=True).src[:LONGEST]

    def ends(self, stage: str, graph: fx.Graph, sites: Sequence[Any]) -> None:
        if self._before and sites:
            found = reporting.Report(list(sites)).to_dict()["sites"]
            self.graphs.append({"stage": stage, "code": self._before, "sites": found})


def write(path: Path, collector: Collector, error: str) -> None:
    """Write environment, report, graphs and what was raised.

    Args:
        error: traceback of what the script raised, or "".
    """
    found = {
        "schema": 1,
        "environment": environment(),
        "error": error,
        "report": reporting.report().to_dict()["sites"],
        "graphs": collector.graphs,
    }
    path.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
