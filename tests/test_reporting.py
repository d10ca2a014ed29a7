"""What was fused and why not: the report, logs, counters and traces."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

import inductor_fusions
from inductor_fusions import Report, Site, config, testing

ROOT = Path(inductor_fusions.__file__).parents[1]


def attention(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) * 0.3, dim=-1) @ v


def over_queries(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) * 0.3, dim=-2) @ v


def inputs() -> list[torch.Tensor]:
    return [torch.randn(1, 2, 5, 8) for _ in range(3)]


def compile_with_passes(fn) -> None:
    with config.patch(policy="always", stock_misfires=False):
        torch._dynamo.reset()
        torch.compile(fn, backend=testing._AfterPasses([]))(*inputs())


@pytest.fixture(autouse=True)
def empty() -> None:
    inductor_fusions.clear()


def test_report() -> None:
    for fn in (attention, over_queries, attention):
        compile_with_passes(fn)
    found = inductor_fusions.report()
    assert [site.verdict for site in found] == ["fused", "rejected", "fused"]
    assert len(found) == 3
    assert (found.count(), found.count("rejected"), found.count("failed")) == (2, 1, 0)
    assert (found.count("fused", "attention"), found.count("fused", "another")) == (2, 0)
    inductor_fusions.clear()
    assert len(inductor_fusions.report()) == 0


def test_site() -> None:
    """The user's line, what was found there, and what it became."""
    compile_with_passes(attention)
    compile_with_passes(over_queries)
    fused, rejected = inductor_fusions.report()
    line = attention.__code__.co_firstlineno + 1
    assert fused.source.startswith(f"{__file__}:{line} in attention: return torch.softmax(")
    assert fused.kernel.startswith("sdpa") and not fused.reason
    assert "[1, 2, 5, 5]" in fused.details["scores"]
    assert "dim -2" in rejected.reason and not rejected.kernel
    assert "over_queries" in str(rejected) and "rejected" in str(rejected)


def test_text() -> None:
    """Equal sites are one row."""
    assert "no candidate" in str(inductor_fusions.report())
    for fn in (attention, attention, over_queries):
        compile_with_passes(fn)
    text = str(inductor_fusions.report())
    assert "2 x attention: fused: sdpa" in text
    assert "1 x attention: rejected: the softmax is over dim" in text


def test_json() -> None:
    compile_with_passes(attention)
    data = json.loads(inductor_fusions.report().to_json())
    assert data["schema"] == 1
    (site,) = data["sites"]
    assert Report([Site(**site)]).sites == inductor_fusions.report().sites


def test_counters() -> None:
    compile_with_passes(attention)
    compile_with_passes(over_queries)
    assert dict(counters["inductor_fusions"]) == {"attention_fused": 1, "attention_rejected": 1}


def test_counters_of_inductor() -> None:
    with config.patch(policy="always"), torch._inductor.config.patch(force_disable_caches=True):
        torch.compile(attention)(*inputs())
    assert counters["inductor"]["fusions_attention"] == 1


def test_hint() -> None:
    """What to change is told where something can be done."""

    def fn(q, k, v):
        weights = torch.softmax(q @ k.transpose(-2, -1), dim=-1)
        return weights @ v, weights

    compile_with_passes(fn)
    (site,) = inductor_fusions.report()
    assert "need_weights=False" in site.hint


def test_log(caplog: pytest.LogCaptureFixture) -> None:
    """One line a site, at INFO; nothing at WARNING."""
    with caplog.at_level(logging.INFO, logger="inductor_fusions"):
        compile_with_passes(attention)
        compile_with_passes(over_queries)
    lines = [r.getMessage() for r in caplog.records if r.name.startswith("inductor_fusions")]
    assert sum("fused (sdpa" in line for line in lines) == 1
    assert sum("rejected (the softmax" in line for line in lines) == 1
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING and "inductor_fusions" in r.name]


PROGRAM = """
import torch, inductor_fusions
f = lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v
q, k, v = torch.randn(3, 1, 2, 4, 8).unbind(0)
torch.compile(f)(q, k, v)
"""


def start(**variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "INDUCTOR_FUSIONS_POLICY": "always", **variables}
    env["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def test_torch_logs_and_trace(tmp_path: Path) -> None:
    """TORCH_LOGS by the name of the package, and a JSON artifact in TORCH_TRACE."""
    done = start(TORCH_LOGS="+inductor_fusions", TORCH_TRACE=str(tmp_path))
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
    done = start()
    assert (done.returncode, done.stdout) == (0, "")
    assert "inductor_fusions" not in done.stderr
