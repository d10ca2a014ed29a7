"""Attentions in situations: transforms, contexts, control flow, other layouts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.attention
import torch.utils.checkpoint
from hypothesis import assume
from hypothesis import strategies as st

from inductor_fusions import config, testing
from inductor_fusions.sites import Site
from tests.attention.support import flex_everywhere
from tests.fuzz.attentions import AttentionWriter
from tests.fuzz.judge import SLACK, Judged, is_rounding, runs
from tests.fuzz.programs import Program, judging_script, placed
from tests.gpu import judging, moving

#: What is around a function `inner` of tensors `args`, the first of which is `x0`; `first` gives its output.
SITUATIONS: dict[str, tuple[str, ...]] = {
    "grad": ("return torch.func.grad(lambda a: first(inner(a, *rest)).square().sum())(x0) + x0",),
    "grad of grad": (
        "once = torch.func.grad(lambda a: first(inner(a, *rest)).square().sum())",
        "return torch.func.grad(lambda a: once(a).sin().sum())(x0) + x0",
    ),
    "vjp": (
        "out, pull = torch.func.vjp(lambda a, b: first(inner(a, b, *rest[1:])), x0, rest[0])",
        "return (out, *pull(out.cos()))",
    ),
    "jvp": ("return torch.func.jvp(lambda a: first(inner(a, *rest)), (x0,), (x0.sin(),))",),
    "vmap": ("return torch.func.vmap(lambda a: first(inner(a, *rest)))(torch.stack((x0, x0 * 0.5)))",),
    "no grad": ("with torch.no_grad():", "    out = first(inner(*args))", "return out * x0.sum()"),
    "no grad in front": ("with torch.no_grad():", "    y = x0.sin()", "return first(inner(x0 + y, *rest))"),
    "inference mode": (
        "with torch.inference_mode():", "    out = first(inner(*args)).sum()", "return x0 * 2, out",
    ),
    "autocast": (
        "with torch.autocast(x0.device.type, torch.bfloat16):", "    out = first(inner(*args))", "return out",
    ),
    "autocast off": (
        "with torch.autocast(x0.device.type, enabled=False):", "    out = first(inner(*args))", "return out",
    ),
    "math alone": (
        "with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):",
        "    out = first(inner(*args))", "return out",
    ),
    "flash alone": (
        "with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):",
        "    out = first(inner(*args))", "return out",
    ),
    "cond": (
        "return torch.cond(x0.sum() > 0.0, lambda *t: first(inner(*t)).clone(), "
        "lambda *t: first(inner(*t)) * 0.5, args)",
    ),
    "cond, no attention beside it": (
        "like = first(inner(*args)).detach()",
        "return torch.cond(x0.sum() > 0.0, lambda *t: first(inner(*t[:-1])), lambda *t: t[-1].sin(), "
        "(*args, like))",
    ),
    "checkpoint": ("return torch.utils.checkpoint.checkpoint(inner, *args, use_reentrant=False)",),
    "loop": ("for _ in range(2):", "    x0 = x0 + first(inner(x0, *rest)).sum()", "return x0"),
    "turned": ("return first(inner(*args)).transpose(0, -1)",),
    "turned and returned": ("out = first(inner(*args))", "return out.mT, out.transpose(1, 2)"),
    "sliced": ("return first(inner(*args))[..., ::2]",),
    "flattened": ("return first(inner(*args)).transpose(1, 2).flatten(2)",),
    "copied": ("return first(inner(*args)).transpose(1, 2).contiguous()",),
    "written into an input": ("out = first(inner(*args))", "buffer.copy_(out)", "return buffer * 2.0, out"),
    "returned twice": ("out = first(inner(*args))", "return out, out.view_as(out), out + 1"),
    "changed": ("out = first(inner(*args))", "out.mul_(0.5)", "return out"),
    "changed behind a use": ("out = first(inner(*args))", "y = out * 2.0", "out.add_(1.0)", "return out, y"),
    "deterministic": ("return inner(*args)",),
}  # fmt: skip


@dataclass(frozen=True)
class Situated(Program):
    """A program inside of another one; `situation` is of `SITUATIONS`."""

    situation: str = "checkpoint"
    is_plain: bool = False

    def plain(self) -> Situated:
        """Without `torch.cond`, which compiles in eager mode too, and without a checkpoint, whose second
        run is not in the mode that computes in float64."""
        return replace(self, is_plain=True)

    @property
    def source(self) -> str:
        """The text of both functions."""
        device = torch.get_default_device().type
        names = ", ".join(i.name for i in self.inputs)
        around = SITUATIONS[self.situation]
        body = [f"args = ({names},)", "rest = args[1:]"]
        if any("buffer" in line for line in around):
            body.append("buffer = torch.zeros_like(first(inner(*args)).detach())")
        inner = "\n    ".join([f"def inner({names}):", *self.lines, f"return {self.result}"])
        outer = "\n    ".join([f"def program({names}):", *body, *around])
        first = "def first(found):\n    return found[0] if isinstance(found, tuple) else found"
        branch = "def branch(seen, one, other, args):\n    return one(*args) if seen else other(*args)"
        branch += "\n\n\ndef run(function, *args, use_reentrant):\n    return function(*args)"
        text = f"{first}\n\n\n{branch}\n\n\n{inner}\n\n\n{outer}\n"
        if self.is_plain:
            text = text.replace("torch.cond(", "branch(").replace(
                "torch.utils.checkpoint.checkpoint(", "run("
            )
        return text if device == "cpu" else placed(text, device)

    def script(self, how: str = "graphs") -> str:
        """A script that judges it."""
        return judging_script(self, ("situation",), "judge_situation", how)


@st.composite
def situations(draw: Callable[[Any], Any]) -> Situated:
    """An attention, or what is nearly one, in a situation."""
    situation = draw(st.sampled_from(list(SITUATIONS)))
    p = AttentionWriter(draw).program()
    return Situated(p.inputs, p.lines, p.result, p.kernel, situation=situation)


@contextlib.contextmanager
def around(program: Situated) -> Iterator[None]:
    """What holds for the process while a program runs."""
    if program.situation != "deterministic":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def judge_situation(program: Situated, code: bool = False) -> Judged:
    """A program is right in its situation, or raises without the fusions as well.

    Args:
        code: judge Inductor's code, with strides of outputs and gradients laid out in three ways.

    Raises:
        AssertionError: it is wrong with the fusions alone, or one raised.
    """
    with around(program):
        inputs = runs(program.plain())
        assume(inputs is not None)
        assert inputs is not None
        return _judge_code(program, inputs) if code else _judge_graphs(program, inputs)


def _judge_code(program: Situated, inputs: Sequence[torch.Tensor]) -> Judged:
    given = moving.Program(program.function(), tuple(inputs), {}, reference=program.plain().function())
    device = torch.get_default_device().type
    torch.set_default_device(None)
    try:
        with config.patch(attention_kernel=program.kernel):
            # Stock does not compile the backward of a branch.
            train = not program.situation.startswith("cond")
            verdict, _ = judging.judge(given, device, torch.float32, train)
    finally:
        torch.set_default_device(None if device == "cpu" else device)
    assume(not verdict.left)
    assert not verdict.problem, verdict.problem
    fused = [Site(name, "fused", "") for name, count in verdict.sites.items() for _ in range(count)]
    return Judged(fused, True, verdict.stock_wrong)


def _judge_graphs(program: Situated, inputs: Sequence[torch.Tensor]) -> Judged:
    function, plain = program.function(), program.plain().function()
    with flex_everywhere(program.kernel):
        try:
            ours = testing.capture(function, *inputs, train=True, backend=testing.EAGER_AFTER_PASSES)
        except Exception:
            stock = _raised_by_stock(program, inputs)
            if stock is None:
                raise
            return Judged([], False, stock)
    failed = [site for site in ours.sites if site.verdict == "failed"]
    assert not failed, failed
    found = [*ours.tensors, *ours.grads.values()]
    # Gradients in float32 of what is computed in bfloat16: one that vanishes is what that rounds.
    half = program.situation == "autocast"
    slack = 8 * torch.finfo(torch.bfloat16).eps / torch.finfo(torch.float32).eps if half else SLACK
    right = is_rounding(plain, inputs, found, len(ours.tensors), ours.cotangents, slack)
    assert right, f"wrong values: {ours.sites}"
    return Judged(ours.sites)


def _raised_by_stock(program: Program, inputs: Sequence[torch.Tensor]) -> str | None:
    """What the program raises without the fusions, if it does."""
    with config.patch(enabled=False):
        try:
            testing.capture(program.function(), *inputs, train=True, backend=testing.EAGER_AFTER_PASSES)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return None
