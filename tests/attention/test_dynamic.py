"""Symbolic sizes: the same verdicts, one graph for all sizes, and no guards of ours."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from inductor_fusions import config, testing
from tests.attention.support import (
    BATCH,
    HEADS,
    KV_LEN,
    Q_LEN,
    TRAIN,
    additive,
    capture,
    cases,
    check,
    counted,
    flex_everywhere,
    qkv,
    rand,
    scored,
    visible,
)

attend = scored(lambda s: s * 0.3)


def repeat(t, times):
    b, h, s, d = t.shape
    return t[:, :, None].expand(b, h, times, s, d).reshape(b, h * times, s, d)


def merged(t):
    return t.reshape(-1, t.shape[-2], t.shape[-1])


FORMS = {
    "scale by the dim": (lambda q, k, v: torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v, lambda: qkv()),
    "padding made in the graph": (
        lambda q, k, v, n: (
            torch.softmax(
                torch.where(
                    torch.arange(k.shape[-2]) < n[:, None, None, None], q @ k.mT * 0.3, -float("inf")
                ),
                -1,
            )
            @ v
        ),
        lambda: (*qkv(), torch.tensor([5, 13])),
    ),
    "grouped heads": (
        lambda q, k, v: attend(q, repeat(k, 3), repeat(v, 3)),
        lambda: qkv(heads=6, kv_heads=2),
    ),
    "viewed scores": (
        lambda q, k, v, m: (
            torch.softmax(
                (torch.bmm(merged(q), merged(k).mT).view(*q.shape[:-1], k.shape[-2]) + m).view(
                    -1, q.shape[-2], k.shape[-2]
                ),
                -1,
            )
            @ merged(v)
        ).view(q.shape[0], q.shape[1], q.shape[2], -1),
        lambda: (*qkv(), additive(visible(BATCH, 1, Q_LEN, KV_LEN))),
    ),
    "number behind a bias": (
        lambda q, k, v, m: torch.softmax((q @ k.mT + m) / math.sqrt(q.shape[-1] // 2), -1) @ v,
        lambda: (*qkv(), rand(HEADS, Q_LEN, KV_LEN)),
    ),
    "square of tokens": (
        lambda x, w: attend(
            *(nn.functional.linear(x, each).unflatten(-1, (4, -1)).transpose(-2, -3) for each in w)
        ),
        lambda: (rand(1, Q_LEN, Q_LEN, 16), rand(3, 32, 16)),
    ),
    "layer": (
        lambda x: attend(*x.view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)).transpose(1, 2).flatten(2),
        lambda: (rand(BATCH, Q_LEN, 96),),
    ),
}


@TRAIN
@cases(FORMS)
def test_form(case, train: bool) -> None:
    fn, inputs = case
    check(fn, inputs(), dynamic=True, train=train)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_multihead_attention(dropout: float) -> None:
    """Its probability of dropout is a symbol at first, and Dynamo starts again where a function needs it."""
    layer = nn.MultiheadAttention(16, 2, batch_first=True, dropout=dropout)
    compiled = torch.compile(lambda x: layer(x, x, x)[0], backend=testing.AfterPasses([]), dynamic=True)
    with config.patch(policy="always", strict=True), testing.reporting.isolated() as sites:
        compiled(torch.randn(2, 5, 16)).sum().backward()
    assert sites[-1].verdict == "fused", sites


class Scaled(nn.Module):
    """A scale that is an attribute: a symbolic float where sizes are dynamic."""

    def __init__(self) -> None:
        super().__init__()
        self.scaling, self.heads = 0.3, HEADS

    def forward(self, q, k, v):
        return torch.softmax(q @ k.mT * self.scaling, -1) @ v


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_scale_attribute(dynamic: bool | None) -> None:
    check(Scaled(), qkv(), dynamic=dynamic)


def test_scale_argument() -> None:
    """A number that changes between calls."""
    fn = lambda q, k, v, scale: torch.softmax(q @ k.mT * scale, -1) @ v  # noqa: E731
    check(fn, (*qkv(), 0.3), dynamic=True, fused=None)
    q, k, v = qkv(grad=False)
    compiled = torch.compile(fn, backend=testing.AfterPasses([]))
    with config.patch(policy="always"):
        for scale in (0.3, 0.5, 0.7):
            torch.testing.assert_close(compiled(q, k, v, scale), fn(q, k, v, scale))


SEVERAL = {
    "causal": lambda q, k, v: (
        torch.softmax(
            (q @ k.mT * 0.3).masked_fill(
                torch.arange(k.shape[-2]) > torch.arange(q.shape[-2])[:, None], torch.finfo(q.dtype).min
            ),
            -1,
        )
        @ v
    ),
    "plain": attend,
    "grouped": lambda q, k, v: attend(q.repeat_interleave(2, 1), repeat(k, 2), repeat(v, 2)),
}


@cases(SEVERAL)
def test_one_graph_for_all_sizes(case) -> None:
    """Nothing that was proved for the first sizes is taken to hold for others, and no size is guarded on."""
    sizes = [(2, 9, 9), (3, 5, 11), (5, 11, 5), (4, 7, 7)]
    counts = []
    for enabled in (False, True):
        compiled, counter = counted(case)
        with config.patch(policy="always", enabled=enabled):
            for batch, q_len, kv_len in sizes:
                q, k, v = qkv(q_len, kv_len, batch=batch, grad=False)
                torch.testing.assert_close(compiled(q, k, v), case(q, k, v))
        counts.append(counter.frame_count)
    assert counts[0] == counts[1]


def test_length_of_one() -> None:
    """Sizes of 1 are never symbols."""
    fn = SEVERAL["causal"]
    check(fn, qkv(1, 1), dynamic=True, train=False, fused=None)
    check(fn, qkv(1, 9), dynamic=True, train=False, fused=None)


def test_no_warnings(recwarn: pytest.WarningsRecorder) -> None:
    """Symbolic sizes in the graph are nodes: torch.fx warns of raw ones."""
    for name in ("grouped heads", "viewed scores", "padding made in the graph", "layer"):
        fn, inputs = FORMS[name]
        capture(fn, *inputs(), train=True, dynamic=True)
    assert not [w for w in recwarn if "Raw Sym" in str(w.message)]


def test_bias_cut_to_the_length() -> None:
    """As MPT: the last columns of a table that may be shorter than the keys."""

    def fn(q, k, v, table):
        length = q.shape[1]
        q, k, v = (x.view(*x.shape[:2], HEADS, 16).transpose(1, 2) for x in (q, k, v))
        bias = table[:, :, max(0, table.shape[2] - length) :]
        return torch.softmax(q @ k.mT * 0.3 + bias, -1) @ v

    inputs = (*(rand(BATCH, 24, HEADS * 16) for _ in range(3)), rand(HEADS, 1, 64, grad=False))
    check(fn, inputs, dynamic=True, train=False)


def test_blocks_of_inputs_with_symbols_of_their_own() -> None:
    """The numbers of blocks are quotients: the product makes a guard of their equality."""

    def fn(q, k, v):
        q, k, v = (x.unflatten(1, (-1, 5)) for x in (q, k, v))
        return torch.softmax(q @ k.mT * 0.3, -1) @ v

    with torch.fx.experimental._config.patch(use_duck_shape=False):
        check(fn, [rand(3, 20, 16) for _ in range(3)], dynamic=True)


def two_windows(q, k, v, first, second):
    rows, keys = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    seen = (rows - keys < first) & (rows - keys < second) & (keys - rows < first) & (keys - rows < second)
    return torch.softmax((q @ k.mT).masked_fill(~seen, -1e9), -1) @ v


def either_window(q, k, v, first, second):
    rows, keys = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    seen = (rows - keys < first) | (rows - keys < second)
    return torch.softmax((q @ k.mT).masked_fill(~seen, -1e9), -1) @ v


def rows_from(q, k, v, first, second):
    seen = torch.ones(40, 40, dtype=torch.bool).tril()[first - 4 : first - 4 + q.shape[2], : k.shape[2]]
    return torch.softmax((q @ k.mT).masked_fill(~seen, -1e9), -1) @ v


@pytest.mark.parametrize("fn", [two_windows, either_window, rows_from])
def test_numbers_that_are_equal_when_it_is_compiled(fn) -> None:
    """What is equal in one call is proved to be equal only where it always is."""
    graphs = CompileCounterWithBackend("eager")

    def after_passes(graph, inputs):
        testing.AfterPasses([])._transform(graph)
        return graphs(graph, inputs)

    inputs = qkv(12, 12, grad=False)
    for tensor in inputs:
        for dim in (0, 1, 3):
            torch._dynamo.mark_static(tensor, dim)
    with flex_everywhere(), config.patch(policy="always"), torch.no_grad():
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend=after_passes, dynamic=True)
        for numbers in [(4, 4), (4, 9), (9, 4)]:
            torch.testing.assert_close(compiled(*inputs, *numbers), fn(*inputs, *numbers))
    assert graphs.frame_count == 1
