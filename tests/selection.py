"""Which tests a quick run takes, and in which order: `make test`, `make rest`.

A quick run has a budget of CPU seconds and a seed. `tests/durations.json` says what each test costs. The run
takes

1. every function without a record: a new test always runs;
2. one parameter set of each function, the cheap functions first, with a part of the budget. The next seed
   takes the next set, so that a function of five sets has run whole after five seeds;
3. all sets of the functions whose sets cost least, with a second part: rows of tables of forms and twins;
4. with what is left, a stretch of a ring of all other tests. The ring spreads the sets of each function
   evenly, so that each stretch has the same share of each function. The stretch of the next seed begins where
   this one ends, so that consecutive seeds run everything.

The seed is the number of the day, unless `--seed` or TEST_SEED gives another one. `--part rest` is what
`--part quick` with the same seed leaves. Both begin with tests that are static or fast,
and end with whole models.
"""

from __future__ import annotations

import datetime
import os
import shlex
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.durations import Seconds, function, read, shuffled

#: CPU seconds of the tests in a quick run, by the records.
BUDGET = 500.0
#: Parts of the budget: one set of each function, functions of cheap sets whole, the ring.
ONE_EACH, WHOLE = 0.5, 0.35
#: CPU seconds that are assumed of a test that was skipped when durations were recorded.
GUESS = 1.0
#: What is run first, in `tests`; then what takes less than FAST seconds; and last, in this order.
FIRST = ("package/test_layering.py", "package/test_config.py", "decisions/test_tables.py", "docs")
LATE = (("counterexamples", "fuzz"), ("models", "seed_systems"))
FAST = 0.05


@dataclass(frozen=True)
class Selection:
    """What a quick run takes.

    Attributes:
        chosen: ids of the tests.
        seconds: what they take by the records, the new ones apart.
        new: functions without a duration.
    """

    chosen: frozenset[str]
    seconds: float
    new: tuple[str, ...]


def select(ids: Iterable[str], seconds: Seconds, budget: float, seed: int) -> Selection:
    """The part of `ids` that the quick run of `seed` takes, in CPU seconds of at most `budget`.

    A test that is dearer than the budget's last part gets its turn too, and then exceeds the budget.
    """
    sets: dict[str, list[str]] = defaultdict(list)
    for nodeid in sorted(ids, key=shuffled):
        sets[function(nodeid)].append(nodeid)
    new = tuple(sorted(sets.keys() - seconds.keys()))
    cost = {name: guess(seconds[name]) for name in sets.keys() - set(new)}
    chosen = {nodeid for name in new for nodeid in sets[name]}
    spent = 0.0

    # Ties are broken by the name: every process chooses the same.
    for name in sorted(cost, key=lambda name: (cost[name], name)):
        if spent + cost[name] > budget * ONE_EACH:
            break
        some = sets[name]
        chosen.add(some[(seed + shuffled(name)) % len(some)])
        spent += cost[name]

    # By the cost of one set: a hundred rows of a tenth of a second find more than three whole models.
    whole: set[str] = set()
    limit = spent + budget * WHOLE
    for name in sorted(cost, key=lambda name: (cost[name], name)):
        more = [nodeid for nodeid in sets[name] if nodeid not in chosen]
        if spent + cost[name] * len(more) > limit:
            break
        chosen.update(more)
        spent += cost[name] * len(more)
        whole.add(name)

    rest = {nodeid: cost[name] for name in cost.keys() - whole for nodeid in sets[name]}
    for nodeid in stretch(rest, budget - spent, seed):
        spent += 0.0 if nodeid in chosen else rest[nodeid]
        chosen.add(nodeid)
    return Selection(frozenset(chosen), spent, new)


def guess(seconds: float | None) -> float:
    """The CPU seconds of a test whose record is `seconds`."""
    return GUESS if seconds is None else seconds


