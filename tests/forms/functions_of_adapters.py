"""Functions of adapters that are added to a base, adapters of some tokens, and sums of narrow products."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .adapters import of_addition
from .linear_form import form, forms

X = (2, 16, 64)
LORA = (X, "frozen 64x64", (8, 64), (64, 8))


@form(*LORA, (64, 8), (2, 16, 2), left=(3, 0), reasons=("cat or stack reads", "cat or stack reads"))
def hydra_by_a_stack(x: Any, w: Any, a: Any, b: Any, d: Any, router: Any) -> Any:
    """The gradient of the router reads each adapter as well."""
    parts = [router[..., i, None] * F.linear(F.linear(x, a), up) for i, up in enumerate((b, d))]
    return F.linear(x, w) + torch.stack(parts).sum(0)


forms(*LORA, of=of_addition, left=(1, 1), reasons=("by mul and pow", "by mul and pow"))(
    rms_norm_of_an_adapter=lambda x, a, b: F.rms_norm(F.linear(F.linear(x, a), b), (64,)),
)
forms(*LORA, of=of_addition, left=(1, 1), reasons=("by amax and sub", "by amax and sub"))(
    softmax_of_an_adapter=lambda x, a, b: F.linear(F.linear(x, a), b).softmax(-1),
)


@form(*LORA, left=(3, 3), reasons=("no product of a base", "no product of a base"))
def linear_of_the_norm_of_an_adapter(x: Any, w: Any, a: Any, b: Any) -> Any:
    """Nothing is added."""
    return F.linear(F.rms_norm(F.linear(F.linear(x, a), b), (64,)), w)


def _loreft(x: Any, a: Any, c: Any, b: Any) -> Any:
    return x + F.linear(F.linear(x, a) - F.linear(x, c), b)


SUMS: dict[str, Any] = {"reasons": ("sum or a difference", "sum or a difference")}
NARROW = ("frozen 64x64", (8, 64), (8, 64), (64, 8))
forms(X, *NARROW, **SUMS)(
    sum_of_narrow_products=lambda x, w, a, c, b: (
        F.linear(x, w) + F.linear(F.linear(x, a) + F.linear(x, c), b)
    ),
)
forms(X, *NARROW, left=(2, 2), **SUMS)(loreft_of_a_linear=lambda x, w, *by: _loreft(F.linear(x, w), *by))


@form(X, (64, 8), (8, 64), (8,), left=(1, 1), **SUMS)
def loreft(x: Any, r: Any, s: Any, c: Any) -> Any:
    """pyreft adds it to what A reads, which may be no linear."""
    return x + (F.linear(x, s, c) - x @ r) @ r.T


@form(X, X, *NARROW, **SUMS)
def sum_of_narrow_products_of_two_inputs(x: Any, y: Any, w: Any, a: Any, c: Any, b: Any) -> Any:
    return F.linear(x, w) + F.linear(F.linear(x, a) + F.linear(y, c), b)


@form("frozen 2x16x64", *["frozen 8x64"] * 2, (64, 8), left=(1, 1), silent="lora")
def mlp_of_a_sum_of_narrow_products(x: Any, a: Any, c: Any, b: Any) -> Any:
    """Nothing is added to what B makes of it."""
    return F.linear((F.linear(x, a) + F.linear(x, c)), b)


def _of_some_tokens(x: Any, w: Any, a: Any, b: Any) -> Any:
    y = F.linear(x, w).clone()
    y[:, 4:] += F.linear(F.linear(x[:, 4:], a), b)
    return y


def _padded(x: Any, w: Any, a: Any, b: Any) -> Any:
    return F.linear(x, w) + F.pad(F.linear(F.linear(x[:, 4:], a), b), (0, 0, 4, 0))


forms(X, "frozen 64x64", "frozen 8x64", "frozen 64x8", left=(2, 2), reasons=("apart in memory",) * 2)(
    frozen_adapter_of_some_tokens=_of_some_tokens,
    frozen_adapter_of_some_tokens_that_is_padded=_padded,
)
# With a gradient of A, torch copies the tokens. Those of one sample are next to each other.
forms(*LORA, left=(1, 1))(adapter_of_later_tokens=_of_some_tokens)
forms((1, 16, 64), *LORA[1:], left=(0, 0))(adapter_of_later_tokens_of_one_sample=_of_some_tokens)
forms(*LORA, left=(3, 3), reasons=("constant_pad_nd", "constant_pad_nd"))(padded_adapter_of_tokens=_padded)
