"""Attentions whose mask is a predicate of indices and of data: windows, documents, padding, prefixes, chunks.

Each is a function of q, k, v of (batch, heads, length, dim) and of `data`, a (batch, length) tensor of sorted
integers from 0 to 4 that begins with 0. It is written for any batch and length, as models write it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

HEADS, DIM, WIDTH = 2, 16, 40
INF = math.inf

#: (data, length) -> a boolean mask, True where a key is seen, or one of numbers that is added.
Mask = Callable[[Any, Any], Any]
Attention = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One attention, and what flex attention makes of it.

    Attributes:
        fn: of (q, k, v, data).
        kernel: of the fused site, with a class of masks behind "block mask: ".
        length: at which it has blocks of every kind that its mask makes.
        symbolic: its class is looked at under symbolic sizes.
        generated: code for a GPU is made of it.
        shown: the mask, where the block mask is compared with it.
    """

    fn: Attention
    kernel: str
    length: int = 150
    symbolic: bool = False
    generated: bool = False
    shown: Mask | None = None

    @property
    def kind(self) -> str:
        """The class of the mask."""
        return self.kernel.partition("block mask: ")[2].partition(",")[0]


def distance(n: Any) -> Tensor:
    return torch.arange(n)[:, None] - torch.arange(n)[None]


def bands(n: Any) -> tuple[Tensor, Tensor]:
    return torch.full((n, n), -INF).triu(1), torch.full((n, n), -INF).tril(-WIDTH)


def causal(data: Any, n: Any) -> Tensor:
    return torch.arange(n)[None, :] <= torch.arange(n)[:, None]


def window(data: Any, n: Any) -> Tensor:
    """Its width is in the code: one that a function closes over is a symbol where sizes are dynamic."""
    return (distance(n) >= 0) & (distance(n) < 70)


def documents(data: Any, n: Any = None) -> Tensor:
    return data[:, None, :, None] == data[:, None, None, :]


def padding(data: Any, n: Any = None) -> Tensor:
    return (data != 1)[:, None, None, :]


def of_blocks(change: Callable[[Tensor, Tensor], Tensor]) -> Mask:
    """A mask of the indices of queries and of keys."""
    return lambda data, n: change(torch.arange(n)[:, None], torch.arange(n)[None, :])


#: Windows to both sides.
BOTH_SIDES: dict[str, Callable[[Any], Any]] = {
    "method": lambda n: distance(n).abs() <= WIDTH,
    "function": lambda n: torch.abs(distance(n)) < WIDTH,
    "builtin": lambda n: abs(distance(n)) <= WIDTH,
    "absolute": lambda n: torch.absolute(distance(n)) < WIDTH,
    "bound first": lambda n: torch.tensor(WIDTH) >= distance(n).abs(),
    "not above": lambda n: ~(distance(n).abs() > WIDTH),
    "not at least": lambda n: torch.logical_not(distance(n).abs() >= WIDTH),
    "negated": lambda n: -distance(n).abs() >= -WIDTH,
    "shifted": lambda n: distance(n).abs() - WIDTH < 1,
    "floating": lambda n: distance(n).float().abs() <= WIDTH,
    "by where": lambda n: torch.where(distance(n) < 0, -distance(n), distance(n)) <= WIDTH,
    "of four dims": lambda n: (torch.arange(n).view(1, 1, n, 1) - torch.arange(n)).abs() <= WIDTH,
    "of numbers": lambda n: (distance(n).abs() <= WIDTH).float() == 1,
    # As Gemma 3 has it: what is causal in the window is in it.
    "or causal": lambda n: (distance(n).abs() < WIDTH) | ((distance(n) >= 0) & (distance(n) < WIDTH)),
}
#: Causal ones.
ONE_SIDE: dict[str, Callable[[Any], Any]] = {
    "abs": lambda n: (distance(n).abs() <= WIDTH) & (distance(n) >= 0),
    "tril of abs": lambda n: (distance(n).abs() < WIDTH).tril(),
    "part of a larger one": lambda n: (distance(2 * n).abs() < WIDTH).tril().narrow(0, 5, n).narrow(1, 5, n),
    "last of two parts": lambda n: (distance(2 * n).abs() < WIDTH).tril().split(n)[1].chunk(2, -1)[1],
    "sum of triangles": lambda n: sum(bands(n)) == 0,
    "product of triangles": lambda n: torch.ones(n, n).tril() * torch.ones(n, n).triu(-WIDTH) > 0,
    # Of numbers: 0 and minus infinity.
    "two triangles": lambda n: bands(n)[0] + bands(n)[1],
    "two triangles, in a row": lambda n: torch.zeros(n, n) + bands(n)[0] + bands(n)[1],
    "logarithm": lambda n: torch.log(torch.triu(torch.tril(torch.ones(n, n)), -WIDTH)),
    "logarithm, method": lambda n: (distance(n).abs() <= WIDTH).tril().float().log(),
    "one triangle without another": lambda n: (
        torch.ones(n, n, dtype=torch.bool).tril() ^ torch.ones(n, n, dtype=torch.bool).tril(-WIDTH)
    ),
}


