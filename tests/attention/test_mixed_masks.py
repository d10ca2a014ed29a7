"""A bias and a mask in one tensor: they are taken apart where their sum is the same."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from inductor_fusions import config
from tests.attention.support import INF, LOWEST, TRAIN, cases, check, flex_everywhere, qkv, rand
from tests.support.modules import Module

B, H, N = 2, 4, 150

CAUSAL = "flex, block mask: causal, bias in score_mod"
PADDED = "flex, block mask: causal+pad, bias in score_mod"


def distance() -> torch.Tensor:
    return torch.arange(N) - torch.arange(N)[:, None]


def alibi() -> torch.Tensor:
    """Computed in the graph, so that no slope can be so steep that it hides keys."""
    return torch.pow(0.5, torch.arange(1, H + 1))[:, None, None] * distance()


def later() -> torch.Tensor:
    return distance() > 0


def numbers(fill: float = LOWEST) -> torch.Tensor:
    return torch.zeros(N, N).masked_fill(later(), fill)


#: The tensor that is added to the scores.
MIXED = {
    "masked_fill": lambda: alibi().masked_fill(later(), -INF),
    "masked_fill, finite": lambda: alibi().masked_fill(later(), LOWEST),
    "masked_fill, tensor": lambda: alibi().masked_fill(later(), torch.tensor(-1e9)),
    "where": lambda: torch.where(~later(), alibi(), -INF),
    "where, number first": lambda: torch.where(later(), LOWEST, alibi()),
    "where, tensors": lambda: torch.where(later(), torch.full((N, N), -INF), alibi()),
    "of numbers": lambda: alibi().masked_fill(numbers() < -1, LOWEST),
    "sum": lambda: alibi() + numbers(),
    "sum, infinite": lambda: numbers(-INF) + alibi(),
    "sum of three": lambda: alibi() + (numbers(-INF) + distance().cos()),
    "more dims": lambda: alibi().masked_fill(later(), -INF)[None],
    "unsqueeze and expand": lambda: alibi().masked_fill(later(), -INF).unsqueeze(0).expand(B, -1, -1, -1),
    "cast up": lambda: alibi().bfloat16().masked_fill(later(), -INF).float(),
    "copied": lambda: alibi().masked_fill(later(), -INF).contiguous().clone(),
    "row and diagonal": lambda: (torch.arange(N) * 0.01).masked_fill(later(), -INF),
    "filled twice": lambda: alibi().masked_fill(later(), LOWEST).masked_fill(distance() > 3, LOWEST),
}


def spelled(mixed: Any, scale: float = 0.25) -> Any:
    return lambda q, k, v, *more: torch.softmax(q @ k.mT * scale + mixed(*more), -1) @ v


def called(mixed: Any) -> Any:
    def fn(q: Any, k: Any, v: Any, *more: Any) -> Any:
        bias = mixed(*more).expand(B, H, N, N)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, bias)

    return fn


@pytest.mark.parametrize("form", [spelled, called], ids=["spelled", "called"])
@cases(MIXED)
def test_taken_apart(case: Any, form: Any) -> None:
    with flex_everywhere("flex"):
        seen = check(form(case), qkv(N, N, heads=H), slack=4.0)
    assert seen.sites[0].kernel == CAUSAL


def test_bfloat16() -> None:
    with flex_everywhere("flex"):
        check(
            spelled(lambda: alibi().bfloat16().masked_fill(later(), torch.finfo(torch.bfloat16).min)),
            qkv(N, N, heads=H), dtype=torch.bfloat16, kernel=CAUSAL, slack=4.0,
        )  # fmt: skip


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_learned(train: bool) -> None:
    """A bias of each head and distance, which is filled. Under no_grad no gradient flows into it."""

    def learned(net: Any, q: Any, k: Any, v: Any) -> Any:
        return spelled(lambda: net.table.masked_fill(later(), -INF))(q, k, v)

    module = Module(learned, {"table": nn.Parameter(torch.randn(H, N, N))})
    with flex_everywhere("flex"):
        check(module, qkv(N, N, heads=H), kernel=CAUSAL, slack=4.0, train=train)


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_learned_where_a_row_is_empty(train: bool) -> None:
    """In a row that sees no key a gradient flows into the bias; in inference none does."""

    def learned(net: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
        fill = torch.zeros(B, 1, 1, N).masked_fill((mask == 0)[:, None, None, :], -1e9)
        return torch.softmax(q @ k.mT * 0.25 + fill + net.table, -1) @ v

    module = Module(learned, {"table": nn.Parameter(torch.randn(H, 1, N))})
    mask = padding()
    mask[1] = 0
    with flex_everywhere("flex"):
        seen = check(module, (*qkv(N, N, heads=H), mask), fused=None, slack=8.0, train=train)
    assert ("block mask" in seen.sites[0].kernel) is not train


def padding(right: bool = True) -> torch.Tensor:
    mask = torch.ones(B, N, dtype=torch.long)
    mask[0, -30:] = 0
    return mask if right else mask.flip(-1)


def padded(mask: torch.Tensor) -> torch.Tensor:
    return alibi().masked_fill(later() | (mask == 0)[:, None, None, :], LOWEST)


@pytest.mark.parametrize("right", [True, False], ids=["right", "left"])
@TRAIN
def test_padding(right: bool, train: bool) -> None:
    """Fully masked rows, on the left, are the mean of the values; a gradient flows into q and k."""
    with flex_everywhere("flex"):
        seen = check(
            spelled(padded), (*qkv(N, N, heads=H, grad=train), padding(right)), train=train, slack=4.0
        )
    assert seen.sites[0].kernel == PADDED


def test_padding_in_a_call() -> None:
    inputs = (*qkv(N, N, heads=H), padding(right=False))
    with flex_everywhere("flex"):
        # SDPA's own kernel gets the gradient of fully masked rows wrong.
        check(called(padded), inputs, kernel=PADDED, slack=4.0, reference=spelled(padded))


# -- what is left whole ---------------------------------------------------------------------------


def overwritten() -> torch.Tensor:
    bias = alibi()
    mixed = bias.masked_fill(later(), -INF)
    bias.zero_()
    return mixed


def other_hidden() -> torch.Tensor:
    hidden = later()
    mixed = alibi().masked_fill(hidden, -INF)
    hidden.fill_(False)
    return mixed


#: Tensors of the same look, and further inputs.
WHOLE = {
    "bias of data": (lambda bias: bias.masked_fill(later(), -INF), lambda: rand(H, N, N, grad=False)),
    "hidden by data": (
        lambda hidden: alibi().masked_fill(hidden, -INF),
        lambda: (torch.rand(N, N) < 0.5).tril(-1),
    ),
    "soft fill": (lambda: alibi().masked_fill(later(), -50.0), None),
    "raised": (lambda: -alibi().masked_fill(later(), -INF).clamp(min=-1e4), None),
    "rounded": (lambda: alibi().masked_fill(later(), -1e9).bfloat16().float(), None),
    "transposed": (lambda: alibi().masked_fill(later(), -1e9).mT, None),
    "bias overwritten": (overwritten, None),
    "condition overwritten": (other_hidden, None),
    "filled in place": (lambda: alibi().masked_fill_(later(), -INF), None),
}


@pytest.mark.parametrize("form", [spelled, called], ids=["spelled", "called"])
@cases(WHOLE)
def test_left_whole(case: Any, form: Any) -> None:
    mixed, more = case
    inputs = (*qkv(N, N, heads=H), *([] if more is None else [more()]))
    with flex_everywhere("flex"):
        seen = check(form(mixed), inputs, fused=None, slack=8.0)
    assert all("block mask" not in site.kernel for site in seen.ours.fused)


def test_two_additions_to_fully_masked_rows() -> None:
    """Two numbers are added to some keys, and one to others: such a row is not the mean of all values."""

    def mixed(mask: torch.Tensor) -> torch.Tensor:
        pad = torch.zeros(B, 1, 1, N).masked_fill((mask == 0)[:, None, None, :], -1e9)
        return alibi() + numbers(-1e9) + pad

    with flex_everywhere("flex"):
        seen = check(spelled(mixed), (*qkv(N, N, heads=H), padding(right=False)), train=False, slack=8.0)
    assert "block mask" not in seen.sites[0].kernel


def test_no_gradient_into_the_bias() -> None:
    """It is learned, and filled where no gradient is recorded."""

    def frozen(net: Any, q: Any, k: Any, v: Any) -> Any:
        with torch.no_grad():
            mixed = net.table.masked_fill(later(), -INF)
        return spelled(lambda: mixed)(q, k, v) * net.other

    parts = {"table": nn.Parameter(torch.randn(H, N, N)), "other": nn.Parameter(torch.randn(H, 1, 1))}
    module = Module(frozen, parts)
    with flex_everywhere("flex"):
        seen = check(module, qkv(N, N, heads=H), fused=None, slack=4.0)
    assert "block mask" not in seen.sites[0].kernel


@pytest.mark.parametrize("empty_rows", ["stock", "ignore"])
def test_empty_rows(empty_rows: str) -> None:
    """Where no row is fully masked, each setting fuses; else `stock` leaves the site alone."""
    inputs = (*qkv(N, N, heads=H), padding())
    with flex_everywhere("flex"), config.patch(empty_rows=empty_rows):
        seen = check(spelled(padded), inputs, fused=None, slack=4.0)
    assert bool(seen.ours.fused) == (empty_rows == "ignore")


@pytest.mark.parametrize("kernel", ["auto", "sdpa"])
def test_other_kernels_take_the_whole(kernel: str) -> None:
    with flex_everywhere(kernel) if kernel == "sdpa" else contextlib.nullcontext():
        check(spelled(MIXED["masked_fill"]), qkv(N, N, heads=H), kernel="sdpa, mask: bias", slack=4.0)
