"""The pytest plugin: users pin in their own tests what is fused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import inductor_fusions

pytest_plugins = "pytester"

ROOT = Path(inductor_fusions.__file__).parents[1]

USERS_TESTS = """
import sys
import torch

def attention(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) * 0.3, dim=-1) @ v

def of_summed_weights(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) * 0.3, dim=-1).cumsum(-1) @ v

def inputs():
    return [torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3)]

class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2 if torch.compiler.is_compiling() else x.clone()
    @staticmethod
    def backward(ctx, grad):
        return grad

def test_nothing_is_imported(assert_fused, assert_close_to_eager):
    assert "inductor_fusions" not in sys.modules

def test_pinned(assert_fused):
    run = assert_fused(attention, *inputs(), expected={"attention": 1}, train=True)
    assert len(run.sites) == 1

def test_keywords(assert_fused):
    q, k, v = inputs()
    assert_fused(attention, q, v=v, k=k, expected={"attention": 1})

def test_lost(assert_fused):
    assert_fused(of_summed_weights, *inputs(), expected={"attention": 1})

def test_close(assert_close_to_eager):
    run = assert_close_to_eager(attention, *inputs())
    assert set(run.grads) == {"0", "1", "2"}

def test_far(assert_close_to_eager):
    def doubled(x):
        return x * 2 if torch.compiler.is_compiling() else x * 1
    assert_close_to_eager(doubled, torch.randn(3, requires_grad=True))
"""


@pytest.fixture
def users(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project of a user's with tests, and the plugin alone."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "inductor_fusions_hooks.pytest_plugin")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PYTHONPATH", path)
    return pytester


@pytest.mark.slow
def test_fixtures_and_report(users: pytest.Pytester) -> None:
    users.makepyfile(USERS_TESTS)
    result = users.runpytest_subprocess(
        "--fusions-report", "report.json", "-p", "no:cacheprovider", timeout=500
    )
    result.assert_outcomes(passed=4, failed=2)
    # The message has the count, and the table with the reason.
    result.stdout.fnmatch_lines(["*fused nothing, expected {'attention': 1}*", "*rejected*cumsum*"])
    result.stdout.fnmatch_lines(["*output?0?: error 1.00e+00*"])
    result.stdout.fnmatch_lines(["inductor_fusions: 3 fused, 1 rejected in 4 tests: report.json"])
    report = json.loads((users.path / "report.json").read_text())
    assert report["schema"] == 1
    verdicts = {
        name.partition("::")[2]: [s["verdict"] for s in sites] for name, sites in report["tests"].items()
    }
    assert verdicts == {
        "test_close": ["fused"],
        "test_keywords": ["fused"],
        "test_lost": ["rejected"],
        "test_pinned": ["fused"],
    }


def test_report_under_xdist(users: pytest.Pytester) -> None:
    """The workers' sites come together; here by hand, without a compile."""
    pytest.importorskip("xdist")
    users.makeconftest(
        """
        import sys, types
        sites = []
        class Report(list):
            def to_dict(self):
                return {"sites": list(self)}
        sys.modules["inductor_fusions"] = types.SimpleNamespace(report=lambda: Report(sites))
        """
    )
    users.makepyfile(
        """
        import pytest, conftest
        @pytest.mark.parametrize("number", range(4))
        def test_one(number):
            conftest.sites.append({"verdict": "fused", "number": number})
        def test_cleared():
            conftest.sites.clear()
        """
    )
    result = users.runpytest_subprocess("-p", "xdist", "-n", "2", "--fusions-report", "all.json")
    result.assert_outcomes(passed=5)
    tests = json.loads((users.path / "all.json").read_text())["tests"]
    assert sorted(site["number"] for sites in tests.values() for site in sites) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("file", "says"), [("no/such/report.json", "the folder no/such does not exist"), (".", ". is a folder")]
)
def test_report_that_cannot_be_written(users: pytest.Pytester, file: str, says: str) -> None:
    result = users.runpytest_subprocess("--fusions-report", file)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*--fusions-report: {says}*"])


def test_silent_without_the_option(users: pytest.Pytester) -> None:
    users.makepyfile("import sys\ndef test_it(): assert not {'torch', 'inductor_fusions'} & set(sys.modules)")
    result = users.runpytest_subprocess()
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*inductor_fusions:*")
