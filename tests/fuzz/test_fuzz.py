"""Random programs, a few hundred of them; `make fuzz` runs as many as one likes."""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings

from bench.common import Results
from inductor_fusions import config, testing
from inductor_fusions.block_mm import op
from inductor_fusions.sites import Site
from tests.block_mm.support import run
from tests.fuzz import attentions, mask_values, masks, products, programs
from tests.fuzz.judge import QUANTISED_SAMPLES, Judged, is_rounding, judge, judge_mask, judge_products
from tests.fuzz.mask_values import judge_values
from tests.fuzz.running import fuzz, provenance, written
from tests.support.padding import padded
from tests.support.processes import start

quick = settings(max_examples=80, suppress_health_check=list(HealthCheck), print_blob=False)


@quick
@given(attentions.attentions())
def test_attentions(program: programs.Program) -> None:
    judge(program)


@settings(quick, max_examples=100)
@given(masks.masked())
def test_masks(pair: tuple[programs.Program, programs.Program]) -> None:
    judge_mask(*pair)


@quick
@given(mask_values.mask_values())
def test_mask_values(program: programs.Program) -> None:
    judge_values(program)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [products.projections, products.chains, products.adapters])
def test_products(kind: Any) -> None:
    @settings(quick, max_examples=15)
    @given(kind())
    def judged(program: programs.Program) -> None:
        judge_products(program)

    judged()


def test_a_wrong_gradient_is_no_rounding() -> None:
    """Even a small one; and what eager mode gives on other inputs is allowed."""
    x = torch.randn(4, 8).requires_grad_()
    y = torch.randn(4, 8)

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 3, -1)

    found = function(x)
    (grad,) = torch.autograd.grad(found, x, y)
    right = [found.detach(), grad]
    assert is_rounding(function, [x], right, 1, [y], 64.0)
    assert not is_rounding(function, [x], [right[0], grad * 1.001], 1, [y], 64.0)
    assert not is_rounding(function, [x], [right[0], None], 1, [y], 64.0)
    assert not is_rounding(function, [x], [right[0] + 1e-4, grad], 1, [y], 64.0)


def test_graphs_round_where_eager_mode_does_not() -> None:
    """What the unfused graph is off by as well is rounding, as of an activation in bfloat16, node by node."""
    x = torch.ones(4, requires_grad=True)

    def judged(found: float, graph: float) -> bool:
        results = [torch.full((4,), found), torch.ones(4)]
        graphs = [torch.full((4,), graph), torch.ones(4)]
        return is_rounding(lambda x: x * 1, [x], results, 1, [torch.ones(4)], 2.0, 1, lambda *_: graphs)

    assert judged(1.01, 1.01) and not judged(1.01, 1.0) and not judged(1.05, 1.01)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_wrong_fusion_is_no_rounding(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs that say what rounding does are without the fusions."""
    composite = op.composite
    factor = 1.05 if wrong else 1.0
    monkeypatch.setattr(op, "composite", lambda *args: [y * factor for y in composite(*args)])
    shapes = ((16, 32), (32, 32), (32, 32))
    inputs = tuple(programs.Input(f"x{i}", "leaf16", shape) for i, shape in enumerate(shapes))
    program = programs.Program(inputs, ("y = F.linear(x0, x1)",), "(y, F.linear(x0, x2))")
    if wrong:
        with pytest.raises(AssertionError, match="wrong"):
            judge_products(program)
    else:
        assert "qkv" in judge_products(program).fused


def test_gradients_of_adapters_on_one_row() -> None:
    """Twice as far from float64 as eager mode, with the fusions and without: SiLU is rounded within."""
    half, whole = "leaf16", "leaf"
    leaves = [
        (half, (1, 32)), (half, (64, 32)), (half, (64,)), (whole, (32, 4)), (whole, (72, 4)),
        (half, (64, 32)), (half, (64,)), (whole, (8, 32)), (whole, (72, 8)),
    ]  # fmt: skip
    lines = (
        "y0 = F.linear(x0, x1) + F.linear(x0.float() @ x3, x4[8:]) * 2.0",
        "y1 = F.linear(x0, x5, x6) + F.linear(x0.float() @ x7.t(), x8[8:]) * 2.0",
        "y0, y1 = y0.to(torch.bfloat16), y1.to(torch.bfloat16)",
    )
    inputs = tuple(programs.Input(f"x{i}", *leaf) for i, leaf in enumerate(leaves))
    assert "lora" in judge_products(programs.Program(inputs, lines, "F.silu(y0) * y1")).fused


@pytest.mark.parametrize("pads", [None, 0])
def test_products_are_padded(pads: int | None) -> None:
    """Ranks, and rows of inputs, that tensor cores cannot read; the fusions read them as they were."""
    leaves = ("leaf16", (70, 32)), ("rand16", (48, 32)), ("leaf", (5, 32)), ("leaf", (48, 5))
    inputs = tuple(programs.Input(f"x{i}", *leaf) for i, leaf in enumerate(leaves))
    lines = ("y = F.linear(x0, x1) + F.linear(F.linear(x0.float(), x2), x3)",)
    program = programs.Program(inputs, lines, "y.to(torch.bfloat16)", pads=pads)
    with config.patch(enabled=False), padded(pads, share=1.0):
        seen = run(program.function(), program.tensors(), train=True)
    count = sum("constant_pad_nd" in str(node.target) for graph in seen.graphs for node in graph.nodes)
    assert (count > 4) == (pads is not None)
    assert "lora" in judge_products(program).fused


@pytest.mark.parametrize("same", [True, False])
def test_another_mask_is_no_rounding(same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that draw are judged beside the unfused graphs of the same seed."""
    shapes = ("leaf16", (16, 32)), ("rand16", (48, 32)), ("leaf", (8, 32)), ("leaf", (48, 8))
    inputs = tuple(programs.Input(f"x{i}", *shape) for i, shape in enumerate(shapes))
    lines = ("h = F.linear(F.dropout(x0.float(), 0.25), x2)", "y = F.linear(x0, x1) + F.linear(h, x3) * 2.0")
    program = programs.Program(inputs, lines, "y.to(torch.bfloat16)", draws=True)
    if not same:
        # The first run is with the fusions.
        seed, seeds = torch.manual_seed, itertools.chain([1], itertools.repeat(2))
        monkeypatch.setattr(torch, "manual_seed", lambda _: seed(next(seeds)))
        with pytest.raises(AssertionError, match="wrong"):
            judge_products(program)
    else:
        assert {"lora", "lora_input"} <= set(judge_products(program).fused)


def test_a_step_of_float8_is_rounding() -> None:
    """Of a value that rounding to bfloat16 carries over the boundary in some runs; two steps are not."""
    x = torch.full((1,), 3.6328125 + 1e-3)  # float8 has 3.5 and 3.75, bfloat16 3.625 and 3.640625

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * 1.0).bfloat16().to(torch.float8_e4m3fn).float()

    def judged(value: float, samples: int) -> bool:
        return is_rounding(function, [x], [torch.full((1,), value)], 1, [], 2.0, samples)

    assert judged(3.75, 1) and not judged(3.5, 1) and judged(3.5, QUANTISED_SAMPLES)
    assert not judged(3.0, QUANTISED_SAMPLES)


