"""Kernels that are known to be wrong: each defect in the bare kernel, and compiled graphs without it.

A defect that does not show any more on the installed torch fails its test: then its entry in
`inductor_fusions/fusions/kernel_defects/known.py` says since when, and may go with the oldest torch that has
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from inductor_fusions import config
from tests.gpu.defects import (
    HALVES,
    ORDERS,
    RIGHT,
    WRONG,
    attention,
    bare,
    error,
    exact,
    laid_out,
    low_scores,
    rand,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("needs_cudnn")]

# -- plans -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
def test_plans_are_cached_without_the_layout_of_the_gradient(dtype: torch.dtype) -> None:
    inputs = [rand(2, 4, 20, 16, dtype=dtype) for _ in range(3)]
    grad = torch.randn_like(inputs[0])
    expected = exact(inputs, grad, attention)
    errors = {order: error(bare(inputs, laid_out(grad, order)), expected) for order in ORDERS}
    first, *others = errors.values()
    assert first < RIGHT and min(others) > WRONG, errors


#: Functions around an attention, each of which gives its gradient another layout.
AROUND: dict[str, Callable[..., Any]] = {
    "as it is": lambda o: o,
    "heads merged": lambda o: o.transpose(1, 2).flatten(2),
    "length first": lambda o: o.permute(2, 0, 1, 3).reshape(o.shape[2], -1) * 1.5,
    "heads first": lambda o: o.permute(1, 0, 2, 3).reshape(o.shape[1], -1),
    "length, heads": lambda o: o.permute(2, 1, 0, 3).reshape(o.shape[2], -1),
}
SPELLINGS: dict[str, Callable[..., Any]] = {
    "written out": attention,
    "einsum": lambda q, k, v: torch.einsum(
        "bhqk,bhkd->bhqd", torch.softmax(torch.einsum("bhqd,bhkd->bhqk", q, k) * 0.25, -1), v
    ),
    "call": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.25),
}


def errors_in_all_orders(dtype: torch.dtype, orders: Sequence[str]) -> dict[str, float]:
    """Attentions of one shape, compiled in one process: gradients of all layouts, eager calls in between."""
    found = {}
    for order in orders:
        inputs = [rand(2, 4, 12, 16, dtype=dtype, order=order) for _ in range(3)]
        for spelling, core in SPELLINGS.items():
            for name, around in AROUND.items():
                torch._dynamo.reset()

                def fn(*x: Any, core: Any = core, around: Any = around) -> Any:
                    return around(core(*x))

                # Eager calls, whose gradients have any layout.
                eager = F.scaled_dot_product_attention(*inputs, scale=0.25)
                for layout in ORDERS:
                    torch.autograd.grad(
                        eager, inputs, laid_out(torch.randn_like(eager), layout), retain_graph=True
                    )
                out = torch.compile(fn)(*inputs)
                grad = torch.randn_like(out)
                ours = torch.autograd.grad(out, inputs, grad)
                found[f"{order}, {spelling}, {name}"] = error(ours, exact(inputs, grad, fn))
    return found


@pytest.mark.parametrize("dtype", HALVES)
def test_no_compiled_backward_meets_the_plan_of_another(dtype: torch.dtype, fresh_cache: None) -> None:
    with config.patch(policy="always"), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        found = errors_in_all_orders(dtype, ["bhsd", "bshd", "hbsd"])
    wrong = {name: each for name, each in found.items() if each > RIGHT}
    assert not wrong


def test_some_do_without_the_cure(fresh_cache: None) -> None:
    with config.patch(policy="always", kernel_defects=False), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        found = errors_in_all_orders(torch.bfloat16, ["bhsd"])
    assert max(found.values()) > WRONG, found


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_dropout_draws_as_its_backward_takes_it(dropout: float, fresh_cache: None) -> None:
    """With v of unit vectors, the output holds the weights, and the gradient of v their sums over queries."""
    q, k = (rand(2, 4, 128, 64, dtype=torch.bfloat16) for _ in range(2))
    v = torch.eye(128, 64, device="cuda", dtype=torch.bfloat16).expand(2, 4, 128, 64).clone().requires_grad_()

    def fn(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = torch.compile(fn)(q, k, v)
        (dv,) = torch.autograd.grad(out, v, torch.ones_like(out))
    # out[i, d] = kept weight of key d; dv[j] = sum over i of the kept weights of key j.
    expected = out.double().sum(-2)
    torch.testing.assert_close(dv[..., :64, 0].double(), expected, rtol=0.05, atol=0.05)


# -- keys of half a tile -----------------------------------------------------------------------------


def masks(queries: int, keys: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    low = torch.finfo(dtype).min
    position = torch.arange(keys, device="cuda")
    causal = position <= torch.arange(queries, device="cuda")[:, None] + max(keys - queries, 0)
    zero = torch.zeros(2, 1, queries, keys, device="cuda")
    left, right = (zero.clone() for _ in range(2))
    left[0, ..., : keys // 2] = low
    right[1, ..., -(keys // 3) :] = low
    hidden = zero.clone()
    hidden[0, :, : queries // 3] = -math.inf
    rows = zero.clone()
    rows[:, :, 3:9] = -1000.0
    return {
        "left padding": left,
        "left padding, causal": left.masked_fill(~causal, low),
        "right padding": right,
        "fully masked rows": hidden,
        "low biases": zero - 200.0,
        "low rows": rows,
    }


def test_keys_of_half_a_tile_beside_a_low_logsumexp() -> None:
    inputs = [rand(2, 2, n, 64, dtype=torch.bfloat16) for n in (128, 192, 192)]
    grad = torch.randn_like(inputs[0])
    bias = masks(128, 192, torch.bfloat16)["low biases"].bfloat16().expand(2, 2, 128, 192)
    assert not bare(inputs, grad, bias)[0].isfinite().all()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("call", [False, True])
def test_no_nan_at_any_length(dtype: torch.dtype, dynamic: bool, call: bool, fresh_cache: None) -> None:
    """Every number of keys from 64 to 1,088 in steps of 64."""
    torch._dynamo.reset()

    def fn(q: Any, k: Any, v: Any, bias: Any) -> Any:
        if call:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=0.25)
        return attention(q, k, v, bias)

    wrong = {}
    with config.patch(policy="always"), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        for keys in range(64, 1089, 64):
            if not dynamic:
                torch._dynamo.reset()
            compiled = torch.compile(fn, dynamic=dynamic)
            for name, mask in masks(128, keys, dtype).items():
                if not call and name == "fully masked rows":
                    continue  # NaN in eager mode, and so are all gradients
                inputs = [rand(2, 2, n, 64, dtype=dtype) for n in (128, keys, keys)]
                bias = mask.to(dtype)
                # Fully masked rows differ between backends.
                alive = (bias > torch.finfo(dtype).min / 2).any(-1, keepdim=True)
                out = compiled(*inputs, bias)
                grad = torch.randn_like(out) * alive
                ours = torch.autograd.grad(out, inputs, grad)
                wide = torch.where(alive, bias.double(), 0.0)
                expected = exact(inputs, grad, lambda q, k, v, wide=wide: attention(q, k, v, wide))
                if (found := error(ours, expected)) > 0.05:
                    wrong[keys, name] = found
    assert not wrong


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("queries", [1, 2, 65, 128])
def test_keys_of_half_a_tile_without_a_mask(queries: int, dtype: torch.dtype) -> None:
    inputs = low_scores(queries, 192, dtype)
    assert not bare(inputs, torch.randn_like(inputs[0]))[0].isfinite().all()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("flash", [False, True])
def test_no_nan_without_a_mask(dtype: torch.dtype, dynamic: bool, flash: bool, fresh_cache: None) -> None:
    """The gradients are those of flash attention, or of cuDNN with a mask if flash is switched off."""
    torch._dynamo.reset()

    def fn(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, scale=0.25)

    backends = [SDPBackend.CUDNN_ATTENTION, *([SDPBackend.FLASH_ATTENTION] if flash else [])]
    wrong = {}
    with sdpa_kernel(backends, set_priority=True):
        for queries, keys in ((1, 64), (2, 192), (65, 320), (130, 576), (64, 128)):
            if not dynamic:
                torch._dynamo.reset()
            inputs = low_scores(queries, keys, dtype)
            out = torch.compile(fn, dynamic=dynamic)(*inputs)
            grad = torch.randn_like(out)
            # What all keys have in common cancels in the gradient of q, and leaves the rounding of the dtype.
            ours = torch.autograd.grad(out, inputs, grad)
            if not (found := error(ours, exact(inputs, grad, attention))) < 0.05:
                wrong[queries, keys] = found
    assert not wrong
