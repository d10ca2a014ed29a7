"""Sizes that change: no more graphs, guards and recompiles than without the fusions, and right results.

Linears, adapters and interactions are decided as on a GPU; their graphs run on the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("triton")

from torch._dynamo import eval_frame
from torch._inductor import config as inductor_config

from devtools.ledger.compiling import ON_A_GPU
from inductor_fusions import config, reporting
from tests.block_mm.support import Run, as_on_a_gpu, rand
from tests.counterexamples.test_product_mutants import RANK, WIDTH, adapter, frozen, in_float32

Tensors = list[torch.Tensor]

#: (batch, length) of each call.
SIZES = (2, 12), (3, 20), (5, 7)


def matrices(count: int, grad: bool = True) -> Tensors:
    return [(torch.randn(WIDTH, WIDTH) / 6).bfloat16().requires_grad_(grad) for _ in range(count)]


def attention(x: Any, q: Any, k: Any, v: Any) -> Any:
    q, k, v = (F.linear(x, w).unflatten(-1, (4, -1)).transpose(1, 2) for w in (q, k, v))
    place = torch.arange(x.shape[1])
    scores = (q @ k.mT * 0.3).masked_fill(place > place[:, None], torch.finfo(q.dtype).min)
    return (torch.softmax(scores, -1) @ v).transpose(1, 2).flatten(2)


def gated(x: Any, gate: Any, up: Any) -> Any:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def epilogue(x: Any, w: Any, bias: Any) -> Any:
    return torch.sigmoid(F.linear(x, w, bias) * 0.3 + 1)


def adapted(x: Any, w: Any, a: Any, b: Any) -> Any:
    return F.linear(x, w) + F.linear(F.linear(x, a), b) * 2.0


def outer(x: Any, w: Any) -> Any:
    u, v = x[:, 0].chunk(2, dim=-1)
    return F.linear((u[:, :, None] * v[:, None, :]).flatten(1), w)


def pairs(x: Any) -> Any:
    t = x[:, 0].unflatten(1, (4, 8))
    first, second = torch.tril_indices(4, 4, offset=-1).unbind()
    return torch.bmm(t, t.transpose(1, 2))[:, first, second]


class Model(nn.Module):
    """A function of x and of weights, whose sizes are known."""

    def __init__(self, function: Callable[..., Any], weights: Tensors) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList([nn.Parameter(w.detach(), w.requires_grad) for w in weights])

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x, *[self.weights[i] for i in range(len(self.weights))])


@dataclass(frozen=True)
class Case:
    """A function of x (batch, length, width), its weights, and what is fused in it."""

    function: Callable[..., Any]
    weights: Callable[[], Tensors]
    fusions: set[str]
    train: bool = True


CASES = {
    "attention": Case(attention, lambda: matrices(3), {"attention", "qkv"}),
    "gated": Case(gated, lambda: matrices(2, grad=False), {"gated_mlp"}, train=False),
    "epilogue": Case(epilogue, lambda: [*matrices(1), frozen(WIDTH)], {"linear_epilogue"}),
    "adapted": Case(adapted, lambda: [*matrices(1, grad=False), *adapter()], {"lora"}),
    "adapted in float32": Case(
        in_float32, lambda: [*matrices(1, grad=False), *adapter(torch.float32)], {"lora", "lora_input"}
    ),
    "outer": Case(outer, lambda: [rand(RANK, WIDTH**2 // 4)], {"outer_product_linear"}),
    "pairs": Case(pairs, list, {"dot_interaction"}),
}


@dataclass
class Counted:
    """What three calls of a compiled model made: graphs, and the guards of each time it was compiled."""

    graphs: int = 0
    guards: list[int] = field(default_factory=list)
    fused: set[str] = field(default_factory=set)
    outputs: Tensors = field(default_factory=list)


def counted(case: Case, how: str, enabled: bool) -> Counted:
    """Compile a case and call it with each of the sizes."""
    torch.manual_seed(0)
    model, seen, found = Model(case.function, case.weights()), Run(), Counted()
    torch._dynamo.reset()
    with contextlib.ExitStack() as stack:
        for check in ON_A_GPU:
            stack.enter_context(mock.patch(f"inductor_fusions.{check}", lambda *_: None))
        stack.enter_context(inductor_config.patch(force_disable_caches=True))
        stack.enter_context(config.patch(policy="always", strict=True, enabled=enabled))
        stack.enter_context(torch.set_grad_enabled(case.train))
        sites = stack.enter_context(reporting.isolated())
        dynamic = True if how == "dynamic" else None
        compiled = torch.compile(model, backend=as_on_a_gpu(seen), dynamic=dynamic, fullgraph=True)
        for sizes in SIZES:
            x = rand(*sizes, WIDTH, grad=case.train)
            if how == "marked":  # raises where one of them is specialised
                torch._dynamo.mark_dynamic(x, (0, 1))
            y = compiled(x)
            if case.train:
                model.zero_grad()
                y.float().square().sum().backward()
                grads = [t.grad for t in (x, *model.parameters()) if t.grad is not None]
                found.outputs += [grad.clone() for grad in grads]
            found.outputs.append(y.detach())
        entries = eval_frame._debug_get_cache_entry_list(Model.forward.__code__)
        found.guards = [str(entry.guard_manager).count("_GUARD:") for entry in entries]
    found.graphs = len(seen.graphs)
    found.fused = {site.fusion for site in sites if site.verdict == "fused"}
    return found


@pytest.mark.parametrize("how", ["dynamic", "marked", "found out"])
@pytest.mark.parametrize("name", CASES)
def test_sizes_that_change(name: str, how: str) -> None:
    case = CASES[name]
    ours, stock = counted(case, how, True), counted(case, how, False)
    assert case.fusions <= ours.fused and not stock.fused
    assert ours.graphs == stock.graphs
    assert len(ours.guards) == len(stock.guards) == (2 if how == "found out" else 1)
    assert all(x <= y for x, y in zip(ours.guards, stock.guards, strict=True))
    for x, y in zip(ours.outputs, stock.outputs, strict=True):
        assert float((x.double() - y.double()).norm()) <= 0.02 * float(y.double().norm())
