"""What was fused and why not: the report, logs, counters and traces."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

import inductor_fusions
from inductor_fusions import Report, Site, _inductor, config, reporting, testing
from inductor_fusions.driver import passes
from tests.support.installed import install
from tests.support.processes import start

ROOT = Path(inductor_fusions.__file__).parents[1]


def attention(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) * 0.3, dim=-1) @ v


def of_summed_weights(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) * 0.3, dim=-1).cumsum(-1) @ v


def inputs() -> list[torch.Tensor]:
    return [torch.randn(1, 2, 5, 8) for _ in range(3)]


def compile_with_passes(fn) -> None:
    with config.patch(policy="always", stock_misfires=False):
        torch._dynamo.reset()
        torch.compile(fn, backend=testing.AfterPasses([]))(*inputs())


@pytest.fixture(autouse=True)
def empty() -> None:
    inductor_fusions.clear()


def test_report() -> None:
    """Each site with the user's line, what was found there and what it became; equal ones are one row."""
    assert "no candidate" in str(inductor_fusions.report())
    for fn in (attention, of_summed_weights, attention):
        compile_with_passes(fn)
    found = inductor_fusions.report()
    assert [site.verdict for site in found] == ["fused", "rejected", "fused"]
    assert (len(found), found.count(), found.count("rejected"), found.count("failed")) == (3, 2, 1, 0)
    assert (found.count("fused", "attention"), found.count("fused", "another")) == (2, 0)
    assert dict(counters["inductor_fusions"]) == {"attention_fused": 2, "attention_rejected": 1}
    fused, rejected, _ = found
    line = attention.__code__.co_firstlineno + 1
    assert fused.source.startswith(f"{__file__}:{line} in attention: return torch.softmax(")
    assert fused.kernel.startswith("sdpa") and not fused.reason
    assert "[1, 2, 5, 5]" in fused.details["scores"]
    assert "cumsum" in rejected.reason and not rejected.kernel
    assert "of_summed_weights" in str(rejected) and "rejected" in str(rejected)
    rows = [line.split()[:4] for line in str(found).splitlines()]
    assert ["2", "attention", "fused", "sdpa"] in rows and ["1", "attention", "rejected", "cumsum"] in rows
    assert str(found).endswith("2 fused, 1 rejected")
    data = json.loads(found.to_json())
    assert data["schema"] == 1 and Report([Site(**site) for site in data["sites"]]).sites == found.sites
    inductor_fusions.clear()
    assert len(inductor_fusions.report()) == 0


def test_log(caplog: pytest.LogCaptureFixture) -> None:
    """One line a site, at INFO; nothing at WARNING."""
    with caplog.at_level(logging.INFO, logger="inductor_fusions"):
        compile_with_passes(attention)
        compile_with_passes(of_summed_weights)
    lines = [r.getMessage() for r in caplog.records if r.name.startswith("inductor_fusions")]
    assert sum("fused (sdpa" in line for line in lines) == 1
    assert sum("rejected (cumsum" in line for line in lines) == 1
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING and "inductor_fusions" in r.name]


PROGRAM = """
import torch, inductor_fusions
f = lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v
q, k, v = torch.randn(3, 1, 2, 4, 8).unbind(0)
torch.compile(f)(q, k, v)
"""


