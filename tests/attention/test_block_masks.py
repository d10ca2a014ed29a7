"""Masks that flex attention is told as predicates: what is beside the table of `tests/cases/masks.py`."""

from __future__ import annotations

import pytest
import torch

from tests.attention.support import LOWEST, capture, cases, check, flex_everywhere, qkv, rand
from tests.cases import masks
from tests.cases.masks import written
from tests.support.arguments import named

B, H, S = 2, 2, 300  # two blocks and a part of a third


def rows_and_keys() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(S)[:, None], torch.arange(S)[None, :]


def causal() -> torch.Tensor:
    return masks.causal(None, S)


def segments() -> torch.Tensor:
    return masks.segments(B, S)


def test_call_of_sdpa_with_fully_masked_rows() -> None:
    """An additive mask adds to the scores, so these rows send a gradient into q and k.

    The kernel of SDPA on a CPU gets it wrong, so the reference is spelled out.
    """

    def mask(data: torch.Tensor) -> torch.Tensor:
        return (causal() & (data != 0)[:, None, None, :]).expand(B, 1, S, S)

    def fn(q, k, v, data):
        added = torch.where(mask(data), 0.0, LOWEST)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, added)

    spelled = written(lambda data, n: mask(data), "add")
    with flex_everywhere("flex"):
        seen = check(fn, (*qkv(S, S, heads=H), segments()), kernel="flex", reference=spelled)
    assert all(ours < 2e-6 for ours, _ in seen.errors.values())


def partly(p: torch.Tensor) -> torch.Tensor:
    wide = whole(p).clone()
    wide[:, :, 3] = 1.0
    return wide > 0.5


def whole(p: torch.Tensor) -> torch.Tensor:
    return p[:, None, None, :].expand(B, 1, S, S)