def stretch(cost: Seconds, length: float, seed: int) -> list[str]:
    """The tests of `cost` that begin in the `seed`-th stretch of that many seconds of their ring."""
    places: dict[str, float] = {}
    sets: dict[str, list[str]] = defaultdict(list)
    for nodeid in sorted(cost, key=shuffled):
        sets[function(nodeid)].append(nodeid)
    for name, some in sets.items():
        first = shuffled(name, "place") / 2**64
        places |= {nodeid: (i + first) / len(some) for i, nodeid in enumerate(some)}
    # In whole milliseconds, at least one each: a day's number times a length must not be rounded.
    milliseconds = {nodeid: max(1, round(1000 * guess(cost[nodeid]))) for nodeid in places}
    around = sum(milliseconds.values())
    # The last test may reach out of the stretch.
    stride = max(1, round(1000 * length) - max(milliseconds.values(), default=0), round(100 * length))
    if stride >= around:
        return list(places)
    begin, found = 0, []
    for nodeid in sorted(places, key=lambda nodeid: (places[nodeid], nodeid)):
        if (begin - seed * stride) % around < stride:
            found.append(nodeid)
        begin += milliseconds[nodeid]
    return found


def stage(nodeid: str, seconds: Seconds) -> int:
    """When a test is run: 0 first."""
    path = nodeid.partition("::")[0]
    if path.startswith(tuple(f"tests/{name}" for name in FIRST)):
        return 0
    known = seconds.get(function(nodeid))
    if known is not None and known < FAST:
        return 1
    folders = path.split("/")
    return next((3 + i for i, late in enumerate(LATE) if not set(late).isdisjoint(folders)), 2)


def todays_seed() -> int:
    """The seed of this run: TEST_SEED, or the number of the day."""
    given = os.environ.get("TEST_SEED", "")
    return int(given) if given else datetime.date.today().toordinal()


def addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("selection")
    group.addoption("--part", choices=("quick", "rest", "all"), help="a selection, the others, or every test")
    group.addoption("--seed", type=int, help="of the selection; without: TEST_SEED, or the day")
    group.addoption("--budget", type=float, default=BUDGET, help="CPU seconds of a quick run")


def configure(config: pytest.Config) -> None:
    """Settle the seed. Workers, and tests that draw by the seed, find it in the environment."""
    if config.getoption("seed") is None:
        config.option.seed = todays_seed()
    os.environ["TEST_SEED"] = str(config.option.seed)
    if config.getoption("part"):
        config.pluginmanager.register(Part(config), "part")


class Part:
    """Deselects what is not in the part that was asked for, orders the others and says what was chosen."""

    def __init__(self, config: pytest.Config) -> None:
        self.part: str = config.getoption("part")
        self.seed: int = config.getoption("seed")
        self.budget: float = config.getoption("budget")
        self.about = ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        seconds = read()
        # What is skipped anyhow costs nothing, and is named with the rest.
        runs = [item for item in items if not any(item.iter_markers("skip"))]
        selection = select((item.nodeid for item in runs), seconds, self.budget, self.seed)
        kept = [item for item in items if self.takes(item, selection)]
        config.hook.pytest_deselected(items=[item for item in items if not self.takes(item, selection)])
        items[:] = sorted(kept, key=lambda item: stage(item.nodeid, seconds))
        self.about = f"{self.part}: {len(kept)} of {len(items)} tests, seed {self.seed}"
        if self.part == "quick":
            self.about += f", about {selection.seconds:.0f} CPU seconds"
        if selection.new:
            self.about += (
                f", {len(selection.new)} functions without a duration (python -m tests.durations --new)"
            )

    def takes(self, item: pytest.Item, selection: Selection) -> bool:
        return self.part == "all" or (item.nodeid in selection.chosen) is (self.part == "quick")

    def pytest_report_header(self) -> str:
        return f"{self.part} part of the tests, seed {self.seed}"

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["selection"] = self.about

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.about = getattr(node, "workeroutput", {}).get("selection", self.about)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        stats = terminalreporter.stats.values()
        reports = [report for some in stats for report in some if isinstance(report, pytest.TestReport)]
        used = sum(dict(r.user_properties).get("cpu seconds", 0.0) for r in reports if r.when == "teardown")
        failed = [r.nodeid for r in reports if r.failed]
        terminalreporter.write_line(f"{self.about or self.part}; {used:.0f} CPU seconds were used")
        if failed:
            target = {"quick": "quick", "rest": "rest", "all": "unit"}[self.part]
            terminalreporter.write_line(f"the first failure again: python -m pytest {shlex.quote(failed[0])}")
            terminalreporter.write_line(f"the same tests again: make {target} SEED={self.seed}")
