"""Masks that are proved causal or all visible, and masks that nearly are."""

from __future__ import annotations

import pytest
import torch

from tests.attention.support import BATCH, HEADS, LOWEST, capture, cases, check, qkv, sdpa
from tests.support.modules import Module

S = 9


def lowest() -> float:
    """A constant; a float in a global variable is a symbol to Dynamo where sizes are dynamic."""
    return torch.finfo(torch.float32).min


def infinity() -> float:
    return float("inf")


DYNAMIC = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])


def place(n):
    return torch.arange(n)


def above_each_other(row, column):
    return column <= row


def packed(seen):
    """Hugging Face's mask of packed sequences, from positions where no mask is given."""
    position = torch.arange(seen).expand(BATCH, -1)
    jump = torch.diff(position, prepend=position[:, :1] - 1, dim=-1) != 1
    document = jump.cumsum(-1)
    row, column = torch.arange(seen)[:, None], torch.arange(seen)[None, :]
    same = document[:, row] == document[:, column]
    return (same & (column <= row))[:, None]


def of_iotas(seen):
    """Hugging Face's mask from index functions, expanded to the batch."""
    b, h = torch.arange(BATCH)[:, None, None, None], torch.arange(1)[None, :, None, None]
    q, k = torch.arange(seen)[None, None, :, None], torch.arange(seen)[None, None, None, :]
    return ((b * 0 + h * 0 == 0) & (k <= q)).expand(BATCH, 1, seen, seen)