#: Masks of numbers for each key, and whether they vary over the keys alone.
POINTWISE = {
    "expanded first": (lambda p: whole(p) > 0.5, True),
    "scaled and cast": (lambda p: (1.0 - whole(p)).to(torch.bfloat16) * 2 < 1, True),
    "transposed": (lambda p: p[:, None, :, None].expand(B, 1, S, S).mT > 0.5, True),
    "indexed": (lambda p: p[torch.arange(B)[:, None], torch.arange(S).flip(0)][:, None, None] > 0.5, True),
    "repeated": (lambda p: p[:, None, None, :].expand(B, 1, S // 2, S).repeat(1, 1, 2, 1) > 0.5, True),
    "queries repeated": (lambda p: whole(p)[:, :, : S // 2, : S // 2].mT.repeat(1, 1, 2, 2) > 0.5, False),
    "of queries, too": (lambda p: whole(p) > torch.arange(S)[:, None] / S, False),
    "of queries and keys": (lambda p: whole(p) > whole(p).mT, False),
    "written in part": (partly, False),
    "moved along the queries": (lambda p: (whole(p) * (1 - torch.eye(S))).roll(1, 2) > 0.5, False),
}


@cases(POINTWISE)
def test_what_cannot_be_computed_varies_as_its_operands(case) -> None:
    mask, of_keys = case
    with flex_everywhere("flex"):
        seen = check(written(lambda p, n: mask(p), "fill"), (*qkv(S, S, heads=H), rand(B, S, grad=False)))
    assert ("block mask: pad" in seen.sites[0].kernel) == of_keys, seen.sites


def test_layers_share_one_block_mask() -> None:
    """The block mask is built once a forward, whatever the number of layers."""

    def fn(q, k, v, data):
        seen = (causal() & masks.documents(data)).expand(B, 1, S, S)
        for _ in range(3):
            q = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen)
        return q

    with flex_everywhere("flex"):
        run = capture(fn, *qkv(S, S, heads=H, grad=False), segments(), policy="always")
    calls = run.calls("flex_attention")
    assert len(calls) == 3
    assert len({tuple(named(call).block_mask[2:6]) for call in calls}) == 1
    assert len(run.calls("floor_divide")) == 2  # an order of the partial blocks, and one of the full ones


def test_no_dense_mask_is_left() -> None:
    """Nothing of the size (queries, keys) is computed where the class is proved and no row can be empty."""

    fn = written(masks.CLASSES["causal+document"][0], "fill")
    with flex_everywhere("flex"):
        run = capture(fn, *qkv(S, S, heads=H, grad=False), segments(), policy="always")
    (call,) = run.calls("flex_attention")
    call.graph.eliminate_dead_code()
    sizes = [
        n.meta["example_value"].shape
        for n in call.graph.nodes
        if isinstance(n.meta.get("example_value"), torch.Tensor)
    ]
    assert not [s for s in sizes if tuple(s[-2:]) == (S, S)]


def test_bias_beside_a_class() -> None:
    """Its gradient flows through the score_mod."""

    def fn(q, k, v, bias):
        i, j = rows_and_keys()
        return torch.softmax((q @ k.mT * 0.25 + bias).masked_fill((j > i) | (j <= i - 70), LOWEST), -1) @ v

    with flex_everywhere("flex"):
        seen = check(fn, (*qkv(S, S, heads=H), rand(H, S, S)), kernel="flex")
    assert "bias in score_mod" in seen.sites[0].kernel


def test_different_lengths() -> None:
    """Fewer queries than keys, as behind a cache: the causal mask starts at an offset."""

    def fn(q, k, v):
        i, j = torch.arange(40)[:, None] + S - 40, torch.arange(S)[None, :]
        return torch.softmax((q @ k.mT * 0.25).masked_fill((j > i) | (j <= i - 70), LOWEST), -1) @ v

    with flex_everywhere("flex"):
        check(fn, qkv(40, S, heads=H), kernel="flex")


DATA = {
    "a matrix": lambda s, m: m,
    "a matrix and causal": lambda s, m: m & causal(),
    "from floats": lambda s, m: s.float()[:, None, :, None] == s.float()[:, None, None, :],
}


@cases(DATA)
def test_data_stays_a_dense_mask(case) -> None:
    mask = torch.rand(B, 1, S, S) < 0.7
    mask[..., 0] = True

    def fn(q, k, v, data, mask):
        return torch.softmax((q @ k.mT * 0.25).masked_fill(~case(data, mask), LOWEST), -1) @ v

    with flex_everywhere("flex"):
        seen = check(fn, (*qkv(S, S, heads=H), segments(), mask), kernel="sdpa")
    assert "block mask" not in seen.sites[0].kernel


def added(first: str, second: str, fill: float, bias: bool = False):
    """Two masks, each added or filled in, and perhaps a bias behind them; rows may be fully masked."""

    def fn(q, k, v, data):
        scores = q @ k.mT * 0.25
        for how, seen in ((first, causal()), (second, (data != 0)[:, None, None, :])):
            if how == "fill":
                scores = scores.masked_fill(~seen, fill)
            else:
                scores = scores + torch.where(seen, 0.0, fill)
        scores = scores + 0.01 * torch.arange(S) if bias else scores
        return torch.softmax(scores, -1) @ v

    return fn


@pytest.mark.parametrize(
    ("how", "fill"),
    [(how, fill) for how in ("add add", "fill fill") for fill in (LOWEST, -1e9, -1e4)]
    + [(how, fill) for how in ("add fill", "fill add") for fill in (LOWEST, -1e9)],
)
def test_fully_masked_rows_hold_the_right_mean(how: str, fill: float) -> None:
    """Keys that are hidden once win over those hidden twice, and -10000 leaves scores their digits."""
    inputs = (*qkv(S, S, heads=H, grad=False), segments())
    with flex_everywhere("flex"):
        check(added(*how.split(), fill), inputs, kernel="flex" if how == "fill fill" else "sdpa", train=False)


@pytest.mark.parametrize("fill", [LOWEST, -1e4])
def test_bias_on_a_row_of_fills(fill: float) -> None:
    """The least number absorbs it, but -10000 does not."""
    inputs, reason = (*qkv(S, S, heads=H), segments()), "too small to cancel it"
    fn = added("fill", "fill", fill, bias=True)
    with flex_everywhere("flex"):
        if fill == LOWEST:
            check(fn, inputs, kernel="flex")
        else:
            check(fn, inputs, fused=0, reason=reason)