def beside(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Four blocks of a matrix."""
    return torch.cat([torch.cat([a, b], 1), torch.cat([c, d], -1)])


#: Made of blocks.
BLOCKS: dict[str, Callable[[Any], Any]] = {
    # As GIT and prefix language models have it: 40 tokens see each other, those behind them what was before.
    "prefix": lambda n: beside(
        torch.zeros(40, 40), torch.full((40, n - 40), -INF),
        torch.zeros(n - 40, 40), torch.full((n - 40, n - 40), -INF).triu_(1),
    ),
    "two blocks": lambda n: beside(
        torch.ones(40, 40, dtype=torch.bool), torch.zeros(40, n - 40, dtype=torch.bool),
        torch.zeros(n - 40, 40, dtype=torch.bool), torch.ones(n - 40, n - 40, dtype=torch.bool).tril(),
    ),
    "all but itself": lambda n: ~torch.eye(n, dtype=torch.bool),
    "all but itself, filled": lambda n: torch.ones(n, n, dtype=torch.bool).fill_diagonal_(False),
}  # fmt: skip
#: One of each class, at a length of two blocks and a part of a third; and in which forms it is written.
CLASSES: dict[str, tuple[Mask, str]] = {
    "causal+window": (window, "add fill call"),
    "causal+pad": (lambda d, n: causal(d, n) & padding(d), "add fill call"),
    "causal+window+pad": (lambda d, n: window(d, n) & padding(d), "add fill"),
    "document": (documents, "add fill"),
    "causal+document": (lambda d, n: causal(d, n) & documents(d), "add fill call"),
    "pad+document": (lambda d, n: documents(d) & padding(d), "add fill"),
    "blocks": (of_blocks(lambda i, j: (j <= i) | (j < 40)), "add fill"),  # a prefix
    "causal+blocks": (of_blocks(lambda i, j: (j <= i) & ((j < 9) | (j > i - 50))), "add fill"),
    "window+blocks": (of_blocks(lambda i, j: (j > i - 40) & (j < i + 40)), "add fill"),
}
#: Of these, code for a GPU is made.
GENERATED = ("causal+window", "causal+pad", "causal+document", "blocks")
#: As Llama-4: a query sees the keys of its own chunk.
CHUNKS = of_blocks(lambda i, j: (j <= i) & (i // 128 == j // 128))
#: Windows whose class is looked at under symbolic sizes.
SYMBOLIC = ("method", "not above", "abs", "two triangles", "logarithm")


def lowest(q: Any) -> float:
    """A constant; a float in a global variable is a symbol to Dynamo where sizes are dynamic."""
    return torch.finfo(q.dtype).min


def written(mask: Mask, form: str, change: Callable[[Any], Any] = lambda scores: scores) -> Attention:
    """Attention with a mask: added to the scores or filled into them, or given to SDPA."""

    def fn(q: Any, k: Any, v: Any, data: Any) -> Any:
        n = q.shape[-2]
        seen = mask(data, n)
        if form == "call":
            return F.scaled_dot_product_attention(q, k, v, seen.expand(q.shape[0], 1, n, n))
        scores = change(q @ k.mT * 0.25)
        if seen.dtype != torch.bool:
            scores = scores + seen
        elif form == "fill":
            scores = scores.masked_fill(~seen, lowest(q))
        else:
            scores = scores + torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, lowest(q))
        return torch.softmax(scores, -1) @ v

    return fn


def softcap(scores: Any) -> Any:
    return torch.tanh(scores / 5.0) * 5.0


def sinks(q: Any, k: Any, v: Any, data: Any) -> Any:
    scores = (q @ k.mT * 0.25).masked_fill(~window(data, q.shape[-2]), lowest(q))
    column = torch.linspace(0, 1, HEADS).to(q.dtype).view(1, HEADS, 1, 1)
    column = column.expand(q.shape[0], -1, q.shape[2], -1)
    return torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1] @ v


def alibi(q: Any, k: Any, v: Any, data: Any) -> Any:
    """As BLOOM: of the positions that are no padding."""
    pad = (data != 1).long()
    slopes = torch.pow(torch.tensor(0.25), torch.arange(1, HEADS + 1))
    bias = (slopes[:, None, None] * ((pad.cumsum(-1) - 1) * pad)[:, None, None, :]).to(q.dtype)
    seen = causal(data, q.shape[-2]) & (pad != 0)[:, None, None, :]
    return torch.softmax((q @ k.mT * 0.25 + bias).masked_fill(~seen, lowest(q)), -1) @ v


def alibi_of_merged_heads(q: Any, k: Any, v: Any, data: Any) -> Any:
    """As BLOOM: batch and heads are one dim of the bias and of the product, and two of the scores."""
    batch, length = data.shape
    pad = (data != 1).long()
    slopes = torch.pow(torch.tensor(0.25), torch.arange(1, HEADS + 1))
    bias = slopes[..., None] * ((pad.cumsum(-1) - 1) * pad)[:, None, :]
    q3, k3, v3 = (x.reshape(-1, length, DIM) for x in (q, k, v))
    bias = bias.reshape(batch * HEADS, 1, length).to(q.dtype)
    scores = bias.baddbmm(batch1=q3, batch2=k3.transpose(-1, -2), beta=1.0, alpha=0.25)
    scores = scores.view(batch, HEADS, length, -1)
    seen = causal(data, length) & (pad != 0)[:, None, None, :]
    hidden = torch.where(seen, 0.0, lowest(q)).to(q.dtype)
    weights = torch.softmax(scores + hidden, -1).view(batch * HEADS, length, -1)
    return torch.bmm(weights, v3).view(batch, HEADS, length, DIM)


def _cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    tables = {"window+blocks": BOTH_SIDES, "causal+window": ONE_SIDE, "blocks": BLOCKS}
    for kind, table in tables.items():
        for name, mask in table.items():
            for form in ("fill", "call"):
                fn = written(lambda data, n, mask=mask: mask(n), form)
                found[f"{name}, {form}"] = Case(fn, f"flex, block mask: {kind}", symbolic=name in SYMBOLIC)
    for kind, (mask, forms) in CLASSES.items():
        for form in forms.split():
            one, generated = form == "fill", form == "fill" and kind in GENERATED
            kernel, shown = f"flex, block mask: {kind}", mask if one else None
            found[f"{kind}, {form}"] = Case(written(mask, form), kernel, 300, one, generated, shown)
    bias = "flex, block mask: causal+pad, bias in score_mod"
    cap, pad = "flex, tanh, block mask: causal", CLASSES["causal+pad"][0]
    others = {
        "chunks": (written(CHUNKS, "fill"), "flex, block mask: causal+document"),
        "softcap": (written(causal, "fill", softcap), cap),
        "softcap and padding": (written(pad, "fill", softcap), f"{cap}+pad"),
        "sinks": (sinks, "flex, block mask: causal+window, sink"),
        "alibi": (alibi, bias),
        "alibi of merged heads": (alibi_of_merged_heads, bias),
    }
    for name, (fn, kernel) in others.items():
        found[name] = Case(fn, kernel, 200, symbolic=True, generated=True)
    return found


CASES = _cases()

#: Twins: of the same look, but no windows.
NO_WINDOWS: dict[str, Callable[[Any], Any]] = {
    "of data": lambda n: (torch.arange(n)[:, None] - torch.arange(n).flip(0)).abs() <= WIDTH,
    "of fractions": lambda n: (distance(n) * 0.5).abs() <= 20.25,
    "of a rounded number": lambda n: distance(n).bfloat16().abs() <= 257,
    "that wraps around": lambda n: distance(n).to(torch.int8).abs() <= 100,
    "squared": lambda n: distance(n) ** 2 <= WIDTH**2,
    "logarithm of others": lambda n: distance(n).abs().float().log() <= 3.0,
}


def heads_of_projections(fn: Attention) -> Attention:
    """The attention on (batch, length, heads * dim): heads and their dim are numbers."""

    def called(q: Any, k: Any, v: Any, data: Any) -> Any:
        q, k, v = (x.view(*x.shape[:2], HEADS, DIM).transpose(1, 2) for x in (q, k, v))
        return fn(q, k, v, data).transpose(1, 2).flatten(2)

    return called


def segments(batch: int, length: int) -> Tensor:
    """`data`."""
    found = torch.randint(0, 5, (batch, length)).sort(-1).values
    found[:, 0] = 0
    return found


def projections(
    batch: int, length: int, *, dtype: torch.dtype = torch.float32, grad: bool = True
) -> tuple[Tensor, ...]:
    """Inputs of what `heads_of_projections` gives."""
    data, shape = segments(batch, length), (batch, length, HEADS * DIM)
    return (*((torch.randn(shape) * 0.7).to(dtype).requires_grad_(grad) for _ in range(3)), data)