#: Functions of the length that give the boolean mask, True where a key is seen.
CAUSAL = {
    "tril": lambda n: torch.tril(torch.ones(n, n, dtype=torch.bool)),
    "tril, method": lambda n: torch.ones(n, n, dtype=torch.bool).tril(),
    "tril, diagonal": lambda n: torch.ones(n, n, dtype=torch.bool).tril(diagonal=0),
    "tril of numbers": lambda n: torch.tril(torch.ones(n, n)) == 1,
    "tril, bool": lambda n: torch.tril(torch.ones(n, n)).bool(),
    "tril, to": lambda n: torch.tril(torch.ones((n, n))).to(torch.bool),
    "tril, not 0": lambda n: torch.ones(n, n).tril() != 0,
    "tril, greater": lambda n: torch.ones(n, n).tril() > 0.5,
    "tril of a view": lambda n: torch.tril(torch.ones(n, n, dtype=torch.bool)).view(1, 1, n, n),
    "tril of integers": lambda n: torch.tril(torch.ones(n, n, dtype=torch.uint8)).bool(),
    "not triu": lambda n: ~torch.triu(torch.ones(n, n, dtype=torch.bool), 1),
    "not triu, numbers": lambda n: torch.logical_not(torch.triu(torch.ones(n, n), diagonal=1)),
    "triu is 0": lambda n: torch.triu(torch.ones(n, n), diagonal=1) == 0,
    "triu transposed": lambda n: torch.ones(n, n, dtype=torch.bool).triu().mT,
    "le": lambda n: place(n)[None, :] <= place(n)[:, None],
    "ge": lambda n: place(n)[:, None] >= place(n)[None, :],
    "ge, broadcast": lambda n: place(n).view(-1, 1) >= place(n),
    "unsqueeze": lambda n: place(n).unsqueeze(0) <= place(n).unsqueeze(-1),
    "lt of one more": lambda n: place(n)[None, :] < place(n)[:, None] + 1,
    "not gt": lambda n: ~(place(n)[None, :] > place(n)[:, None]),
    "difference": lambda n: place(n)[:, None] - place(n)[None, :] >= 0,
    "difference, greater": lambda n: (place(n)[:, None] - place(n)) > -1,
    "doubled": lambda n: 2 * place(n)[None, :] <= 2 * place(n)[:, None] + 1,
    "floats": lambda n: torch.arange(n, dtype=torch.float32) <= torch.arange(n, dtype=torch.float32)[:, None],
    "arange with start": lambda n: torch.arange(5, n + 5) <= torch.arange(5, n + 5)[:, None],
    "arange with step": lambda n: torch.arange(0, 3 * n, 3) <= torch.arange(0, 3 * n, 3)[:, None],
    "cumsum": lambda n: torch.ones(n).cumsum(0) <= torch.ones(n).cumsum(0)[:, None],
    "cumsum minus 1": lambda n: place(n) <= (torch.ones(n, dtype=torch.long).cumsum(-1) - 1)[:, None],
    "and with true": lambda n: torch.ones(n, n, dtype=torch.bool) & (place(n) <= place(n)[:, None]),
    "and twice": lambda n: (place(n) <= place(n)[:, None]) & torch.ones(n, n, dtype=torch.bool).tril(),
    "and with a wider one": lambda n: (place(n) <= place(n)[:, None]) & (place(n) <= place(n)[:, None] + 3),
    "and in range": lambda n: (place(n)[:, None] >= 0) & (place(n) <= place(n)[:, None]) & (place(n) < n),
    "or with false": lambda n: torch.zeros(n, n, dtype=torch.bool) | (place(n) <= place(n)[:, None]),
    "product": lambda n: torch.ones(n, n, dtype=torch.bool).tril() * torch.ones(n, dtype=torch.bool),
    "where": lambda n: torch.where(place(n) > place(n)[:, None], False, True),
    "full": lambda n: torch.full((n, n), True).tril(),
    "new_ones": lambda n: torch.empty(1).new_ones((n, n), dtype=torch.bool).tril(),
    "sliced": lambda n: torch.ones(64, 64, dtype=torch.bool).tril()[:n, :n],
    "sliced, 4-d": lambda n: torch.ones(64, 64, dtype=torch.bool).tril()[None, None][:, :, :n, :n],
    "sliced from behind": lambda n: torch.ones(64, 64, dtype=torch.bool).tril()[-n:, -n:],
    "expanded": lambda n: torch.ones(n, n, dtype=torch.bool).tril()[None, None].expand(BATCH, HEADS, n, n),
    "window as wide as the sequence": lambda n: (
        (place(n) <= place(n)[:, None]) & (place(n) > place(n)[:, None] - n)
    ),
    "xor with true": lambda n: torch.ones(n, n, dtype=torch.bool).triu(1) ^ True,
    "xor of numbers": lambda n: torch.logical_xor(torch.ones(n, n).triu(1), torch.ones(n, n)),
    "one and another": lambda n: torch.ones(n, n).tril().logical_and(torch.ones(n)),
    "grid": lambda n: above_each_other(*torch.meshgrid(place(n), place(n), indexing="ij")),
    "grid, xy": lambda n: above_each_other(*reversed(torch.meshgrid(place(n), place(n), indexing="xy"))),
    "grid of a list": lambda n: above_each_other(*torch.meshgrid([place(n), place(n)], indexing="ij")),
    "packed": packed,
    "iotas": of_iotas,
    "contiguous": lambda n: torch.ones(n, n, dtype=torch.bool).tril().contiguous().clone(),
}

#: What is done with a mask; "call" gives it to SDPA.
USES = {
    "fill": lambda s, m: s.masked_fill(~m, lowest()),
    "where": lambda s, m: torch.where(m, s, -infinity()),
    "added": lambda s, m: s + torch.zeros_like(m, dtype=s.dtype).masked_fill(~m, lowest()),
    "call": None,
}


def with_mask(mask, use):
    def fn(q, k, v):
        seen = mask(q.shape[-2])
        if use is None:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.3)
        return torch.softmax(use(q @ k.transpose(-1, -2) * 0.3, seen), dim=-1) @ v

    return fn


@DYNAMIC
@cases(CAUSAL)
def test_causal(case, dynamic: bool) -> None:
    q, k, v = qkv(S, S)
    for t in (q, k, v) if dynamic else ():
        torch._dynamo.mark_dynamic(t, 2)
    use = list(USES.values())[list(CAUSAL.values()).index(case) % len(USES)]
    seen = check(with_mask(case, use), (q, k, v), kernel="is_causal", dynamic=dynamic)
    call = sdpa(seen.ours)
    assert call.kwargs["is_causal"] is True
    assert call.kwargs.get("attn_mask") is None


