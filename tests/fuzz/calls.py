"""Attentions that are compiled once and called with several sizes, numbers and layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st

from inductor_fusions import _inductor, config, reporting, testing
from inductor_fusions.checking.runs import Float64Mode, cast
from inductor_fusions.sites import Site
from tests.fuzz.judge import SLACK, Judged
from tests.fuzz.programs import Input, Program, Writer, judging_script
from tests.gpu import judging


@dataclass(frozen=True)
class Call:
    """One call: sizes, a number that the function takes, what its caller does before the backward, and how
    the incoming gradient is laid out."""

    batch: int
    q: int
    k: int
    number: int
    between: str
    layout: int


@dataclass(frozen=True)
class Calls(Program):
    """A function of any sizes that is compiled once and called some times.

    Attributes:
        shapes: of the inputs, in letters of `Call`'s sizes ("b", "q", "k") and numbers.
        leaves: which inputs require a gradient.
        calls: in order.
        dynamic: as in `torch.compile`.
    """

    shapes: tuple[tuple[Any, ...], ...] = ()
    leaves: tuple[bool, ...] = ()
    calls: tuple[Call, ...] = ()
    dynamic: bool | None = None

    def arguments(self, call: Call) -> list[Any]:
        """Of one call: tensors, and the number."""
        sizes = {"b": call.batch, "q": call.q, "k": call.k}
        found: list[Any] = []
        for index, (given, shape, leaf) in enumerate(zip(self.inputs, self.shapes, self.leaves, strict=True)):
            x = Input(given.name, given.kind, tuple(sizes.get(n, n) for n in shape)).make(index)
            found.append(x.requires_grad_(leaf) if x.is_floating_point() else x)
        return [*found, call.number]

    @property
    def source(self) -> str:
        """The text of the function, which takes the number last."""
        return super().source.replace("):", ", number):", 1)

    def script(self, how: str = "graphs") -> str:
        """A script that judges it."""
        return judging_script(self, ("shapes", "leaves", "calls", "dynamic"), "judge_calls", how)


#: What a caller does between forward and backward.
BETWEEN = ("", "", "out.add_(1.0)", "out.mul_(0.5)", "x0", "x1", "x2")


@st.composite
def calls(draw: Callable[[Any], Any]) -> Calls:
    """An attention that is called with one size or several."""
    w = Writer(draw)
    heads, dim = w.pick(2, 3), w.pick(4, 8)
    flat = w.pick(False, False, True)  # 3-D: no dim of heads
    lead: tuple[Any, ...] = ("b",) if flat else ("b", heads)
    shapes: list[tuple[Any, ...]] = [(*lead, "q", dim), (*lead, "k", dim), (*lead, "k", dim)]
    kinds = ["leaf"] * 3
    w.line("q, k, v = x0, x1, x2")
    w.line(
        "scores = "
        + w.pick("q @ k.mT", "torch.matmul(q, k.transpose(-2, -1))", "torch.matmul(q * 0.5, k.mT)")
    )
    w.line("scores = scores " + w.pick("* 0.4", "/ q.shape[-1] ** 0.5", "* (1.0 / number)", "* 1.0"))
    rows, columns = "torch.arange(q.shape[-2])[:, None]", "torch.arange(k.shape[-2])"
    masks = {
        "none": [], "causal": [f"seen = {rows} >= {columns}"],
        "window": [f"seen = ({rows} - {columns} < number) & ({rows} - {columns} > -number)"],
        "padding": ["seen = x3"], "bias": ["scores = scores + x3"],
    }  # fmt: skip
    mask = w.pick(*masks)
    for line in masks[mask]:
        w.line(line)
    if mask in ("causal", "window", "padding"):
        fill = "torch.finfo(scores.dtype).min"
        w.line(
            f"scores = {w.pick(f'scores.masked_fill(~seen, {fill})', f'torch.where(seen, scores, {fill})')}"
        )
    if mask in ("padding", "bias"):
        kinds.append("mask" if mask == "padding" else "leaf")
        inner = [1] * (len(lead) - 1)
        shapes.append(("b", *inner, 1, "k") if mask == "padding" else ("b", *inner, "q", "k"))
    w.line("out = torch.softmax(scores, -1) @ v")
    results = ["out", "out", "out.mT", "out * 2.0", "(out, out.sum(-1))"]
    results += (
        [] if flat else ["out.transpose(1, 2)", "out.transpose(1, 2).flatten(2)", "out.permute(2, 0, 3, 1)"]
    )
    leaves = draw(st.sampled_from([(True,) * 3, (True,) * 3, (False, False, True), (True, False, False)]))
    made = []
    for _ in range(draw(st.integers(1, 3))):
        q = w.pick(5, 6, 7, 9, 1)
        k = q if w.maybe() else w.pick(4, 8, 6, 1)
        made.append(
            Call(w.pick(2, 3, 4, 1), q, k, w.pick(2, 3, 4), w.pick(*BETWEEN), w.pick(*judging.LAYOUTS))
        )
    inputs = tuple(Input(f"x{i}", kind, ()) for i, kind in enumerate(kinds))
    return Calls(
        inputs, tuple(w.lines), w.pick(*results), w.pick("auto", "auto", "flex"), shapes=tuple(shapes),
        leaves=(*leaves, True)[: len(kinds)], calls=tuple(made), dynamic=w.pick(None, None, True, False),
    )  # fmt: skip


Outcome = tuple[dict[str, torch.Tensor | None], dict[str, tuple[int, ...]]]


def call_once(function: Callable[..., Any], arguments: Sequence[Any], call: Call) -> Outcome:
    """Results and strides of one call, and gradients behind what the caller does in between."""
    given = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
             for x in arguments]  # fmt: skip
    found = function(*given)
    outputs = list(found) if isinstance(found, tuple) else [found]
    strides = {f"output {i}": judging.strides_of(t) for i, t in enumerate(outputs)}
    values: dict[str, torch.Tensor | None] = {
        f"output {i}": t.detach().clone() for i, t in enumerate(outputs)
    }
    if call.between.startswith("out"):
        getattr(outputs[0], call.between[4:7] + "_")(float(call.between.rpartition("(")[2][:-1]))
    elif call.between:
        with torch.no_grad():
            given[int(call.between[1])].mul_(1.5)
    leaves = {i: x for i, x in enumerate(given) if isinstance(x, torch.Tensor) and x.requires_grad}
    wanted = [t for t in outputs if t.requires_grad]
    if leaves and wanted:
        incoming = [
            judging.laid_out(judging.cotangent(i, t).to(t.dtype), call.layout) for i, t in enumerate(wanted)
        ]
        grads = torch.autograd.grad(wanted, list(leaves.values()), incoming, allow_unused=True)
        values |= {f"gradient {i}": g for i, g in zip(leaves, grads, strict=True)}
    return values, strides


def judge_calls(program: Calls, code: bool = False) -> Judged:
    """Each call of a function that is compiled once gives what eager mode gives, or stock fails as well.

    Args:
        program: the function and its calls.
        code: judge Inductor's code, with the strides of outputs.

    Raises:
        AssertionError: it is wrong with the fusions alone, or one raised.
    """
    function, wanted = program.function(), []
    for call in program.calls:
        arguments = program.arguments(call)
        try:
            eager, strides = call_once(function, arguments, call)
            with Float64Mode():
                (wide,), _ = cast(((arguments,), {}), torch.float64)
                true, _ = call_once(function, wide, call)
        except RuntimeError:  # eager mode refuses what the caller does
            assume(False)
        wanted.append((call, arguments, eager, true, strides))

    def compiled(enabled: bool) -> tuple[str, list[Site]]:
        how: Any = "inductor" if code else testing.AfterPasses([])
        with (
            _inductor.fresh_compile(),
            config.patch(policy="always", enabled=enabled, attention_kernel=program.kernel),
            reporting.isolated() as sites,
        ):
            run = torch.compile(function, backend=how, dynamic=program.dynamic)
            for number, (call, arguments, eager, true, strides) in enumerate(wanted):
                try:
                    ours, mine = call_once(run, arguments, call)
                except Exception as error:
                    return f"raises {type(error).__name__}: call {number}: {error}", list(sites)
                wrong = _differ(ours, eager, true)
                if not wrong and code and mine != strides:
                    wrong = f"strides: {mine}, of eager mode {strides}"
                if wrong:
                    return f"{wrong}, call {number}", list(sites)
        return "", list(sites)

    wrong, sites = compiled(True)
    failed = [site for site in sites if site.verdict == "failed"]
    assert not failed, failed
    if wrong:
        stock, _ = compiled(False)
        assert stock.partition(":")[0] == wrong.partition(":")[0], f"{wrong}\nstock: {stock or 'right'}"
    return Judged(sites, code, wrong)


def _differ(ours: Any, eager: Any, true: Any) -> str:
    """What is wrong with results, or ""."""
    # With one key a gradient may vanish, and be the only one.
    largest = max(float(z.norm()) for z in true.values() if z is not None)
    for name, z in true.items():
        x, y = ours[name], eager[name]
        if x is None or y is None or z is None:
            if (x is None) != (y is None) and float((y if x is None else x).norm()) > 0:
                return f"values: {name} is {'missing' if x is None else 'there'}"
            continue
        if x.shape != y.shape or x.dtype != y.dtype:
            return f"shape or dtype: {name} is {x.dtype} {tuple(x.shape)}"
        scale = max(float(z.norm()), largest if name.startswith("gradient") else 0.0)
        error, noise = (float((t.double() - z).detach().norm()) for t in (x, y))
        if not error <= 2 * noise + SLACK * torch.finfo(x.dtype).eps * scale:
            return f"values: {name} is off by {error:.2e} of {scale:.2e}, eager mode by {noise:.2e}"
    return ""
