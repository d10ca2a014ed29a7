"""Scores that are written in part, and scores of which the shape is read for a mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.attention.support import BATCH, DIM, HEADS, Q_LEN, cases, check, qkv, rand, scored, unfused

B, H, N, D = BATCH, HEADS, Q_LEN, DIM


def scores(q: Any, k: Any) -> Any:
    return q @ k.mT * 0.25


def assigned(change: Callable[..., None]) -> Callable[..., Any]:
    """Attention in which `change` writes to the scores."""

    def attention(q: Any, k: Any, v: Any, *given: Any) -> Any:
        s = scores(q, k)
        change(s, *given)
        return s.softmax(-1) @ v

    return attention


def hidden(*shape: int) -> torch.Tensor:
    mask = torch.rand(shape) < 0.4
    mask[..., 0] = False
    return mask


@assigned
def filled(s: Any, mask: Any) -> None:
    s[mask] = -1e9


@assigned
def filled_with_infinity(s: Any, mask: Any) -> None:
    s[mask] = float("-inf")


@assigned
def causal(s: Any) -> None:
    s[torch.ones_like(s, dtype=torch.bool).triu(1)] = float("-inf")


def test_fills() -> None:
    for mask in (hidden(B, H, N, N), hidden(B, 1, N, N).expand(B, H, N, N)):
        check(filled, (*qkv(N, N), mask))
        check(filled_with_infinity, (*qkv(N, N), mask), train=False)
    check(filled, (*qkv(N, N, heads=1), hidden(B, 1, N, N)))
    check(causal, qkv(N, N), kernel="is_causal")


def test_fill_of_some_heads() -> None:
    """A mask of fewer dims hides all queries and keys of a head: they weigh all keys alike."""
    check(filled, (*qkv(N, N), torch.tensor([[True, False, False], [False, True, False]])))


@assigned
def filled_by_data(s: Any, mask: Any) -> None:
    s.data.masked_fill_(mask, float("-inf"))


def filled_by_detach(q: Any, k: Any, v: Any, mask: Any) -> Any:
    s = q @ k.mT
    s.detach().masked_fill_(mask, float("-inf"))
    s.data.masked_fill_(torch.ones(N, N).triu(3) == 1, float("-inf"))
    return (s / 4).softmax(-1) @ v


@pytest.mark.parametrize("fn", [filled_by_data, filled_by_detach])
@pytest.mark.parametrize("train", [False, True])
def test_fills_that_autograd_does_not_see(fn: Any, train: bool) -> None:
    """The gradient of a masked score is 0 either way, because its weight is."""
    check(fn, (*qkv(N, N), hidden(B, 1, N, N)), train=train)


def test_fills_whose_gradient_autograd_does_not_drop() -> None:
    """Fully masked rows weigh all keys alike, and their scores get a gradient in eager mode."""

    @assigned
    def finite(s: Any, mask: Any) -> None:
        s.data.masked_fill_(mask, -1e9)

    mask = torch.rand(B, 1, N, N) < 0.4
    mask[..., 2, :] = True
    check(finite, (*qkv(N, N), mask), train=False)
    unfused(finite, (*qkv(N, N), mask), "overwritten")

    def of_a_linear(x: Any, memory: Any, w: Any, bias: Any, mask: Any) -> Any:
        s = (x.tanh() @ w.mT).squeeze(-1)
        s.data.masked_fill_(mask, -1e9)
        return (bias + s).softmax(1)[:, None] @ memory

    inputs = (rand(B, N, 8), rand(B, N, 8), rand(1, 8), rand(B, N), mask[:, 0, 2])
    check(of_a_linear, inputs, train=False)
    unfused(of_a_linear, inputs, "overwritten")


def test_detached_scores_that_are_read() -> None:
    def read_too(q: Any, k: Any, v: Any, mask: Any) -> Any:
        s = scores(q, k)
        apart = s.data
        apart.masked_fill_(mask, float("-inf"))
        return s.softmax(-1) @ v + apart.amax(-1, keepdim=True)

    def returned(q: Any, k: Any, v: Any, mask: Any) -> Any:
        s = scores(q, k)
        apart = s.data.masked_fill_(mask, -1e9)
        return s.softmax(-1) @ v, apart

    for fn in (read_too, returned):
        unfused(fn, (*qkv(N, N), hidden(B, 1, N, N)), "used-elsewhere", train=False)


def last_keys(q: Any, k: Any, v: Any) -> Any:
    s = scores(q, k)
    s[..., N - 2 :] = float("-inf")
    return s.softmax(-1) @ v


@assigned
def last_keys_by_method(s: Any) -> None:
    s[:, :, :, N - 2 :].fill_(-1e9)


@assigned
def two_corners(s: Any) -> None:
    """The second query sees every key but the last ones, rows of the end see none."""
    s[:, :, :1, 1:] = -1e9
    s[..., -2:, :] = -1e9
    s[:, 1:, :, -1:].fill_(torch.tensor(-1e9))


def last_queries_keys_first(q: Any, k: Any, v: Any) -> Any:
    s = k @ q.mT * 0.25
    s[:, :, N - 2 :, 1:3] = -1e9
    return s.softmax(-2).mT @ v


@pytest.mark.parametrize("fn", [last_keys, last_keys_by_method, two_corners, last_queries_keys_first])
def test_boxes_of_one_number(fn: Any) -> None:
    check(fn, qkv(N, N))
    check(fn, qkv(N, N), train=False)


def test_boxes_of_symbolic_sizes() -> None:
    @assigned
    def added_at_the_end(s: Any, bias: Any) -> None:
        s[..., -2:] += bias

    unfused(two_corners, qkv(N, N), "symbolic", dynamic=True, train=False)
    unfused(added_at_the_end, (*qkv(N, N), rand(N, 2)), "symbolic", dynamic=True, train=False)


def test_boxes_of_one_number_that_are_read() -> None:
    def read_too(q: Any, k: Any, v: Any) -> Any:
        s = scores(q, k)
        part = s[..., N - 2 :]
        part.fill_(-1e9)
        return s.softmax(-1) @ v + part.sum()

    def by_steps(q: Any, k: Any, v: Any) -> Any:
        s = scores(q, k)
        s[..., ::2].fill_(-1e9)
        return s.softmax(-1) @ v

    @assigned
    def diagonal(s: Any) -> None:
        s.diagonal(dim1=-2, dim2=-1).fill_(-1e9)

    @assigned
    def not_low(s: Any) -> None:
        s[..., N - 2 :] = 1.0

    unfused(read_too, qkv(N, N), "used-elsewhere")
    unfused(by_steps, qkv(N, N), "overwritten")
    unfused(diagonal, qkv(N, N), "overwritten")
    unfused(not_low, qkv(N, N), "mask")


@assigned
def added(s: Any, bias: Any) -> None:
    s[..., 1:, 1:] += bias


@assigned
def added_to_keys(s: Any, bias: Any) -> None:
    s[:, :, :, :-1] += bias


@assigned
def added_in_place(s: Any, bias: Any) -> None:
    s[..., 1:, 1:].add_(bias)


@assigned
def added_to_a_head(s: Any, bias: Any) -> None:
    s[:, :1] = s[:, :1] + bias


@assigned
def added_twice(s: Any, bias: Any) -> None:
    s[..., 1:, 1:] += bias
    s[..., :, 2:] = s[..., :, 2:] - bias[..., :1, :1]


@assigned
def positions(s: Any, high: Any, wide: Any) -> None:
    """As in video encoders: all but the first token are on a grid."""
    grid = s[:, :, 1:, 1:].view(B, -1, 2, 3, 2, 3)
    s[:, :, 1:, 1:] = (grid + high[..., None] + wide[..., None, :]).view(B, -1, 6, 6)


ADDED = {
    "a corner": (added, lambda: rand(B, H, N - 1, N - 1)),
    "a corner, broadcast": (added, lambda: rand(H, 1, N - 1)),
    "a corner, a number for each head": (added, lambda: rand(H, 1, 1)),
    "all but the last key": (added_to_keys, lambda: rand(H, N, N - 1)),
    "add_": (added_in_place, lambda: rand(H, N - 1, N - 1)),
    "a head": (added_to_a_head, lambda: rand(N, N)),
    "twice": (added_twice, lambda: rand(H, N - 1, N - 1)),
}


@cases(ADDED)
def test_sums(case: Any) -> None:
    fn, bias = case
    check(fn, (*qkv(N, N), bias()))
    check(fn, (*qkv(N, N), bias()), train=False)


def test_positions_on_a_grid() -> None:
    check(positions, (*qkv(N, N), rand(B, H, 2, 3, 2), rand(B, H, 2, 3, 3)))


def test_what_else_is_written() -> None:
    @assigned
    def by_steps(s: Any, bias: Any) -> None:
        s[..., ::2] += bias

    @assigned
    def elsewhere(s: Any, bias: Any) -> None:
        s[..., 1:, 1:] = s[..., :-1, :-1] + bias

    @assigned
    def scaled(s: Any, bias: Any) -> None:
        s[..., 1:, 1:] *= 2.0

    @assigned
    def activated(s: Any, bias: Any) -> None:
        s[..., 1:, 1:] = torch.tanh(s[..., 1:, 1:])

    @assigned
    def shifted(s: Any, bias: Any) -> None:
        s[..., 1:, 1:] += 2.0

    @assigned
    def transposed(s: Any, bias: Any) -> None:
        s[..., 1:, 1:] = s[..., 1:, 1:].mT + bias

    @assigned
    def other_heads(s: Any, bias: Any) -> None:
        s[..., 1:, 1:] = s[..., 1:, 1:].transpose(0, 1) + bias

    @assigned
    def not_low(s: Any, bias: Any) -> None:
        s[bias > 0] = 1.0

    def afterwards(q: Any, k: Any, v: Any, bias: Any) -> Any:
        s = scores(q, k)
        w = s.softmax(-1)
        s[bias > 0] = -1e9
        return w @ v, s

    unfused(by_steps, (*qkv(N, N), rand(H, N, (N + 1) // 2)), "overwritten")
    unfused(elsewhere, (*qkv(N, N), rand(N - 1, N - 1)), "in-between")
    unfused(scaled, (*qkv(N, N), rand(N - 1, N - 1)), "a part of the scores is scaled")
    unfused(activated, (*qkv(N, N), rand(N - 1, N - 1)), "overwritten")
    unfused(shifted, (*qkv(N, N), rand(N - 1, N - 1)), "mask")
    unfused(transposed, (*qkv(N, N), rand(N - 1, N - 1)), "a part of the scores is permuted")
    unfused(other_heads, (*qkv(N, N, batch=H), rand(N - 1, N - 1)), "a part of the scores is permuted")
    unfused(not_low, (*qkv(N, N), rand(B, H, N, N)), "mask")
    unfused(afterwards, (*qkv(N, N), rand(B, H, N, N)), "used-elsewhere")


def test_two_softmaxes_behind_a_write() -> None:
    """The first that is fused leaves the write to the other."""

    def filled_for_both(q: Any, k: Any, v: Any, w: Any, mask: Any) -> Any:
        s = scores(q, k)
        s[mask] = -1e9
        return s.softmax(-1) @ v, s.mT.softmax(-1) @ w

    def added_for_both(q: Any, k: Any, v: Any, w: Any, bias: Any) -> Any:
        s = scores(q, k)
        s[..., 1:, 1:].add_(bias)
        return s.softmax(-1) @ v, w.mT @ s.softmax(-2)

    for fn, last in ((filled_for_both, hidden(B, H, N, N)), (added_for_both, rand(H, N - 1, N - 1))):
        inputs = (*qkv(N, N), rand(B, H, N, D), last)
        seen = check(fn, inputs, fused=2)
        assert not seen.ours.calls("setitem") and not seen.ours.calls("add_")


SHAPES = {
    "new_ones": lambda s, n: s.new_ones((n, n)).tril() == 0,
    "new_ones of a dtype": lambda s, n: ~s.new_ones(n, n, dtype=torch.float32).tril().to(torch.bool),
    "ones_like": lambda s, n: torch.ones_like(s, dtype=torch.bool).triu(1),
    "size": lambda s, n: torch.ones(s.size(-2), s.shape[-1], dtype=torch.bool, device=s.device).triu(1),
}


@cases(SHAPES)
def test_shape_of_the_scores(case: Any) -> None:
    fn = scored(lambda s: s.masked_fill(case(s, N), torch.finfo(s.dtype).min))
    check(fn, qkv(N, N), kernel="is_causal")


def test_nothing_is_left_of_scores_whose_shape_is_read() -> None:
    fn = scored(lambda s: s.masked_fill(s.new_ones((N, N)).tril() == 0, float("-inf")))
    graphs: list[torch.fx.Graph] = []
    with torch._inductor.config.patch(post_grad_custom_post_pass=graphs.append, force_disable_caches=True):
        check(fn, qkv(N, N), backend="inductor")
    ours = [{str(node.target) for node in graph.nodes} for graph in graphs]
    assert any("aten.bmm.default" in names for names in ours)  # of stock
    flash = [names for names in ours if any("scaled_dot_product" in name for name in names)]
    assert flash and not any("aten.bmm.default" in names for names in flash)