BIASES = {
    "triu of full": lambda n: torch.triu(torch.full((n, n), -infinity()), diagonal=1),
    "triu of full, lowest": lambda n: torch.full((n, n), lowest()).triu(1),
    "where": lambda n: torch.where(place(n) <= place(n)[:, None], 0.0, lowest()),
    "where, tensors": lambda n: torch.where(
        torch.ones(n, n, dtype=torch.bool).tril(), torch.tensor(0.0), torch.tensor(-infinity())
    ),
    "masked_fill": lambda n: torch.zeros(n, n).masked_fill(place(n) > place(n)[:, None], -infinity()),
    "full and masked_fill": lambda n: torch.full((n, n), lowest()).masked_fill(
        place(n) < (place(n) + 1).view(n, 1), 0
    ),
    "product": lambda n: (1.0 - torch.ones(n, n).tril()) * lowest(),
    "product, 1e4": lambda n: (1.0 - torch.ones(n, n).tril()) * -10000.0,
    "product, 1e9": lambda n: torch.ones(n, n).triu(1) * -1e9,
    "product of the lowest": lambda n: torch.full((n, n), lowest()) * (place(n) > place(n)[:, None]),
    "expanded": lambda n: torch.full((n, n), lowest()).triu(1)[None, None].expand(BATCH, 1, n, n),
    "inverted": lambda n: (1.0 - torch.ones(n, n).tril()).masked_fill(
        (1.0 - torch.ones(n, n).tril()).bool(), lowest()
    ),
}


@DYNAMIC
@cases(BIASES)
def test_causal_bias(case, dynamic: bool) -> None:
    q, k, v = qkv(S, S)
    for t in (q, k, v) if dynamic else ():
        torch._dynamo.mark_dynamic(t, 2)
    use = None if list(BIASES.values()).index(case) % 2 else lambda s, m: s + m
    check(with_mask(case, use), (q, k, v), kernel="is_causal", dynamic=dynamic)


def test_two_masks_that_are_one() -> None:
    """A causal fill, and a causal bias as well."""
    mask = CAUSAL["tril"]
    fn = with_mask(mask, lambda s, m: s.masked_fill(~m, lowest()) + torch.where(m, 0.0, -1e9))
    check(fn, qkv(S, S), kernel="is_causal")


def test_symbolic_fill() -> None:
    """A float in a global variable is a symbol at first; then Dynamo starts again, and so does the report."""

    def fn(q, k, v):
        mask = torch.zeros(S, S).masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), LOWEST)
        return torch.softmax(q @ k.mT * 0.3 + mask, dim=-1) @ v

    check(fn, qkv(S, S), dynamic=True, fused=1, kernel="is_causal")


# -- all visible ----------------------------------------------------------------------------------

VISIBLE = {
    "ones": lambda n: torch.ones(n, n, dtype=torch.bool),
    "ones of numbers": lambda n: torch.ones(BATCH, n)[:, None, None, :] > 0,
    "in range": lambda n: (place(n) >= 0) & (place(n)[:, None] < n),
    "wide window": lambda n: (place(n) - place(n)[:, None]).abs() < 10**6,
    "far below": lambda n: place(n) <= place(n)[:, None] + n,
    "either way": lambda n: (place(n) <= place(n)[:, None]) | (place(n) > place(n)[:, None]),
    "full": lambda n: torch.full((BATCH, 1, 1, n), True),
    "not zeros": lambda n: ~torch.zeros(1, n, dtype=torch.bool),
    "tril with a far diagonal": lambda n: torch.ones(n, n, dtype=torch.bool).tril(n),
    "equal to itself": lambda n: (place(n) - place(n))[None] == 0,
}
NOT_PROVED = [VISIBLE["wide window"]]


