"""Which linears on an outer product become one operation, and what it computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from inductor_fusions import config, testing
from inductor_fusions.fusion import LeftToStock
from inductor_fusions.fusions.outer_product_linear import check_kernel, op
from inductor_fusions.fusions.outer_product_linear.op import (
    FACTORS,
    OUTER_PRODUCT_LINEAR,
    WEIGHT,
    outer_products,
)
from tests.attention.support import rand

ROWS, P, Q, N = 6, 5, 7, 9

Function = Callable[..., Any]


pytestmark = pytest.mark.usefixtures("any_device")


def operands() -> tuple[torch.Tensor, ...]:
    return rand(ROWS, P), rand(ROWS, Q), rand(N, P * Q), rand(N)


check = partial(testing.check, backend=testing.EAGER_AFTER_PASSES, slack=4.0)

SPELLINGS: dict[str, Function] = {
    "index": lambda u, v, w, b: F.linear((u[:, :, None] * v[:, None, :]).flatten(1), w, b),
    "ellipsis": lambda u, v, w, b: F.linear((u[..., None] * v[:, None]).reshape(-1, P * Q), w, b),
    "unsqueeze": lambda u, v, w, b: F.linear((u.unsqueeze(2) * v.unsqueeze(1)).view(ROWS, -1), w, b),
    "factors swapped": lambda u, v, w, b: F.linear((v.unsqueeze(1) * u.unsqueeze(-1)).flatten(1), w, b),
    "mul": lambda u, v, w, b: F.linear(torch.mul(u.view(ROWS, P, 1), v.reshape(-1, 1, Q)).flatten(1), w, b),
    "bmm": lambda u, v, w, b: F.linear(torch.bmm(u[:, :, None], v[:, None, :]).flatten(1), w, b),
    "matmul": lambda u, v, w, b: F.linear((u[:, :, None] @ v[:, None, :]).flatten(1), w, b),
    "einsum": lambda u, v, w, b: F.linear(torch.einsum("bi,bj->bij", u, v).flatten(1), w, b),
    "einsum, turned": lambda u, v, w, b: F.linear(torch.einsum("xk,xy->xyk", v, u).flatten(1), w, b),
    "no bias": lambda u, v, w, b: F.linear((u[:, :, None] * v[:, None, :]).flatten(1), w),
    "product": lambda u, v, w, b: (u[:, :, None] * v[:, None, :]).flatten(1) @ w.t() + b,
    "more dims": lambda u, v, w, b: F.linear((u[None][..., None] * v[None][..., None, :]).flatten(-2), w, b)[
        0
    ],
    "more dims, einsum": lambda u, v, w, b: (
        F.linear(torch.einsum("xbi,xbj->xbij", u[None], v[None]).reshape(1, ROWS, -1), w, b) * 2
    ),
    "more dims, matmul": lambda u, v, w, b: (
        (u[None][..., None] @ v[None][..., None, :]).flatten(2) @ w.t() + b
    ),
    "addmm": lambda u, v, w, b: torch.addmm(b, (u[:, :, None] * v[:, None, :]).flatten(1), w.t()),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name: str) -> None:
    """Fused; outputs and all gradients."""
    run = check(SPELLINGS[name], operands())
    assert run.ours.fused[0].fusion == "outer_product_linear"


def test_one_matrix() -> None:
    """All pairs of the features of one tensor, whose gradient comes from both sides."""
    check(
        lambda z, w: F.linear((z[:, :, None] * z[:, None, :]).flatten(1), w), (rand(ROWS, P), rand(N, P * P))
    )


def both(x: Any, w: Any, b: Any) -> Any:
    """A linear on x, and another reader of x."""
    return F.linear(x, w, b), x.sum()


OTHERS: dict[str, tuple[Function, str | None]] = {
    "a sum": (lambda u, v, w, b: F.linear((u[:, :, None] + v[:, None, :]).flatten(1), w, b), None),
    "not flattened in this order": (
        lambda u, v, w, b: F.linear((u[:, :, None] * v[:, None, :]).transpose(1, 2).flatten(1), w, b), None,
    ),
    "more rows of one factor": (
        lambda u, v, w, b: F.linear((u[None, :, :, None] * v[:1, None, None]).flatten(2), w, b),
        "different rows",
    ),
    "dims of rows are flattened": (
        lambda u, v, w, b: F.linear((u[:, :, None] * v[:, None, :]).view(1, ROWS, 1, -1), w, b), None,
    ),
    "contracted": (
        lambda u, v, w, b: F.linear(torch.einsum("bi,bj->ij", u, v).view(1, -1), w, b), "outer-product",
    ),
    "mean of outer products": (  # OpenFold, with a norm
        lambda u, v, w, b: F.linear(
            torch.einsum("...bac,...dae->...bdce", u[None], v[None]).flatten(-2).double().float() / 5, w, b
        ), "summed",
    ),
    "a state, summed over a sequence": (
        lambda u, v, w, b: F.linear(torch.einsum("bli,blj->bij", u[None], v[None]).flatten(1), w, b),
        "summed",
    ),
    "rotated points": (  # a product of matrices, whose sums are over the coordinates
        lambda u, v, w, b: F.linear(
            torch.einsum("bji,bhj->bhi", u[:, :, None].expand(-1, P, Q), v[:, None, :P].expand(-1, P, -1))
            .flatten(1), w, b
        ), None,
    ),
    "divided in between": (
        lambda u, v, w, b: F.linear(torch.einsum("bi,bj->bij", u, v).flatten(1) / 5, w, b), "is between",
    ),
    "activated in between": (
        lambda u, v, w, b: F.linear(torch.einsum("bi,bj->bij", u, v).flatten(1).relu(), w, b), "is between",
    ),
    "multiplied in between": (
        lambda u, v, w, b: F.linear((u[:, :, None] * v[:, None, :]).flatten(1) * b[:1], w, b), "is between",
    ),
    "pairs of rows": (
        lambda u, v, w, b: F.linear(torch.einsum("bi,cj->bcij", u, v).flatten(-2), w, b), "different rows",
    ),
    "pairs of rows by a product": (
        lambda u, v, w, b: F.linear((v[:, None, None, :] * u[None, :, :, None]).flatten(2), w, b),
        "different rows",
    ),
    "three vectors": (
        lambda u, v, w, b: F.linear(torch.einsum("bi,bj,bk->bijk", u, v, u[:, :1]).flatten(1), w, b),
        "more than two",
    ),
    "heads of a projection": (
        lambda u, v, w, b: F.linear(torch.einsum("bi,ipq->bpq", u, w[:P].view(P, P, Q)).view(-1, P * Q), w),
        None,
    ),
    "one row of a factor": (
        lambda u, v, w, b: F.linear(torch.einsum("bi,bj->bij", u[:1], v).flatten(1), w, b), "different rows",
    ),
    "three factors": (
        lambda u, v, w, b: F.linear((u[:, :, None] * v[:, None, :] * u[:, :, None]).flatten(1), w, b), None,
    ),
    "bilinear": (lambda u, v, w, b: F.bilinear(u, v, w.view(N, P, Q), b), "bilinear"),
    "both sides of a weight": (lambda u, v, w, b: (u @ w[:P, :Q] @ v.T).sigmoid(), "through a weight"),
    "both sides of a matrix, of one tensor": (  # BOFT's order of rows and columns
        lambda u, v, w, b: (v @ w[:Q, :Q] @ v.T).sigmoid(), "by one tensor",
    ),
    "both sides of a weight, normalised": (
        lambda u, v, w, b: (u @ w[:P, :Q] @ v.T / 3).log_softmax(-1), None,
    ),
    "both sides of a weight of each head": (  # FinalMLP
        lambda u, v, w, b: (u[:, None, None] @ w[:P, :Q].expand(2, P, Q)) @ v[:, None, :, None],
        "through a weight",
    ),
    "a query's score through a weight": (
        lambda u, v, w, b: (
            (u[:, None, None] @ w[:P, :Q]) @ v[:, None, :, None]
        ).flatten(1).softmax(-1), None
    ),
    "two linears": (lambda u, v, w, b: u @ w[:P, :Q] @ w[:Q, :Q], None),
    "two linears, transposed": (lambda u, v, w, b: v @ w[:P, :Q].t() @ w[:Q, :P].t(), None),
    "an einsum of three": (
        lambda u, v, w, b: torch.einsum("bp,bq,npq->bn", u, v, w.view(N, P, Q)) + b, "3 tensors",
    ),
    "Kronecker factors": (
        lambda u, v, w, b: torch.einsum("bij,im,jn->bmn", w[:4, :6].view(4, 2, 3), u[:2], v[:3]),
        "3 tensors",
    ),
    "an einsum of three without a weight": (
        lambda u, v, w, b: torch.einsum("bp,bp,bp->b", u, u * 2, u * 3), None,
    ),
    "an einsum of three vectors": (lambda u, v, w, b: torch.einsum("i,i,i->i", u[0], u[1], u[2]), None),
    "channels of a convolution": (  # xDeepFM
        lambda u, v, w, b: F.conv1d(
            torch.einsum("bpd,bqd->bpqd", u[:, :, None] * b[:5], v[:, :, None] * b[:5]).flatten(1, 2),
            w[:, :, None],
        ), "convolution",
    ),
    "channels of a convolution, multiplied": (
        lambda u, v, w, b: F.conv1d(
            (u[:, :, None, None] * v[:, None, :, None] * b[:5]).flatten(1, 2), w[:, :, None]
        ), None,
    ),
    "over the rows": (  # AOANet
        lambda u, v, w, b: torch.einsum("np,nq->npq", u, v).permute(1, 2, 0) @ w[:ROWS], "over their rows",
    ),
    "over the rows, of a product": (
        lambda u, v, w, b: (u[:, :, None] * v[:, None, :]).movedim(0, -1) @ w[:ROWS], "over their rows",
    ),
    "over the columns of a factor": (
        lambda u, v, w, b: torch.einsum("np,nq->npq", u, v).permute(0, 2, 1) @ w[:P], None,
    ),
    "over the rows of a sum": (
        lambda u, v, w, b: (u[:, :, None] + v[:, None, :]).permute(1, 2, 0) @ w[:ROWS], None,
    ),
    "used elsewhere": (
        lambda u, v, w, b: both((u[:, :, None] * v[:, None, :]).flatten(1), w, b), "used-elsewhere",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_left_alone(name: str) -> None:
    fn, reason = OTHERS[name]
    check(fn, operands(), fused=0, reason=reason)


def test_overwritten_afterwards() -> None:
    """Where the weight alone is trained, stock keeps the outer product, and not its factors."""

    def fn(u: Any, v: Any, w: Any, b: Any) -> Any:
        y = F.linear((u[:, :, None] * v[:, None, :]).flatten(1), w, b)
        u[0] = 3.0
        return y

    u, v, w, b = operands()
    seen = testing.capture(fn, u.detach(), v.detach(), w, b, train=True)
    assert not seen.fused and "overwrites an operand" in seen.sites[0].reason


def test_autocast() -> None:
    """The product is made in another dtype than the linear multiplies in."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run = testing.capture(SPELLINGS["index"], *operands(), backend=testing.EAGER_AFTER_PASSES)
    assert [site.reason for site in run.sites] == ["the operands have different dtypes, or autocast is on"]


