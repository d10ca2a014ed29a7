"""What judges programs on a GPU, tried on a CPU: what it finds, and what it survives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from inductor_fusions import reporting
from tests.gpu import judging
from tests.gpu.reading import Placed
from tests.gpu.recording import chosen
from tests.support.processes import start

#: Programs: one that is right, one that a fusion makes wrong, one that ends its process, one that loses
#: the GPU, one at whose compile nothing runs any more, with the fusions or without; others behind them.
PROGRAMS = """
import os
import torch
from inductor_fusions import config, testing
from inductor_fusions.driver import passes

apply = passes.apply

def wrong(fusion, graph, first=0):
    found = apply(fusion, graph, first)
    if config.enabled and fusion.stage == "pre_grad":
        for node in graph.nodes:
            if node.target is torch.erf:
                node.target = torch.tanh
    return found

passes.apply = wrong

def test_right():
    testing.check(lambda x: x.sigmoid(), (torch.randn(4, 4),))

def test_wrong():
    testing.check(lambda x: torch.erf(x), (torch.randn(4, 4),))

def test_dies():
    testing.check(lambda x: os.kill(os.getpid(), 9), (torch.randn(4, 4),))

def lost(x):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def test_lost():
    testing.check(lost, (torch.randn(4, 4),))

def broken(*args, **kwargs):
    raise RuntimeError("INTERNAL ASSERT FAILED")

def breaks(x):
    return x + 1

compile = torch.compile

def stock_breaks(fn, **options):
    if fn is breaks:
        torch.zeros = broken
        broken()
    return compile(fn, **options)

torch.compile = stock_breaks

def test_broken_by_stock():
    testing.check(breaks, (torch.randn(4, 4),))

def test_draws():
    testing.check(lambda x: torch.nn.functional.dropout(x, 0.5), (torch.randn(64, 64, requires_grad=True),))

def test_not_run():
    testing.check(lambda x: x @ x, (torch.randn(4, 5),))
"""


def placed(text: str) -> str:
    import ast

    return ast.unparse(Placed("cuda").visit(ast.parse(text)))


@pytest.mark.parametrize(
    ("problem", "fused", "whose"),
    [("strides: other", False, "stock"), ("strides: other", True, "ours"), ("values: other", False, "ours")],
)
def test_strides_of_what_is_not_fused_are_stocks(
    problem: str, fused: bool, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a product is padded is decided anew in each compile."""
    judged = object.__new__(judging._Judged)
    judged.true, judged.noise = [], {}
    sites = [reporting.Site("lora", "fused", "mm")] if fused else []
    monkeypatch.setattr(judged, "compiled", lambda enabled: (str(enabled), [], sites))
    monkeypatch.setattr(judged, "problem", lambda found: problem if found == "True" else "")
    verdict = judging.Verdict("float32", False)
    judged.decide(verdict)
    assert bool(verdict.stock_wrong) == (whose == "stock") and bool(verdict.problem) == (whose == "ours")


def test_a_device_is_written_into_factories() -> None:
    assert placed("torch.arange(n)[:, None]") == "torch.arange(n, device='cuda')[:, None]"
    assert placed("torch.ones(2, device=x.device)") == "torch.ones(2, device=x.device)"
    assert placed("torch.tensor(8.0)") == "torch.tensor(8.0, device='cpu')"
    assert placed("torch.tensor([1, 2])") == "torch.tensor([1, 2], device='cuda')"
    assert placed("torch.randn(2, generator=g)") == "torch.randn(2, generator=g, device='cpu').to('cuda')"
    assert placed("torch.autocast('cpu', torch.bfloat16)") == "torch.autocast('cuda', torch.bfloat16)"
    assert placed("assert x == 1") == "pass" and placed("assert verify(f, x)") == "verify(f, x)"


def test_twelve_seeds_have_all_dtypes_in_both_modes_with_and_without_padding() -> None:
    drawn = [chosen("tests/test_x.py::test_y 3", seed, "cuda") for seed in range(7, 13)]
    assert len({kind[:2] for kind in drawn}) == 6 and len({dtype for dtype, *_ in drawn[:3]}) == 3
    later = [chosen("tests/test_x.py::test_y 3", seed, "cuda") for seed in range(13, 19)]
    assert len({*drawn, *later}) == 12
    assert {chosen("x", seed, "cpu")[0] for seed in range(3)} == {torch.float32}


@pytest.mark.slow
def test_programs(tmp_path: Path) -> None:
    """A fusion that is wrong is found; a process that dies takes nothing with it; a second run has nothing
    to do."""
    tests, report = tmp_path / "test_programs.py", tmp_path / "report.json"
    tests.write_text(PROGRAMS)
    command = ("-m", "tests.gpu.programs", "--device", "cpu", "--budget", "240", "--json", str(report))

    def run() -> tuple[dict[str, object], str]:
        done = start(*command, str(tests))
        assert done.returncode == 1, done.stdout + done.stderr
        (row,) = json.loads(report.read_text())["rows"]
        return row, done.stdout

    row, said = run()
    assert len(row["done"]) == 7
    assert sum(row["judged"].values()) == 3 and row["draws"] == 1
    assert sum(row["left"].values()) == 4  # one does not run, three end their process
    (stock,) = row["stock_wrong"]
    assert stock["name"].endswith("test_broken_by_stock 0") and "INTERNAL ASSERT" in stock["what"]
    failures = {failure["name"].partition("::")[2]: failure for failure in row["failures"]}
    assert failures.keys() == {"test_wrong 0", "test_dies 0", "test_lost 0"}
    assert "is off by" in failures["test_wrong 0"]["what"] and failures["test_wrong 0"]["alone"] == "fails"
    assert failures["test_dies 0"]["ended"] and failures["test_dies 0"]["alone"] == "ends its process"
    assert failures["test_lost 0"]["what"].startswith("RuntimeError: CUDA error")
    again, said = run()
    assert again == row and "7 tests, 3 programs" in said