@cases(VISIBLE)
def test_all_visible(case) -> None:
    """A mask that is proved to hide nothing is dropped."""
    for use in USES.values():
        proved = case not in NOT_PROVED
        seen = check(with_mask(case, use), qkv(S, S), fused=1 if proved else None)
        assert not proved or seen.sites[0].kernel == "sdpa"


ZERO = {
    "zeros": lambda n: torch.zeros(n, n),
    "zeros, 4-d": lambda n: torch.zeros(BATCH, 1, 1, n),
    "product": lambda n: (1.0 - torch.ones(n, n)) * lowest(),
    "a constant": lambda n: torch.full((n, n), 0.7),
    "where": lambda n: torch.where(torch.ones(n, n, dtype=torch.bool), 0.0, lowest()),
}


@cases(ZERO)
def test_zero_bias(case) -> None:
    assert check(with_mask(case, lambda s, m: s + m), qkv(S, S)).sites[0].kernel == "sdpa"


def test_a_constant_of_infinity() -> None:
    """The same everywhere as well, but it hides every key: not dropped."""
    fn = with_mask(lambda n: torch.full((n, n), -infinity()), lambda s, m: s + m)
    run = capture(fn, *qkv(S, S, grad=False))
    assert all("mask" in site.kernel for site in run.fused)


# -- nearly causal --------------------------------------------------------------------------------