def test_a_failure_is_found_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that is judged wrong ends minimised in a file, as a script that runs."""

    def wrong(program: programs.Program, code: bool) -> Judged:
        assert "masked_fill" not in program.source
        return Judged([], code)

    monkeypatch.setattr("tests.fuzz.running.judge", wrong)
    report = tmp_path / "failures.py"
    failures = fuzz(examples=200, seed=3, kinds=["attentions"], out=report, batch=200)
    assert failures == 1
    text = report.read_text()
    assert "masked_fill" in text and "attentions 3" in text
    compile(text, str(report), "exec")


def report_of(path: Path, **settings: object) -> Results:
    return Results(path, provenance(**settings), lambda row: str(row["key"]))


def test_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It says what was judged, batch by batch; a run that was stopped goes on where it was."""
    seen: list[bool] = []

    def right(program: programs.Program, code: bool) -> Judged:
        seen.append(code)
        if len(seen) == stops:
            raise KeyboardInterrupt
        assume(len(program.lines) > 8)
        site = Site("attention", "fused" if len(seen) % 2 else "rejected", "why")
        return Judged([site, site], code, "wrong" if code else "")

    monkeypatch.setattr("tests.fuzz.running.judge", right)
    path, out = tmp_path / "report.json", tmp_path / "failures.py"
    run = partial(fuzz, 60, 3, ["attentions"], out, batch=20, share=0.3)
    stops = 45
    with pytest.raises(KeyboardInterrupt):
        run(report=report_of(path, seed=3))
    kept = json.loads(path.read_text())["rows"]
    assert 0 < len(kept) < 3
    stops, before = -1, len(seen)
    assert run(report=report_of(path, seed=3)) == 0
    assert "is wrong in stock as well" in " ".join(capsys.readouterr().err.split())
    data = json.loads(path.read_text())
    assert data["rows"][: len(kept)] == kept and len(data["rows"]) == 3
    assert data["settings"] == {"seed": 3} and data["torch"] == torch.__version__
    for row in data["rows"]:
        assert row["commit"] == data["commit"]
        assert row["judged"] >= row["fused"] > 0 and row["sites"] == {"attention": 2 * row["fused"]}
        assert 0 < row["code"] == row["stock_wrong"] < row["judged"]
    new = data["rows"][len(kept) :]
    assert sum(row["judged"] + row["rejected"] for row in new) == len(seen) - before
    assert sum(row["rejected"] for row in data["rows"]) > 0
    with pytest.raises(SystemExit, match="settings"):  # other programs
        report_of(path, seed=4)


