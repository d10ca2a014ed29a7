"""Every class of mask and bias: kept under symbolic sizes, and on a GPU without a buffer of (queries, keys).

Each case is written for any batch and length, as models write it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from inductor_fusions import config
from tests.attention.support import cases, check, flex_everywhere

H, D = 2, 16
LOWEST = torch.finfo(torch.float16).min


def indices(q: Any) -> tuple[torch.Tensor, torch.Tensor]:
    place = torch.arange(q.shape[2])
    return place[:, None], place[None, :]


def spelled(q: Any, k: Any, v: Any, seen: Any, change: Callable[[Any], Any] = lambda s: s) -> Any:
    scores = change(q @ k.mT * 0.25)
    return torch.softmax(scores.masked_fill(~seen, LOWEST), -1) @ v


def window(q, k, v, data):
    i, j = indices(q)
    return spelled(q, k, v, (j <= i) & (j > i - 100))


def padding(q, k, v, data):
    i, j = indices(q)
    return spelled(q, k, v, (j <= i) & (data != 1)[:, None, None, :])


def documents(q, k, v, data):
    i, j = indices(q)
    return spelled(q, k, v, (j <= i) & (data[:, None, :, None] == data[:, None, None, :]))


def prefix(q, k, v, data):
    i, j = indices(q)
    return spelled(q, k, v, (j <= i) | (j < 40))


def chunks(q, k, v, data):
    """As Llama-4: a query sees the keys of its own chunk."""
    i, j = indices(q)
    return spelled(q, k, v, (j <= i) & (i // 128 == j // 128))


def softcap(q, k, v, data):
    i, j = indices(q)
    return spelled(q, k, v, j <= i, lambda scores: torch.tanh(scores / 5.0) * 5.0)


def softcap_and_padding(q, k, v, data):
    i, j = indices(q)
    seen = (j <= i) & (data != 1)[:, None, None, :]
    return spelled(q, k, v, seen, lambda scores: torch.tanh(scores / 5.0) * 5.0)


def sinks(q, k, v, data):
    i, j = indices(q)
    scores = (q @ k.mT * 0.25).masked_fill((j > i) | (j <= i - 100), LOWEST)
    column = torch.linspace(0, 1, H).to(q.dtype).view(1, H, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
    return torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1] @ v


def alibi(q, k, v, data):
    """As BLOOM: of the positions that are no padding."""
    i, j = indices(q)
    pad = (data != 1).long()
    slopes = torch.pow(torch.tensor(0.25), torch.arange(1, H + 1))
    bias = (slopes[:, None, None] * ((pad.cumsum(-1) - 1) * pad)[:, None, None, :]).to(q.dtype)
    return spelled(q, k, v, (j <= i) & (pad != 0)[:, None, None, :], lambda scores: scores + bias)


def alibi_of_merged_heads(q, k, v, data):
    """As BLOOM: batch and heads are one dim of the bias and of the product, and two of the scores."""
    batch, length = data.shape
    i, j = indices(q)
    pad = (data != 1).long()
    slopes = torch.pow(torch.tensor(0.25), torch.arange(1, H + 1))
    bias = slopes[..., None] * ((pad.cumsum(-1) - 1) * pad)[:, None, :]
    scores = (
        bias.reshape(batch * H, 1, length)
        .to(q.dtype)
        .baddbmm(
            batch1=q.reshape(-1, length, D),
            batch2=k.reshape(-1, length, D).transpose(-1, -2),
            beta=1.0,
            alpha=0.25,
        )
    )
    scores = scores.view(batch, H, length, -1)
    seen = (j <= i) & (pad != 0)[:, None, None, :]
    hidden = torch.where(seen, 0.0, torch.finfo(q.dtype).min).to(q.dtype)
    weights = torch.softmax(scores + hidden, -1).view(batch * H, length, -1)
    return torch.bmm(weights, v.reshape(batch * H, length, D)).view(batch, H, length, D)


@dataclass(frozen=True)
class Case:
    """A class: the attention, and what is in the name of its kernel."""

    fn: Callable[..., Any]
    kernel: str


CASES = {
    "window": Case(window, "flex, block mask: causal+window"),
    "padding": Case(padding, "flex, block mask: causal+pad"),
    "documents": Case(documents, "flex, block mask: causal+document"),
    "prefix": Case(prefix, "flex, block mask: blocks"),
    "chunks": Case(chunks, "flex, block mask: causal+document"),
    "softcap": Case(softcap, "flex, tanh, block mask: causal"),
    "softcap and padding": Case(softcap_and_padding, "flex, tanh, block mask: causal+pad"),
    "sinks": Case(sinks, "flex, block mask: causal+window, sink"),
    "alibi": Case(alibi, "flex, block mask: causal+pad, bias in score_mod"),
    "alibi of merged heads": Case(alibi_of_merged_heads, "flex, block mask: causal+pad, bias in score_mod"),
}


def of_projections(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The attention on (batch, length, heads * dim): heads and their dim are numbers."""

    def called(q: Any, k: Any, v: Any, data: Any) -> Any:
        q, k, v = (x.view(*x.shape[:2], H, D).transpose(1, 2) for x in (q, k, v))
        return fn(q, k, v, data).transpose(1, 2).flatten(2)

    return called