NEARLY = {
    "strict": lambda n: place(n) < place(n)[:, None],
    "one more": lambda n: place(n) <= place(n)[:, None] + 1,
    "diagonal -1": lambda n: torch.ones(n, n, dtype=torch.bool).tril(-1),
    "diagonal 1": lambda n: torch.ones(n, n, dtype=torch.bool).tril(1),
    "triu": lambda n: torch.ones(n, n, dtype=torch.bool).triu(),
    "anticausal": lambda n: place(n) >= place(n)[:, None],
    "not triu with the diagonal": lambda n: ~torch.ones(n, n, dtype=torch.bool).triu(),
    "window": lambda n: (place(n) <= place(n)[:, None]) & (place(n) > place(n)[:, None] - 4),
    "window, one short of all": lambda n: (
        (place(n) <= place(n)[:, None]) & (place(n) > place(n)[:, None] - n + 1)
    ),
    "chunks": lambda n: (place(n) <= place(n)[:, None]) & (place(n) // 3 == place(n)[:, None] // 3),
    "prefix": lambda n: (place(n) <= place(n)[:, None]) | (place(n) < 3),
    "all but one key": lambda n: (place(n) <= place(n)[:, None]) & (place(n) != 2),
    "global token": lambda n: (place(n) <= place(n)[:, None]) | (place(n)[:, None] == 4),
    "dilated": lambda n: place(n) <= 2 * place(n)[:, None],
    "halved": lambda n: 2 * place(n) <= place(n)[:, None],
    "reversed": lambda n: torch.arange(n - 1, -1, -1) <= torch.arange(n - 1, -1, -1)[:, None],
    "flipped": lambda n: torch.ones(n, n, dtype=torch.bool).tril().flip(-1),
    "rolled": lambda n: torch.ones(n, n, dtype=torch.bool).tril().roll(1, -1),
    "transposed": lambda n: torch.ones(n, n, dtype=torch.bool).tril().mT,
    "first row left out": lambda n: torch.ones(64, 64, dtype=torch.bool).tril()[1 : n + 1, :n],
    "first key left out": lambda n: torch.ones(64, 64, dtype=torch.bool).tril()[:n, 1 : n + 1],
    "every second": lambda n: torch.ones(64, 64, dtype=torch.bool).tril()[: 2 * n : 2, :n],
    "xor": lambda n: (place(n) <= place(n)[:, None]) ^ (place(n) == 1),
    "same row and key": lambda n: (place(n) <= place(n)[:, None]) & (place(n) == place(n)[:, None]),
    "xor of a wider one": lambda n: torch.ones(n, n, dtype=torch.bool).tril() ^ (place(n) < 2),
    "grid, other way around": lambda n: above_each_other(*torch.meshgrid(place(n), place(n), indexing="xy")),
    "grid of other numbers": lambda n: above_each_other(
        *torch.meshgrid(place(n), place(n) + 1, indexing="ij")
    ),
    "two triangles": lambda n: torch.cat(
        [torch.ones(n // 2, n, dtype=torch.bool).tril(), torch.ones(n - n // 2, n, dtype=torch.bool).tril()]
    ),
    "all but itself": lambda n: torch.ones(n, n, dtype=torch.bool).tril().fill_diagonal_(False),
    "squares": lambda n: place(n) * place(n) <= place(n)[:, None],
    "modulo": lambda n: place(n) % 4 <= place(n)[:, None] % 4,
    "cumsum of a cumsum": lambda n: place(n) <= torch.ones(n).cumsum(0).cumsum(0)[:, None],
    "half a cumsum": lambda n: place(n) <= torch.ones(n).cumsum(0)[:, None] - 1.5,
}


def every_row_sees_something(mask):
    return lambda n: mask(n) | (place(n)[:, None] == place(n)) | (place(n) == 0)


@cases(NEARLY)
def test_nearly_causal(case) -> None:
    """Not is_causal; fused with the mask as it is, and right."""
    exactly = every_row_sees_something(case)(S).equal(torch.ones(S, S, dtype=torch.bool).tril())
    for use in ("fill", "call"):
        seen = check(with_mask(every_row_sees_something(case), USES[use]), qkv(S, S), fused=None)
        for site in seen.sites:
            assert "is_causal" not in site.kernel or exactly
    seen = check(with_mask(case, USES["added"]), qkv(S, S), fused=None, train=False)
    assert not any("is_causal" in site.kernel for site in seen.sites)


@DYNAMIC
@pytest.mark.parametrize(("q_len", "kv_len"), [(5, 9), (9, 5), (1, 9)], ids=str)
@pytest.mark.parametrize("aligned", ["top left", "bottom right"])
def test_rectangle(q_len: int, kv_len: int, aligned: str, dynamic: bool) -> None:
    """is_causal is only given to squares."""

    def fn(q, k, v):
        shift = k.shape[-2] - q.shape[-2] if aligned == "bottom right" else 0
        row, column = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
        mask = (column <= row + shift) | (column == 0)
        return torch.softmax(torch.where(mask, q @ k.mT * 0.3, lowest()), dim=-1) @ v

    q, k, v = qkv(q_len, kv_len)
    for t in (q, k, v) if dynamic else ():
        torch._dynamo.maybe_mark_dynamic(t, 2)
    seen = check(fn, (q, k, v), dynamic=dynamic)
    assert "is_causal" not in seen.sites[0].kernel
    if not dynamic and (q_len, aligned) == (1, "bottom right"):
        assert "mask" not in seen.sites[0].kernel  # the last query sees every key


def test_other_data() -> None:
    """A mask from data that happens to be causal is not proved to be."""
    mask = torch.ones(S, S, dtype=torch.bool).tril()

    def fn(q, k, v, mask):
        return torch.softmax(torch.where(mask, q @ k.mT * 0.3, lowest()), dim=-1) @ v

    assert "is_causal" not in check(fn, (*qkv(S, S), mask)).sites[0].kernel

    module = Module(
        lambda net, q, k, v: fn(q, k, v, net.causal[: q.shape[-2], : k.shape[-2]]), {"causal": mask}
    )
    run = capture(module, *qkv(S, S, grad=False))
    assert "is_causal" not in run.sites[0].kernel


def test_causal_positions_that_are_overwritten() -> None:
    def fn(q, k, v):
        position = torch.arange(S)
        position[3] = 0
        mask = torch.arange(S) <= position[:, None]
        return torch.softmax(torch.where(mask, q @ k.mT * 0.3, lowest()), dim=-1) @ v

    assert "is_causal" not in check(fn, qkv(S, S), fused=None).sites[0].kernel
