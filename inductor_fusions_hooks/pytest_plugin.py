"""A pytest plugin: pin in your own tests what is fused.

| | |
|---|---|
| `assert_fused(model, *args, expected={"attention": 12})` | fixture: how many sites each fusion fuses |
| `assert_close_to_eager(model, *args)` | fixture: the compiled model is about as exact as the eager one |
| `--fusions-report FILE` | every site that the tests compiled, as JSON, by test |

Nothing of inductor_fusions or torch is imported before a test asks for it.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

_KEY = pytest.StashKey["_Collector"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("inductor_fusions")
    group.addoption(
        "--fusions-report",
        metavar="FILE",
        type=Path,
        help="write what was fused in each test, and why the rest was not, as JSON",
    )


@pytest.fixture
def assert_fused() -> Callable[..., Any]:
    """Assert how many sites each fusion fuses in a model.

    assert_fused(model, *args, expected={"attention": 12}, train=False, policy="always", **kwargs); what is
    not in `expected` must not be fused. `policy="profitable"` pins what is fused on the device of the test.
    """

    def check(
        fn: Callable[..., Any],
        *args: Any,
        expected: Mapping[str, int],
        train: bool = False,
        dynamic: bool | None = None,
        policy: str = "always",
        **kwargs: Any,
    ) -> Any:
        __tracebackhide__ = True
        from inductor_fusions import testing

        run = testing.capture(fn, *args, train=train, dynamic=dynamic, policy=policy, **kwargs)
        testing.assert_counts(run.sites, expected)
        return run

    return check


@pytest.fixture
def assert_close_to_eager() -> Callable[..., Any]:
    """Assert that a model compiled with the fusions is about as exact as it is eagerly, gradients included.

    assert_close_to_eager(model, *args, train=True, policy="always", **kwargs); both are measured against
    float64.
    """

    def check(
        fn: Callable[..., Any],
        *args: Any,
        train: bool = True,
        factor: float = 1.5,
        slack: float = 4.0,
        dynamic: bool | None = None,
        policy: str = "always",
        **kwargs: Any,
    ) -> Any:
        __tracebackhide__ = True
        from inductor_fusions import testing

        return testing.assert_close_to_eager(
            fn, args, train=train, factor=factor, slack=slack, dynamic=dynamic, policy=policy, keywords=kwargs
        )

    return check


class _Collector:
    """Gathers the sites of each test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tests: dict[str, list[dict[str, Any]]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = len(_sites())
        result = yield
        sites = _sites()
        new = sites[before:] if len(sites) >= before else sites  # the test may have cleared them
        if new:
            self.tests[item.nodeid] = new
        return result

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:  # a worker of pytest-xdist
            output["fusions_report"] = json.dumps(self.tests)
            return
        report = {"schema": 1, "tests": dict(sorted(self.tests.items()))}
        self.path.write_text(json.dumps(report, indent=1) + "\n", "utf-8")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.tests |= json.loads(getattr(node, "workeroutput", {}).get("fusions_report", "{}"))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        verdicts = Counter(site["verdict"] for sites in self.tests.values() for site in sites)
        said = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()) or "no candidate"
        terminalreporter.write_line(f"inductor_fusions: {said} in {len(self.tests)} tests: {self.path}")


def _sites() -> list[dict[str, Any]]:
    module = sys.modules.get("inductor_fusions")
    return module.report().to_dict()["sites"] if module is not None else []


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--fusions-report")
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise pytest.UsageError(f"--fusions-report: the folder {path.parent} does not exist")
    if path.is_dir():
        raise pytest.UsageError(f"--fusions-report: {path} is a folder, not a file")
    config.stash[_KEY] = _Collector(path)
    config.pluginmanager.register(config.stash[_KEY], "inductor_fusions_report")
