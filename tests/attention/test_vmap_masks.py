"""Masks that torch.vmap builds from a function of (sample, head, query, key), as transformers 4.57 does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.attention.support import capture, cases, check, qkv, same_as_eager, sdpa

BATCH, HEADS, LENGTH = 2, 3, 9


def built(function: Callable[..., Any], batch: Any, heads: Any, rows: Any, columns: Any) -> Any:
    """`function` of each sample, head, query and key."""
    for place in (3, 2, 1, 0):
        dims = [None, None, None, None]
        dims[place] = 0
        function = torch.vmap(function, in_dims=tuple(dims))
    return function(torch.arange(batch), torch.arange(heads), rows, columns)


def attention(function: Callable[..., Any], heads: Any = 1, rows: Any = 0, columns: Any = 0) -> Any:
    """A call of SDPA with the mask of a function of (sample, head, query, key) and of further tensors."""

    def call(q: Any, k: Any, v: Any, *more: Any) -> Any:
        row_places, column_places = torch.arange(q.shape[2]), torch.arange(k.shape[2])
        row_places += 0  # as transformers adds the length of a cache that is not there
        if rows or columns:
            row_places, column_places = row_places + rows, column_places + columns
        mask = built(lambda *index: function(*index, *more), q.shape[0], heads, row_places, column_places)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return call


def packed(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Documents of a batch whose positions are 0, 1, 2, ...: one document."""
    place = torch.arange(LENGTH)[None].expand(BATCH, -1)
    documents = (torch.diff(place, prepend=place[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    return torch.ops.aten.index(documents, [b, q]) == torch.ops.aten.index(documents, [b, k])


CAUSAL = {
    "k <= q": lambda b, h, q, k: k <= q,
    "and everything": lambda b, h, q, k: q.new_ones((), dtype=torch.bool) & (k <= q),
    "not k > q": lambda b, h, q, k: ~(k > q),
    "samples are not negative": lambda b, h, q, k: (k <= q) & (b >= 0) & (h > -1),
    "one document": lambda b, h, q, k: (k <= q) & packed(b, h, q, k),
}


@cases(CAUSAL)
@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_causal(case: Any, dynamic: bool | None) -> None:
    if dynamic and case is CAUSAL["one document"]:
        pytest.skip("its length is a number")
    inputs = qkv(LENGTH, LENGTH, batch=BATCH, heads=HEADS)
    check(attention(case), inputs, fused=1, kernel="is_causal", dynamic=dynamic)


NOT_CAUSAL = {
    "k < q + 2": (lambda b, h, q, k: k < q + 2, {}),
    "q <= k": (lambda b, h, q, k: q <= k, {}),
    "the sample": (lambda b, h, q, k: k <= q + b, {}),
    "the head": (lambda b, h, q, k: k <= q + h, {"heads": HEADS}),
    "the sample is the first": (lambda b, h, q, k: (k <= q) | (b == 1), {}),
    "the sample is not the last": (lambda b, h, q, k: (k <= q) & (b <= 0) | (k == 0), {}),
    "later rows": (lambda b, h, q, k: k <= q, {"rows": 1}),
    "later columns": (lambda b, h, q, k: k <= q + 1, {"columns": 2}),
}


@cases(NOT_CAUSAL)
def test_not_causal(case: Any) -> None:
    function, options = case
    inputs = qkv(LENGTH, LENGTH, batch=BATCH, heads=HEADS)
    with torch.no_grad():
        run = capture(attention(function, **options), *inputs)
    assert not sdpa(run).kwargs.get("is_causal")
    check(attention(function, **options), inputs, fused=None)


def test_all_visible() -> None:
    function = attention(lambda b, h, q, k: q + k + b + h >= 0)
    inputs = qkv(batch=BATCH, heads=HEADS)
    check(function, inputs, fused=1)
    with torch.no_grad():
        run = capture(function, *inputs)
    assert sdpa(run).kwargs.get("attn_mask") is None and not sdpa(run).kwargs.get("is_causal")


def test_padding() -> None:
    """An element of a tensor of the user, at indices of vmap: the mask stays, and is the same."""

    def padded(b: Any, h: Any, q: Any, k: Any, seen: Any) -> Any:
        return (k <= q) & torch.ops.aten.index(seen, [b, k])

    seen = torch.rand(BATCH, LENGTH) < 0.6
    seen[:, 0] = True
    check(attention(padded), (*qkv(LENGTH, LENGTH, batch=BATCH, heads=HEADS), seen), fused=None)
    all_seen = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    check(attention(padded), (*qkv(LENGTH, LENGTH, batch=BATCH, heads=HEADS), all_seen), fused=None)


def test_dims_that_vmap_takes_and_puts_elsewhere() -> None:
    """The mask of (key, query), made with other in_dims and out_dims."""

    def turned(q: Any, k: Any, v: Any, into: int, out: int) -> Any:
        length = q.shape[2]
        rows = torch.arange(length)[:, None].expand(length, 4)  # (length, 4), or turned
        rows = rows if into == 0 else rows.T
        compare = torch.vmap(lambda row: torch.arange(length) <= row[0], in_dims=into, out_dims=out)
        mask = compare(rows)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    for into in (0, 1):
        for out in (0, 1, -1, -2):

            def call(q: Any, k: Any, v: Any, into: int = into, out: int = out) -> Any:
                return turned(q, k, v, into, out)

            with torch.no_grad():
                run = same_as_eager(call, qkv(LENGTH, LENGTH))
            assert bool(sdpa(run).kwargs.get("is_causal")) is (out in (0, -2))


def test_two_vmaps_one_after_the_other() -> None:
    """Both call their level 1: what is known of a sample of one is not known of the other."""

    def call(q: Any, k: Any, v: Any) -> Any:
        place = torch.arange(q.shape[2])
        first = torch.vmap(lambda row: place <= row)(place)
        second = torch.vmap(lambda column: place >= column + 1, out_dims=1)(place)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=first ^ second)

    inputs = qkv(LENGTH, LENGTH)
    with torch.no_grad():
        run = capture(call, *inputs)
        assert not sdpa(run).kwargs.get("is_causal")
    check(call, inputs, fused=None)


def test_attention_inside_vmap() -> None:
    """Its mask depends on the sample of vmap, which no kernel can be told."""

    def call(q: Any, k: Any, v: Any) -> Any:
        place = torch.arange(q.shape[-2])

        def one(sample: Any, q: Any, k: Any, v: Any) -> Any:
            mask = place <= place[:, None] + sample
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

        return torch.vmap(one)(torch.arange(q.shape[0]), q, k, v)

    check(call, qkv(LENGTH, LENGTH), fused=0)


def test_nothing_is_added_in_place() -> None:
    """`x += 0` is no overwriting of integers; `x += 1` is."""

    def shifted(by: int) -> Any:
        def call(q: Any, k: Any, v: Any) -> Any:
            place = torch.arange(q.shape[2])
            before = place[:, None]
            place += by
            return F.scaled_dot_product_attention(q, k, v, attn_mask=place <= before)

        return call

    check(shifted(0), qkv(LENGTH, LENGTH), fused=1, kernel="is_causal")
    check(shifted(1), qkv(LENGTH, LENGTH), fused=None)