def inputs(batch: int, length: int, *, dtype: torch.dtype = torch.float32, grad: bool = False) -> Any:
    data = torch.randint(0, 5, (batch, length)).sort(-1).values
    data[:, 0] = 0
    shape = (batch, length, H * D)
    return (*((torch.randn(shape) * 0.7).to(dtype).requires_grad_(grad) for _ in range(3)), data)


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@cases(CASES)
def test_symbolic_sizes(case: Case, train: bool) -> None:
    """The class is the same, and the numbers are right, with a symbolic batch and length."""
    with flex_everywhere("flex"):
        fn = of_projections(case.fn)
        check(fn, inputs(3, 200, grad=train), kernel=case.kernel, train=train, dynamic=True)


#: Of these, symbolic sizes are for long runs: their masks and scores are put together as those of others.
LIKE_OTHERS = frozenset(
    {"prefix", "chunks", "softcap", "softcap and padding", "alibi", "alibi of merged heads"}
)


def with_sizes() -> Iterator[Any]:
    """Each class with sizes that are numbers, and with symbolic ones."""
    for name in CASES:
        yield pytest.param(name, False, id=f"{name}-numbers")
        yield pytest.param(
            name, True, id=f"{name}-symbols", marks=[pytest.mark.long] if name in LIKE_OTHERS else []
        )


@pytest.mark.parametrize(("name", "dynamic"), with_sizes())
def test_no_buffer_of_pairs(name: str, dynamic: bool) -> None:
    """Compiled for a GPU, forward and backward, nothing as large as (queries, keys) is allocated."""
    pytest.importorskip("triton")
    from bench import cuda_codegen

    case, length = CASES[name], 640
    with flex_everywhere("flex"), config.patch(strict=True):
        code = cuda_codegen.generate(
            of_projections(case.fn), inputs(2, length, dtype=torch.float16, grad=True),
            train=True, run=False, dynamic=dynamic,
        )  # fmt: skip
    assert [module.is_backward for module in code.modules] == [False, True]
    for module in code.modules:
        assert any(kernel.is_template and "flex_attention" in kernel.name for kernel in module.kernels)
        if not dynamic:
            assert max(module.buffers) < length * length
        for shape in module.shapes:
            symbols = [size for size in shape if size.isidentifier()]
            assert len(set(symbols)) == len(symbols), shape


@cases(CASES)
def test_inference_is_lowered(case: Case) -> None:
    """Compiled for a GPU without a backward, where what leads to a mask or a bias is in the same graph.

    Of two layers: the second reads what the first has put into memory.
    """
    pytest.importorskip("triton")
    from bench import cuda_codegen

    attention = of_projections(case.fn)

    def layers(q: Any, k: Any, v: Any, data: Any) -> Any:
        return attention(attention(q, k, v, data), k, v, data)

    with flex_everywhere("flex"), config.patch(strict=True):
        code = cuda_codegen.generate(layers, inputs(2, 640, dtype=torch.float16), run=False)
    assert len([name for name in code.forward.launches if "flex_attention" in name]) == 2