@pytest.mark.parametrize(("gain", "rows", "fused"), [(1.5, 6, 1), (1.5, 12, 1), (1.5, 24, 0), (0.9, 6, 0)])
def test_what_is_measured_decides(gain: float, rows: int, fused: int, shelf: Callable[..., None]) -> None:
    row = {"dtype": "float32", "train": True, "p": P, "q": Q, "columns": N, "rows": rows, "gain": gain}
    shelf(on="cpu", cpu={"outer_product_linear": [row]})
    run = check(SPELLINGS["index"], operands(), policy="profitable", fused=fused)
    assert ("measure" in run.sites[0].kernel) if fused else ("measured" in run.sites[0].reason)


@pytest.mark.parametrize("one", [True, False])
def test_memory_that_two_variables_share(one: bool) -> None:
    """Gradients of one matrix may be added up; of x and x.detach(), x has that of its own side alone."""
    z, w = rand(ROWS, P), rand(N, P * P)

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        return make_boxed_func(gm.forward)

    def fn(z: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return OUTER_PRODUCT_LINEAR(z, z if one else z.detach(), w)

    compiled = torch.compile(fn, backend=aot_autograd(fw_compiler=backend, bw_compiler=backend))
    (found,) = torch.autograd.grad(compiled(z, w).sum(), [z])
    other = z if one else z.detach()
    (wanted,) = torch.autograd.grad((outer_products(z, other) @ w.t()).sum(), [z])
    torch.testing.assert_close(found, wanted)


def test_float32_needs_tf32(tf32: None) -> None:
    """The kernels multiply float32 as TF32, where torch may; else the report says how to allow it."""
    with FakeTensorMode():
        whole, half = (torch.empty(ROWS, N, dtype=d, device="cuda") for d in (torch.float32, torch.bfloat16))
    check_kernel(half)
    check_kernel(whole)
    torch.set_float32_matmul_precision("highest")
    check_kernel(half)
    with pytest.raises(LeftToStock, match="TF32 is off") as left:
        check_kernel(whole)
    assert "set_float32_matmul_precision" in left.value.hint
    with pytest.raises(LeftToStock, match="on the CPU"):
        check_kernel(torch.empty(ROWS, N))


def test_arguments_that_do_not_fit() -> None:
    u, v, w, _ = operands()
    for bad in ((u, v, w[:, 1:]), (u, v[1:], w), (u, v.double(), w), (u[0], v, w)):
        with pytest.raises((ValueError, RuntimeError)):
            OUTER_PRODUCT_LINEAR(*bad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("features", [1, 2, 5, 100])
def test_gradients_in_chunks(dtype: torch.dtype, features: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all features at once; and the rows of products are not in memory where they do not fit."""
    rows, p, q, n = 33, 5, 7, 9
    monkeypatch.setattr(op, "CHUNK", features * rows * q * dtype.itemsize)
    dy, u, v, w = (torch.randn(shape).to(dtype) for shape in ((rows, n), (rows, p), (rows, q), (n, p * q)))

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            sizes = [t.numel() for t in pytree.tree_leaves(made) if isinstance(t, torch.Tensor)]
            self.elements = max([self.elements, *sizes])
            return made

    with Largest() as seen:
        found = [*op.factors(dy, u, v, w), op.weight(dy, u, v)]
    assert seen.elements == max(n * p * q, min(features, p) * rows * q)
    wide = [t.double().requires_grad_() for t in (u, v, w)]
    true = torch.autograd.grad(outer_products(wide[0], wide[1]) @ wide[2].t(), wide, dy.double())
    assert all(map(torch.equal, found, [*FACTORS(dy, u, v, w), WEIGHT(dy, u, v)]))
    for x, y in zip(found, true, strict=True):
        assert x.dtype == dtype and float((x.double() - y).norm() / y.norm()) < 4 * torch.finfo(dtype).eps


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 128, 513])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_on_a_gpu(rows: int, dtype: torch.dtype, tf32: None) -> None:
    z, w = rand(rows, 72), rand(96, 72 * 72)
    inputs = [(t.detach() / 4).cuda().requires_grad_() for t in (z, w)]
    # Stock's product of one row is no matter for tensor cores: it is exact where TF32 is allowed as well.
    slack = 2.0**-10 / torch.finfo(dtype).eps if dtype == torch.float32 and rows == 1 else 4.0
    check(
        lambda z, w: F.linear((z[:, :, None] * z[:, None, :]).flatten(1), w), inputs, dtype=dtype,
        backend="inductor", slack=slack,
    )  # fmt: skip


@pytest.mark.gpu
def test_memory_on_a_gpu() -> None:
    """The row of products is never there, in forward and in backward."""
    z = torch.randn(2048, 432, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    linear = nn.Linear(432 * 432, 512, bias=False, device="cuda", dtype=torch.bfloat16)
    with config.patch(policy="always"):
        compiled = torch.compile(lambda z: linear((z[:, :, None] * z[:, None, :]).flatten(1)))
        compiled(z).sum().backward()
        linear.zero_grad()
        z.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        compiled(z).sum().backward()
    # The weight, its gradient, and what is small; without what other tests have left.
    taken = torch.cuda.max_memory_allocated() - before + linear.weight.nbytes
    assert taken < 0.5 * 2**30
