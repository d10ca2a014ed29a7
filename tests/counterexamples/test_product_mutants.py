"""Linears, adapters and interactions that are fused, of which one detail is changed.

Decided as on a GPU; the graphs run on the CPU. Widths are equal, so that most changes of dims still run. What
is frozen can be overwritten between two products.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from torch._inductor import config as inductor_config

from devtools.ledger.compiling import ON_A_GPU
from inductor_fusions import config, reporting, testing
from inductor_fusions.block_mm import op
from tests.block_mm.support import Run, as_on_a_gpu, differentiate, rand
from tests.counterexamples.mutator import verify
from tests.fuzz.judge import as_kernels, check_products

WIDTH, RANK = 32, 16


def frozen(*shape: int) -> torch.Tensor:
    return rand(*shape, grad=False)


def adapter(dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [rand(RANK, WIDTH, dtype=dtype), rand(WIDTH, RANK, dtype=dtype)]


def square(count: int, train: bool = True) -> list[torch.Tensor]:
    """An input, which takes a gradient in training, and frozen weights."""
    return [rand(WIDTH, WIDTH, grad=train), *(frozen(WIDTH, WIDTH) for _ in range(count))]


def shared(x: Any, q: Any, k: Any, v: Any, bias: Any) -> Any:
    return F.linear(x, q), F.linear(x, k, bias), x @ v.t()


def heads(x: Any, q: Any, k: Any, v: Any) -> Any:
    return tuple(F.linear(x, w).view(2, 16, 4, 8).transpose(1, 2) for w in (q, k, v))


def gated(x: Any, gate: Any, up: Any) -> Any:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def whole_mlp(x: Any, gate: Any, up: Any, down: Any) -> Any:
    return F.linear(F.gelu(x @ gate.t(), approximate="tanh") * F.linear(x, up), down)


def epilogue(x: Any, w: Any, bias: Any, residual: Any) -> Any:
    return torch.sigmoid(F.linear(x, w, bias) * 0.3 + residual)


def adapted(x: Any, w: Any, a: Any, b: Any) -> Any:
    return F.linear(x, w) + F.linear(F.linear(x, a), b) * 2.0


def scaled_by_alpha(x: Any, w: Any, a: Any, b: Any) -> Any:
    return torch.add(x @ w.t(), (x @ a.t()) @ b.t(), alpha=0.5)


def in_float32(x: Any, w: Any, a: Any, b: Any) -> Any:
    base = F.linear(x, w)
    return (base + F.linear(F.linear(x.to(a.dtype), a), b) * 2.0).to(base.dtype)


def two_adapted(x: Any, w: Any, v: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    return adapted(x, w, a, b), adapted(x, v, c, d)


def gated_adapted(x: Any, w: Any, v: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    return F.silu(adapted(x, w, a, b)) * adapted(x, v, c, d)


def outer(u: Any, v: Any, w: Any) -> Any:
    return F.linear((u[:, :, None] * v[:, None, :]).flatten(1), w)


def outer_and_bias(u: Any, v: Any, w: Any, bias: Any) -> Any:
    return torch.bmm(u.unsqueeze(2), v.unsqueeze(1)).reshape(u.shape[0], -1) @ w.t() + bias


def pairs(dense: Any, t: Any) -> Any:
    first = torch.tensor([i for i in range(4) for _ in range(i)])
    second = torch.tensor([j for i in range(4) for j in range(i)])
    return torch.cat([dense, torch.bmm(t, t.transpose(1, 2))[:, first, second]], dim=1)


def every_pair(t: Any) -> Any:
    first, second = torch.tril_indices(4, 4, offset=0).unbind()
    return torch.einsum("bid,bjd->bij", t, t)[:, first, second]


def leaves(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [rand(*shape) for shape in shapes]


#: The function, its inputs, and the fusion that takes it.
PRODUCTS: dict[str, tuple[Callable[..., Any], Callable[[], list[torch.Tensor]], str]] = {
    "shared": (shared, lambda: [*square(3), frozen(WIDTH)], "qkv"),
    "heads": (heads, lambda: [rand(2, 16, WIDTH), *square(3)[1:]], "qkv"),
    "gated": (gated, lambda: square(2, train=False), "gated_mlp"),
    "whole_mlp": (whole_mlp, lambda: square(3, train=False), "gated_mlp"),
    "epilogue": (epilogue, lambda: [*square(1), frozen(WIDTH), rand(WIDTH, WIDTH)], "linear_epilogue"),
    "activated": (lambda x, w: F.gelu(torch.matmul(x, w.mT)), lambda: square(1), "linear_epilogue"),
    "adapted": (adapted, lambda: [*square(1), *adapter()], "lora"),
    "scaled_by_alpha": (scaled_by_alpha, lambda: [*square(1), *adapter()], "lora"),
    "in_float32": (in_float32, lambda: [*square(1), *adapter(torch.float32)], "lora"),
    "two_adapted": (two_adapted, lambda: [*square(2), *adapter(), *adapter()], "lora"),
    "gated_adapted": (gated_adapted, lambda: [*square(2), *adapter(), *adapter()], "lora"),
    "outer": (outer, lambda: leaves((8, 8), (8, 8), (8, 64)), "outer_product_linear"),
    "outer_and_bias": (
        outer_and_bias, lambda: leaves((8, 8), (8, 8), (8, 64), (8,)), "outer_product_linear"
    ),
    "pairs": (pairs, lambda: leaves((4, 4), (4, 4, 4)), "dot_interaction"),
    "every_pair": (every_pair, lambda: leaves((4, 4, 4)), "dot_interaction"),
}  # fmt: skip


#: Fused before autograd: judged on the graphs that Dynamo makes.
INTERACTIONS = ("outer", "outer_and_bias", "pairs", "every_pair")


@contextlib.contextmanager
def on_a_gpu() -> Iterator[None]:
    """What has kernels for a GPU alone is fused all the same."""
    with contextlib.ExitStack() as stack:
        for check in ON_A_GPU:
            stack.enter_context(mock.patch(f"inductor_fusions.{check}", lambda *_: None))
        yield


def judged(name: str) -> Callable[[Any, list[torch.Tensor]], Sequence[reporting.Site]]:
    """What judges mutants of a function: gives their sites, or raises where they are wrong."""
    if name not in INTERACTIONS:
        return check_products

    def judge(mutant: Any, inputs: list[torch.Tensor]) -> Sequence[reporting.Site]:
        with on_a_gpu():
            seen = testing.check(mutant, inputs, fused=None, slack=2.0, backend=testing.EAGER_AFTER_PASSES)
        return seen.sites

    return judge


@pytest.mark.parametrize("name", PRODUCTS)
def test_original(name: str) -> None:
    """What is mutated is fused."""
    function, inputs, fusion = PRODUCTS[name]
    sites = judged(name)(function, inputs())
    assert fusion in {site.fusion for site in sites if site.verdict == "fused"}, sites


#: Whose rows, of the first input, may be of any number: the inputs with as many rows.
ROWS = {
    **dict.fromkeys(("shared", "gated", "whole_mlp", "activated", "adapted", "scaled_by_alpha"), (0,)),
    **dict.fromkeys(("in_float32", "two_adapted", "gated_adapted", "every_pair"), (0,)),
    **{"epilogue": (0, 3), "outer": (0, 1), "outer_and_bias": (0, 1)},
}


LAYOUTS = "whole", "turned", "part", "every second row", "expanded"


def laid_out(x: torch.Tensor, rows: int, how: str) -> torch.Tensor:
    """A leaf like another one, with other rows, and with other strides."""
    shape = (rows, *x.shape[1:])
    made = {
        "whole": lambda: torch.randn(shape),
        "turned": lambda: torch.randn(shape[::-1]).permute(*reversed(range(len(shape)))),
        "part": lambda: torch.randn(*shape[:-1], shape[-1] + 8)[..., 3 : 3 + shape[-1]],
        "every second row": lambda: torch.randn(2 * rows, *shape[1:])[::2],
        "expanded": lambda: torch.randn(1, *shape[1:]).expand(shape),
    }[how]()
    return made.to(x.dtype).detach().requires_grad_(x.requires_grad)


@pytest.mark.parametrize("name", ROWS)
def test_other_strides_and_sizes(name: str) -> None:
    """One graph for inputs laid out otherwise than when it was traced, and of other sizes."""
    function, inputs, _ = PRODUCTS[name]
    values, seen = inputs(), Run()
    train = any(x.requires_grad for x in values)
    with contextlib.ExitStack() as stack:
        stack.enter_context(on_a_gpu())
        stack.enter_context(mock.patch.object(op, "composite", partial(as_kernels, op.composite)))
        stack.enter_context(config.patch(policy="always", strict=True))
        stack.enter_context(inductor_config.patch(force_disable_caches=True))
        stack.enter_context(torch.set_grad_enabled(train))
        sites = stack.enter_context(reporting.isolated())
        compiled = torch.compile(function, backend=as_on_a_gpu(seen))
        for rows, how in itertools.product((100, 7, 32), LAYOUTS):
            given = [laid_out(x, rows, how) if i in ROWS[name] else x for i, x in enumerate(values)]
            for i in ROWS[name]:
                torch._dynamo.maybe_mark_dynamic(given[i], 0)
            wide = [x.detach().double().requires_grad_(x.requires_grad) for x in given]
            runs = []
            for call, tensors in ((compiled, given), (function, given), (function, wide)):
                found = call(*tensors)
                outputs = list(found) if isinstance(found, tuple) else [found]
                runs.append([*outputs, *(differentiate(function, tensors, outputs) if train else ())])
            for ours, eager, exact in zip(*runs, strict=True):
                assert ours.shape == eager.shape and ours.dtype == eager.dtype
                far, allowed = (float((t.double() - exact).detach().norm()) for t in (ours, eager))
                eps = torch.finfo(ours.dtype).eps
                assert far <= 2 * allowed + 8 * eps * float(exact.detach().norm()), (rows, how, far, allowed)
    assert any(site.verdict == "fused" for site in sites), sites


@pytest.mark.slow
@pytest.mark.parametrize("name", PRODUCTS)
def test_some_mutants(name: str) -> None:
    function, inputs, _ = PRODUCTS[name]
    every = 8 if name in INTERACTIONS else 48  # which have fewer mutants, that take less time
    assert verify(function, inputs(), judged(name), lambda index: index % every == len(name) % every)


@pytest.mark.long
@pytest.mark.parametrize("name", PRODUCTS)
def test_all_mutants(name: str) -> None:
    function, inputs, _ = PRODUCTS[name]
    assert verify(function, inputs(), judged(name))
