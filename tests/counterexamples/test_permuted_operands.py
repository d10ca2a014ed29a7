"""Calls of SDPA that stock decomposes and then misreads, because its operands are permuted otherwise."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from inductor_fusions import config, testing
from inductor_fusions.fusions import stock_misfires
from inductor_fusions.fusions.stock_misfires import permutations
from tests.counterexamples.test_stock_misfires import HEADS, tensors
from tests.support.errors import relative

pytestmark = pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")


def sdpa(q: Any, k: Any, v: Any, *dims: tuple[int, ...], **options: Any) -> Any:
    """SDPA on permuted operands; one order for all, or one for each."""
    return F.scaled_dot_product_attention(
        *(x.permute(d) for x, d in zip((q, k, v), dims * (3 // len(dims)), strict=True)), **options
    )


#: Calls of SDPA that are decomposed on a CPU: a last dim that is not in order in memory, or values of another
#: size. name -> (function of q, k, v and a bias, their shapes).
CALLS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "k (batch, heads, dim, length)": (
        lambda q, k, v, b: sdpa(q, k, v, HEADS, (0, 2, 3, 1), HEADS, scale=1.0),
        [(2, 8, 3, 8)] * 3 + [(8, 8)],
    ),
    "k (batch, length, dim, heads)": (
        lambda q, k, v, b: sdpa(q, k, v, HEADS, (0, 3, 1, 2), HEADS), [(2, 7, 4, 4)] * 3 + [(7, 7)],
    ),
    "q turned": (
        lambda q, k, v, b: sdpa(q, k, v, (0, 2, 3, 1), HEADS, HEADS), [(2, 8, 3, 8)] * 3 + [(8, 8)],
    ),
    "v turned": (
        lambda q, k, v, b: sdpa(q, k, v, HEADS, HEADS, (0, 2, 3, 1)), [(2, 8, 3, 8)] * 3 + [(8, 8)],
    ),
    "all turned, with a mask": (
        lambda q, k, v, b: sdpa(q, k, v, (3, 2, 1, 0), attn_mask=b), [(8, 8, 3, 2)] * 3 + [(8, 8)],
    ),
    "all turned, causal": (
        lambda q, k, v, b: sdpa(q, k, v, (0, 2, 3, 1), is_causal=True), [(2, 8, 3, 8)] * 3 + [(8, 8)],
    ),
    "all turned, heads that share keys": (
        lambda q, k, v, b: sdpa(q, k, v, (0, 2, 3, 1), enable_gqa=True),
        [(2, 8, 4, 8), (2, 8, 2, 8), (2, 8, 2, 8), (8, 8)],
    ),
    "(length, batch, heads, dim), values of another size": (
        lambda q, k, v, b: sdpa(q, k, v, (1, 2, 0, 3)), [(4, 4, 3, 8)] * 2 + [(4, 4, 3, 5), (4, 4)],
    ),
    "the same, where stock raises": (
        lambda q, k, v, b: sdpa(q, k, v, (1, 2, 0, 3)), [(7, 2, 3, 8)] * 2 + [(7, 2, 3, 5), (7, 7)],
    ),
    "k whose head dim is one element": (
        lambda q, k, v, b: sdpa(q, k[:, :1].expand_as(q), v, HEADS, (0, 2, 3, 1), HEADS),
        [(2, 8, 3, 8)] * 3 + [(8, 8)],
    ),
    "keywords, q and k the same": (
        lambda q, k, v, b: F.scaled_dot_product_attention(
            value=v.permute(HEADS), key=(turned := q.permute(0, 2, 3, 1)), query=turned
        ),
        [(2, 8, 3, 8)] * 3 + [(8, 8)],
    ),
    "heads brought forward": (
        lambda q, k, v, b: sdpa(q, k, v, HEADS), [(2, 7, 3, 8)] * 2 + [(2, 7, 3, 4), (7, 7)],
    ),
}  # fmt: skip


def calls_apart(*inputs: Any) -> list[Any]:
    """Every call of the table, on its own four inputs."""
    return [function(*inputs[4 * i : 4 * i + 4]) for i, (function, _) in enumerate(CALLS.values())]


@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_decomposed_sdpa(train: bool) -> None:
    """As Inductor compiles it."""
    torch.manual_seed(0)
    inputs = tensors(*[shape for _, shapes in CALLS.values() for shape in shapes])
    for bias in inputs[3::4]:
        bias.requires_grad_(False)
    run = testing.capture(calls_apart, *inputs, train=train, policy="profitable")
    doubles = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    true = calls_apart(*doubles)
    for name, found, wanted in zip(CALLS, run.outputs, true, strict=True):
        assert relative(found, wanted.detach()) < 1e-6, name
    if train:
        cotangents = [c.double() for c in run.cotangents]
        needed = [i for i, x in enumerate(doubles) if x.requires_grad]
        grads = torch.autograd.grad(true, [doubles[i] for i in needed], cotangents, allow_unused=True)
        for i, wanted in zip(needed, grads, strict=True):
            if wanted is not None:
                assert relative(run.grads[str(i)], wanted) < 1e-6, (list(CALLS)[i // 4], "qkv"[i % 4])


@pytest.mark.skipif(
    not torch.__version__.startswith(("2.13", "2.14")), reason="patterns of other releases differ"
)
@pytest.mark.parametrize(
    "name", ["k (batch, heads, dim, length)", "(length, batch, heads, dim), values of another size"]
)
def test_stock_misreads_decomposed_sdpa(name: str) -> None:
    function, shapes = CALLS[name]
    inputs = [torch.randn(shape) for shape in shapes]
    with config.patch(stock_misfires=False):
        run = testing.capture(function, *inputs, train=False, policy="profitable")
    assert relative(run.outputs, function(*[x.double() for x in inputs])) > 0.1


@pytest.mark.parametrize("misread", [True, False])
@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1, 2)], ids=["q", "k", "v", "all"])
def test_permuted_operands_of_sdpa(which: tuple[int, ...], misread: bool) -> None:
    """The rewritten graph, for every permutation: equal, and no operand is permuted otherwise at the end."""

    def every(q: Any, k: Any, v: Any) -> list[Any]:
        return [
            sdpa(q, k, v, *(order if i in which else HEADS for i in range(3)))
            for order in itertools.permutations(range(4))
        ]

    inputs = [torch.randn(4, 4, 4, 4) for _ in range(3)]
    with mock.patch.object(stock_misfires, "patterns_match_decomposed_sdpa", lambda: misread):
        run = testing.capture(every, *inputs, train=False, backend=testing.EAGER_AFTER_PASSES)
    for found, wanted in zip(run.outputs, every(*[x.double() for x in inputs]), strict=True):
        assert relative(found, wanted) < 1e-6
    fused = [site for site in run.fused if site.fusion == "stock_misfires"]
    assert len(fused) == 23 * len(which) * misread
    for call in run.calls("scaled_dot_product_attention") if misread else ():
        for operand in call.args[:3]:
            found = permutations.permutation_of(operand)
            assert found is None or found[1] == HEADS


def test_copied_operands_of_sdpa() -> None:
    """No pattern has a copy between a permutation and SDPA. One that changes nothing is none."""

    def copied(q: Any, k: Any, v: Any) -> Any:
        k = k.permute(0, 2, 3, 1)
        return F.scaled_dot_product_attention(q, k.contiguous(), v.permute(0, 2, 3, 1).float().clone())

    inputs = [torch.randn(4, 4, 4, 4) for _ in range(3)]
    with mock.patch.object(stock_misfires, "patterns_match_decomposed_sdpa", lambda: True):
        run = testing.capture(copied, *inputs, train=False, backend=testing.EAGER_AFTER_PASSES)
    assert [site.kernel for site in run.fused] == ["permuted by (0, 3, 2, 1) then (0, 2, 1, 3)"]
    assert relative(run.outputs, copied(*inputs)) < 1e-6


@pytest.mark.parametrize(("whole", "rank", "steps"), [
    ((0, 1, 2, 3), 4, []),
    ((0, 1, 3, 2), 4, [(0, 1, 3, 2)]),
    ((0, 2, 3, 1), 4, [(0, 2, 1, 3), (0, 1, 3, 2)]),
    ((0, 2, 1), 3, [(0, 2, 1)]),
    ((2, 0, 1), 3, [(2, 1, 0), (0, 2, 1)]),
])  # fmt: skip
def test_standard_steps(whole: tuple[int, ...], rank: int, steps: list[tuple[int, ...]]) -> None:
    identity = tuple(range(rank))
    known = [(0, 2, 1, 3), (0, 1, 3, 2)] if rank == 4 else [(0, 2, 1)]
    assert permutations.standard(whole, known, identity) == steps


def test_steps_make_the_whole() -> None:
    """For every permutation: the steps are it, and none of those that a pattern may see is another."""
    known = [(0, 2, 1, 3), (0, 1, 3, 2)]
    for whole in itertools.permutations(range(4)):
        made = (0, 1, 2, 3)
        steps = permutations.standard(whole, known, made)
        for step in steps:
            made = permutations.composed(made, step)
        assert made == whole
        seen = min(len(steps), len(known))
        assert steps[len(steps) - seen :] == known[len(known) - seen :]