def started(program: str = PROGRAM, first: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program, with one more folder in front of the path."""
    own = {"INDUCTOR_FUSIONS_POLICY": "always", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", **variables}
    return start("-c", program, first=first, **own)


def test_torch_logs_and_trace(tmp_path: Path) -> None:
    """TORCH_LOGS by the name of the package, and a JSON artifact in TORCH_TRACE."""
    done = started(TORCH_LOGS="+inductor_fusions", TORCH_TRACE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "attention: fused (sdpa" in done.stderr
    text = "".join(path.read_text() for path in tmp_path.iterdir())
    lines = text.splitlines()
    (at,) = [i for i, line in enumerate(lines) if '"name": "inductor_fusions"' in line]
    assert '"encoding": "json"' in lines[at]
    payload = []
    for line in lines[at + 1 :]:
        if not line.startswith("\t"):
            break
        payload.append(line)
    (site,) = json.loads("\n".join(payload))["sites"]
    assert (site["fusion"], site["verdict"]) == ("attention", "fused")


def test_silent() -> None:
    """Without TORCH_LOGS nothing is printed."""
    done = started()
    assert (done.returncode, done.stdout) == (0, "")
    assert "inductor_fusions" not in done.stderr


# -- short names for TORCH_LOGS -------------------------------------------------------------------

TWO = """
import sys, torch
print("inductor_fusions" in sys.modules)
import inductor_fusions
from inductor_fusions import testing
for dim in -1, -2:
    f = lambda q, k, v: torch.softmax(q @ k.mT, dim) @ v
    torch.compile(f, backend=testing.AfterPasses([]))(*torch.randn(3, 1, 2, 4, 8).unbind(0))
"""


@pytest.fixture
def installed(tmp_path: Path) -> str:
    """A folder in which the package looks installed, with the entry points of pyproject.toml."""
    install(ROOT / "pyproject.toml", tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("names", "fused", "missed"), [("+fusions", True, True), ("fusion_misses", False, True)]
)
def test_short_names(names: str, fused: bool, missed: bool, installed: str) -> None:
    """From torch 2.13 on. Importing torch alone does not import the package."""
    if _inductor.torch_version() < (2, 13):
        pytest.skip("torch loads the names too late")
    done = started(TWO, installed, TORCH_LOGS=names)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "False\n"
    assert ("attention: fused (sdpa" in done.stderr) is fused
    assert ("attention: rejected (the product after the softmax" in done.stderr) is missed
    assert done.stderr.count("rejected") == 1


def test_entry_points_change_nothing_else(installed: str) -> None:
    done = started("import sys, torch; print('inductor_fusions' in sys.modules)", installed)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


def test_names_that_cannot_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without this registry is not broken by it."""
    from torch._logging import _internal as logs

    from inductor_fusions_hooks import torch_logs

    monkeypatch.delattr(logs, "register_artifact")
    with pytest.warns(UserWarning, match="long name"):
        torch_logs.register()


# -- once, where nothing was fused ----------------------------------------------------------------


@pytest.fixture
def unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    for name in ("fused", "warned"):
        monkeypatch.setattr(reporting._state, name, False)


def missed(hint: str = "", verdict: str = "rejected") -> Site:
    return Site("attention", verdict, "n", reason="because", hint=hint)


def warnings_of(caplog: pytest.LogCaptureFixture, *graphs: list[Site]) -> list[str]:
    caplog.clear()
    for sites in graphs:
        reporting._warn_if_nothing(sites)
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_nothing_fused_is_said_once(unsaid: None, caplog: pytest.LogCaptureFixture) -> None:
    (said,) = warnings_of(caplog, [], [missed(), missed()], [missed()])
    assert said.startswith("none of 2 sites was fused; 2 of them: because. To see each: ")


def test_one_site_that_is_not_fused(unsaid: None, caplog: pytest.LogCaptureFixture) -> None:
    (said,) = warnings_of(caplog, [missed()])
    assert said.startswith("a site was not fused: because. To see each: ")


@pytest.mark.parametrize("graphs", [
    [[]],
    [[missed(verdict="left to stock")]],  # as good as it can be
    [[Site("attention", "fused", "n")], [missed()]],
    [[missed(), Site("attention", "fused", "n")]],
])  # fmt: skip
def test_nothing_to_say(graphs: list, unsaid: None, caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(caplog, *graphs) == []


def test_left_to_stock_with_a_hint_is_said(unsaid: None, caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(caplog, [missed("set a variable", "left to stock")])


@pytest.mark.parametrize("name", ["train.py", "__main__.py"])
def test_said_by_a_compile(name: str, unsaid: None, caplog: pytest.LogCaptureFixture, tmp_path: Path,
                           monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """With the command that explains it, for the script that runs; a package does not run as a file."""
    script = tmp_path / name
    script.touch()
    monkeypatch.setattr(sys, "argv", [str(script)])
    torch.compile(of_summed_weights, backend=_inductor.passes_only())(*inputs())
    (record,) = [r for r in caplog.records if r.name == "inductor_fusions.reporting"]
    assert record.levelno == logging.WARNING
    command = f"python -m inductor_fusions run --report {script}"
    assert record.getMessage().endswith(command if name == "train.py" else "print(inductor_fusions.report())")


# -- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "said"), [
    ("L['self'].layers.3.attention", "layers.3.attention"),
    ("L['self']._modules['layers']._modules['3'].attention", "layers.3.attention"),
    ("L['m'].__dict__._modules.base.__dict__._modules.model.layers.3", "base.model.layers.3"),
    ("L['fn'].layers[3].attention", "layers.3.attention"),
    ("L['self']", ""),
    ("G['model'].encoder", "encoder"),
])  # fmt: skip
def test_module_path(path: str, said: str) -> None:
    node = torch.fx.Graph().placeholder("x")
    node.meta["nn_module_stack"] = {"0": ("L['self']", object), "1": (path, object)}
    assert _inductor.module_path(node) == said


def test_source_line() -> None:
    """The innermost frame of the user's, also where its text is not known."""
    node = torch.fx.Graph().placeholder("x")
    assert _inductor.source_line(node) == ""
    node.meta["stack_trace"] = (
        '  File "a.py", line 1, in f\n    g(x)\n  File "b.py", line 2, in g\n    x + 1\n'
    )
    assert _inductor.source_line(node) == "b.py:2 in g: x + 1"
    node.meta["stack_trace"] = (
        '  File "a.py", line 1, in f\n    g(x)\n  File "<stdin>", line 2, in <lambda>\n'
    )
    assert _inductor.source_line(node) == "<stdin>:2 in <lambda>"
    ours = _inductor.compiling.__file__
    own = f'  File "<stdin>", line 2, in f\n  File "{ours}", line 9, in call\n    return fn(x)\n'
    node.meta["stack_trace"] = own
    assert _inductor.source_line(node) == "<stdin>:2 in f"


# -- cost -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_cost_when_nobody_looks(monkeypatch: pytest.MonkeyPatch, fresh_cache: None) -> None:
    """All reporting together takes less than 1% of a compile with code generation, files included."""
    import time

    spent = [0.0]
    inside = [False]

    def timed(fn):
        def call(*args, **kwargs):
            if inside[0]:
                return fn(*args, **kwargs)
            inside[0], start = True, time.perf_counter()
            try:
                return fn(*args, **kwargs)
            finally:
                spent[0] += time.perf_counter() - start
                inside[0] = False

        return call

    for module, names in (
        (reporting, ("begin", "keep_pending", "store")),
        (_inductor, ("source_line", "module_path")),
        (passes, ("_mark", "_tell", "trace_artifact")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, timed(getattr(module, name)))

    def share(factor: int) -> float:
        def deep(x):
            for _ in range(24):
                x = x + torch.relu(attention(x, x + 1, x - 1)) * factor
            return x

        inductor_fusions.clear()
        spent[0] = 0.0
        with config.patch(policy="always"):
            start = time.perf_counter()
            torch.compile(deep)(torch.randn(1, 2, 5, 8))
            whole = time.perf_counter() - start
        assert inductor_fusions.report().count() == 24
        print(f"{1e3 * spent[0]:.1f} ms of {whole:.1f} s: {spent[0] / whole:.2%}")
        return spent[0] / whole

    # It is some 0.1%. Another process may take the processor meanwhile, but not each time.
    assert any(0 < share(factor) < 0.01 for factor in (2, 3, 4))