def test_report_of_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure in the code is made smaller as code; what was tried meanwhile is not counted."""
    first: list[int] = []

    def wrong(program: programs.Program, code: bool) -> Judged:
        if code:
            first.append(len(first))
            raise AssertionError("wrong code")
        return Judged([])

    monkeypatch.setattr("tests.fuzz.running.judge", wrong)
    path, out = tmp_path / "report.json", tmp_path / "failures.py"
    assert fuzz(40, 3, ["attentions"], out, 40, 0.2, report_of(path, seed=3)) == 1
    (row,) = json.loads(path.read_text())["rows"]
    assert row["failures"] == row["code"] == 1 < row["judged"] < 40 and len(first) > 1
    assert "its code" in out.read_text() and "assert_close_to_eager" in out.read_text()
    assert fuzz(40, 3, ["attentions"], out, 40, 0.2, report_of(path, seed=3)) == 1  # it is still there


@pytest.mark.slow
def test_processes(tmp_path: Path) -> None:
    """Two processes judge what one does; from the command line, as one starts them."""
    command = ("-m", "tests.fuzz", "--examples", "4", "--seed", "5", "--code", "0")
    command += ("--only", "attentions", "--only", "masks", "--out", str(tmp_path / "failures.py"))
    found = []
    for jobs in ("1", "2"):
        path = tmp_path / f"{jobs}.json"
        done = start(*command, "--jobs", jobs, "--json", str(path))
        assert done.returncode == 0, done.stderr
        rows = json.loads(path.read_text())["rows"]
        found.append({row["key"]: (row["judged"], row["fused"], row["sites"]) for row in rows})
    assert found[0] == found[1] and len(found[0]) == 2


@pytest.mark.slow
def test_device(tmp_path: Path) -> None:
    """With a device the code of every kind is judged there, as a GPU would have it."""
    report = report_of(tmp_path / "report.json", seed=7)
    kinds = ["attentions", "masks", "projections"]
    out = tmp_path / "failures.py"
    assert fuzz(2, 7, kinds, out, 2, share=1.0, report=report, device="cpu") == 0
    assert [row["kind"] for row in report.rows] == kinds
    assert all(row["code"] == row["judged"] > 0 for row in report.rows)


def test_inputs_are_on_the_default_device() -> None:
    with torch.device("meta"):
        made = [programs.Input("x", kind, (2, 3)).make(0) for kind in ("leaf16", "mask", "documents")]
    assert {x.device.type for x in made} == {"meta"} and made[0].requires_grad
    program = programs.Program((), (), "1")
    with torch.device("meta"):
        assert "torch.set_default_device('meta')" in program.script("code")
    assert "set_default_device" not in program.script("code")


def test_tensors_are_made_on_the_default_device() -> None:
    """Also where the code is compiled, which torch 2.11 does as if there were no default device."""
    lines = ("i = (torch.arange((3 + 1)) + torch.ones(4, dtype=torch.long))[:, None]",)
    program = programs.Program((programs.Input("x", "rand", (4, 4)),), lines, "x + i")
    with torch.device("meta"):
        made = "torch.arange((3 + 1), device='meta') + torch.ones(4, dtype=torch.long, device='meta')"
        assert made in program.source
        run = torch.compile(program.function(), backend="eager")
        assert run(*program.tensors()).device.type == "meta"
    assert "device" not in program.source


@pytest.mark.slow
def test_code() -> None:
    """What Inductor makes of an attention and of a mask is judged, not the graphs alone."""
    inputs = tuple(programs.Input(f"x{i}", "leaf", (2, 2, 4, 4)) for i in range(3))
    attention = programs.Program(inputs, ("scores = x0 @ x1.mT",), "scores.softmax(-1) @ x2")
    seen = judge(attention, code=True)
    assert seen.code and seen.fused == ["attention"] and not seen.stock_wrong
    lines = ("mask = torch.arange(4)[:, None] >= torch.arange(4)",)
    call = programs.Program(inputs, lines, "F.scaled_dot_product_attention(x0, x1, x2, attn_mask=mask)")
    seen = judge_mask(call, programs.Program(inputs, lines, "mask"), code=True)
    assert seen.code and seen.fused == ["attention"]


def test_wrong_code_is_told_from_wrong_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that is wrong fails; where it is so without the fusions, it is not theirs."""
    program = programs.Program((programs.Input("x0", "leaf", (2, 2, 4, 4)),), ("y = x0 * 2",), "y")
    capture = testing.capture

    def fake(fn: Any, *args: Any, **options: Any) -> Any:
        found = capture(fn, *args, **{**options, "backend": testing.EAGER_AFTER_PASSES})
        if config.enabled or both:
            found.outputs.mul_(1.01)
        return found

    monkeypatch.setattr(testing, "capture", fake)
    both = True
    assert judge(program, code=True).stock_wrong == "wrong values"
    both = False
    with pytest.raises(AssertionError, match="wrong values"):
        judge(program, code=True)


def test_script_runs() -> None:
    program = programs.Program(
        (programs.Input("x0", "leaf", (2, 2, 4, 4)),), ("scores = x0 @ x0.mT",), "scores.softmax(-1) @ x0"
    )
    exec(compile(written("attentions", program, "seed 0", AssertionError("why")), "script", "exec"), {})
