"""The operation in a graph, where Inductor launches the kernels: its code, and the errors of that code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from inductor_fusions.fusions.outer_product_linear import pairs
from tests.outer_product_linear.interpreted import BLOCK, FACTORS, LINEAR, PIECE, WEIGHT

ROWS, P, Q, N = 40, 20, 12, 72


@dataclass(frozen=True)
class Code:
    """What Inductor wrote for a forward or a backward.

    Attributes:
        wrapper: the text.
        inputs, outputs: names of its graph.
    """

    wrapper: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def operands(one: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    """u, v (not where it is u) and w."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(ROWS, P), (N, P * P)] if one else [(ROWS, P), (ROWS, Q), (N, P * Q)]
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def written(one: bool, dtype: torch.dtype) -> tuple[Code, ...]:
    """The code of forward and backward, for a process without the interpreter."""
    from bench import cuda_codegen
    from inductor_fusions.fusions.outer_product_linear import launch, op

    def square(u: torch.Tensor, w: torch.Tensor) -> Any:
        return op.OUTER_PRODUCT_LINEAR(u, u, w)

    def product(u: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> Any:
        return op.OUTER_PRODUCT_LINEAR(u, v, w)

    sizes = (2, 4)
    tiles = {"LINEAR": LINEAR, "FACTORS": FACTORS, "WEIGHT": WEIGHT, "BLOCK_Q": BLOCK}
    with (
        mock.patch.multiple(launch, PIECE=PIECE, **{k: dict.fromkeys(sizes, t) for k, t in tiles.items()}),
        mock.patch.object(op, "_has_kernel", lambda *tensors: True),
    ):
        inputs = tuple(x.requires_grad_() for x in operands(one, dtype))
        made = cuda_codegen.generate(square if one else product, inputs, train=True, run=False)
    found = []
    for module in made.modules:
        inner = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        (results,) = next(iter(reversed(module.graph.nodes))).args
        found.append(Code(module.wrapper, tuple(inner), tuple(map(str, results))))
    return tuple(found)


def errors(job: tuple[bool, torch.dtype, tuple[Code, ...]]) -> dict[str, float]:
    """Relative errors of the result and of each gradient against float64, where kernels are interpreted."""
    from types import SimpleNamespace

    from bench.cuda_codegen.interpreter import interpret

    one, dtype, (forward, backward) = job
    given = operands(one, dtype)
    dy = torch.randn((ROWS, N), generator=torch.Generator().manual_seed(1)).to(dtype)
    results = interpret(SimpleNamespace(wrapper=forward.wrapper), given)
    known = dict(zip(forward.inputs, given, strict=True)) | dict(zip(forward.outputs, results, strict=True))
    saved = [known.get(name, dy) for name in backward.inputs]
    gradients = interpret(SimpleNamespace(wrapper=backward.wrapper), saved)
    wide = [x.double().requires_grad_() for x in given]
    u, v, w = wide[0], wide[-2], wide[-1]  # where u is v, there are two of them
    exact = pairs(u, v) @ w.t()
    true = [exact, *torch.autograd.grad(exact, wide, dy.double())]
    names = ["y", "du", *([] if one else ["dv"]), "dw"]
    return {
        name: float((x.double() - z.detach()).norm() / z.detach().norm())
        for name, x, z in zip(names, (results[0], *gradients), true, strict=True)
    }
