"""Each kernel template once, on small tensors: what the tests of races and the sanitizer run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from inductor_fusions import _inductor, config
from inductor_fusions.block_mm import configurations, heuristics
from inductor_fusions.fusions.dot_interaction.op import DOT_INTERACTION
from inductor_fusions.fusions.linear_cross_entropy.op import LINEAR_CROSS_ENTROPY, SOFTMAX_ROWS
from inductor_fusions.fusions.lora import decode
from inductor_fusions.fusions.lora.accumulate import LORA_ACCUMULATE
from inductor_fusions.fusions.lora.op import LORA_DOWN
from inductor_fusions.fusions.outer_product_linear.op import OUTER_PRODUCT_LINEAR, outer_products
from tests.attention.support import decode_everywhere, flex_everywhere, short_everywhere

LOWEST = torch.finfo(torch.float32).min
BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Template:
    """A function that becomes one of our kernels.

    Attributes:
        function: in operations of torch, whose first argument is what a kernel before it writes.
        shapes: of its arguments; a name in front of the sizes says what they are: "rand" (the default),
            "ids" (sorted numbers of documents).
        kernels: within the names of Triton kernels of the compiled code; empty where it launches them itself.
        train: differentiate it.
        forced: chooses the kernel.
        dtypes: of the arguments, bfloat16 where not given.
        fixed: arguments that take no gradient.
        least: compute capability that it needs.
        marks: within the source of one of these kernels.
    """

    function: Callable[..., Any]
    shapes: tuple[tuple[Any, ...], ...]
    kernels: tuple[str, ...]
    train: bool = False
    forced: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    dtypes: tuple[torch.dtype, ...] = ()
    fixed: tuple[int, ...] = ()
    least: int = 80
    marks: tuple[str, ...] = ()

    def inputs(self, device: torch.device | str, seed: int = 0) -> list[Tensor]:
        """Arguments: leaves on `device`."""
        generator = torch.Generator().manual_seed(seed)
        made = []
        for index, shape in enumerate(self.shapes):
            sizes = [size for size in shape if isinstance(size, int)]
            values = torch.randn(sizes, generator=generator)
            if shape[0] == "ids":
                made.append((values > 1.5).long().cumsum(-1).to(device))
                continue
            dtype = self.dtypes[index] if index < len(self.dtypes) else BF16
            weight = len(sizes) == 2 and index > 0
            values = values / sizes[-1] ** 0.5 if weight else values
            leaf = self.train and index not in self.fixed
            made.append(values.to(device, dtype).requires_grad_(leaf))
        return made

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside, `torch.compile` makes this kernel of the function."""
        with config.patch(policy="always", strict=True), self.forced():
            yield


# Block GEMM --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def block(template: str, **wanted: int) -> Iterator[None]:
    """The first configuration of a template that tuning tries for a problem."""

    def choose(problem: Any, device: torch.device, tokens: int | None) -> Any:
        arch = heuristics.capability(device)
        fits = [
            c
            for c in configurations.candidates(problem, arch)
            if c.template == template and all(getattr(c, name) == value for name, value in wanted.items())
        ]
        return fits[0] if fits else configurations.default(problem, arch)

    with mock.patch.object(heuristics, "choose", choose):
        yield


@contextlib.contextmanager
def as_in_a_graph(forced: Callable[[], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    """Kernels that are launched before the one in front of them has ended, as in CUDA graphs."""
    with forced(), mock.patch.object(_inductor, "captures_graphs", lambda: True):
        yield


def linears(x: Tensor, *weights: Tensor) -> Any:
    return tuple(F.linear(x, w) for w in weights)


def gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


TILED, PERSISTENT = functools.partial(block, "tiled"), functools.partial(block, "persistent")
QKV = ((512, 256), (256, 256), (128, 256), (128, 256))
GATED = ((512, 256), (384, 256), (384, 256), (256, 384))


# Adapters ----------------------------------------------------------------------------------------------


def lora(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    base = F.linear(x, w)
    return (base + F.linear(F.linear(x.to(a.dtype), a), b) * 2.0).to(base.dtype)


def accumulated(base: Tensor, x: Tensor, a: Tensor, b: Tensor, chance: Tensor) -> Tensor:
    """A base that is no product, and an adapter with a mask beside one without."""
    kept, h = chance > 0, F.linear(x, a)
    found: Tensor = LORA_ACCUMULATE(base, [h, h], [b.t(), b.t()], [2.0, 0.5], [kept], [1], base.dtype)
    return found


def behind_a_mask(x: Tensor, w: Tensor, a: Tensor, b: Tensor, chance: Tensor) -> Tensor:
    """As behind a dropout whose mask is there."""
    base, h = F.linear(x, w), LORA_DOWN(x, a, chance > 0, 1.25)
    return (base + F.linear(h, b) * 2.0).to(base.dtype)


@contextlib.contextmanager
def pair(early: bool, **wanted: int) -> Iterator[None]:
    """The two kernels for few rows; `early`: the second one starts before the first one ends."""
    made = decode.default

    def choose(shape: Any, device: torch.device) -> Any:
        return replace(made(shape), **wanted)

    def capability(device: torch.device) -> int:
        return heuristics.capability(device) if early else 80

    with mock.patch.multiple(decode, choose=choose, capability=capability):
        yield


LORA = ((512, 256), (384, 256), (16, 256), (384, 16))
WIDE_LORA = ((4096, 2048), (2048, 2048), (16, 2048), (2048, 16))
FEW = ((12, 512), (384, 512), (16, 512), (384, 16))


# Attention ---------------------------------------------------------------------------------------------


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT * 0.2 + bias, -1).to(v.dtype) @ v


def cached(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """A cache of which the second half is hidden."""
    seen = torch.arange(k.shape[2], device=k.device) < k.shape[2] // 2
    mask = torch.where(seen, bias, torch.finfo(bias.dtype).min)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i = torch.arange(q.shape[2], device=q.device)
    seen = (i <= i[:, None]) & (i > i[:, None] - 150)
    return torch.softmax((q @ k.mT * 0.1).masked_fill(~seen, LOWEST), -1) @ v


def packed(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    i = torch.arange(q.shape[2], device=q.device)
    seen = (i <= i[:, None]) & (ids[:, None, :, None] == ids[:, None, None, :])
    scores = torch.tanh(q @ k.mT * 0.02) * 5.0
    return torch.softmax(scores.masked_fill(~seen, LOWEST), -1) @ v


FLEX = functools.partial(flex_everywhere, "flex")
HEADS = ((2, 2, 300, 64),) * 3
SHORT = ((12, 2, 49, 32),) * 3 + ((1, 2, 49, 49),)


# Linear on an outer product ----------------------------------------------------------------------------


def outer(u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    found: Tensor = OUTER_PRODUCT_LINEAR(u, v, w)
    return found


def loss_head(h: Tensor, w: Tensor) -> Tensor:
    """A capped loss with ignored labels and smoothing; log-probabilities and entropies."""
    labels = torch.arange(h.shape[0], device=h.device) % w.shape[0]
    options = (None, None, 1.0, 5.0, 3, 0.1, True, [h.requires_grad, w.requires_grad, False])
    loss: Tensor = LINEAR_CROSS_ENTROPY(h, w, None, labels, *options)[0]
    log_p, lse, _, entropy = SOFTMAX_ROWS(h, w, None, labels, None, 1.0, 0.0, False, True, False)
    return loss + log_p - lse + entropy


def product(u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return F.linear(outer_products(u, v), w)


def square(u: Tensor, w: Tensor) -> Tensor:
    return product(u, u, w)


@contextlib.contextmanager
def tf32() -> Iterator[None]:
    """Where torch may use TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def given_pairs(t: Tensor, dense: Tensor) -> Tensor:
    cells = torch.arange(0, 729, 2, device=t.device).repeat(2)
    found: Tensor = DOT_INTERACTION(t, dense, cells, False, False, [])
    return found


def interaction(t: Tensor, dense: Tensor) -> Tensor:
    found: Tensor = DOT_INTERACTION(t, dense, None, False, False, [])
    return found


GEMM, NARROW, PAIR = ("block_mm",), ("lora_narrow_mm", "block_mm"), ("lora_linear", "lora_linear")

IN_A_GRAPH = functools.partial(as_in_a_graph, functools.partial(pair, True))

BOTH_EARLY = ("gdc_wait", "gdc_launch_dependents")
BULK, EARLY, LANES = ("make_tensor_descriptor",), ("gdc_wait",), ("tl.zeros((4, BLOCK_M, BLOCK_N)",)

TEMPLATES: dict[str, Template] = {
    "block GEMM, tiled": Template(linears, QKV, GEMM, True, TILED),
    "block GEMM, tiled, few rows": Template(linears, ((16, 256), *QKV[1:]), GEMM, False, TILED),
    "block GEMM, one row": Template(
        linears, ((1, 256), *QKV[1:]), GEMM, False, functools.partial(block, "row")
    ),
    "block GEMM, three rows": Template(
        linears, ((3, 256), *QKV[1:]), GEMM, False, functools.partial(block, "row")
    ),
    "block GEMM, tiled, launched early": Template(
        linears, QKV, GEMM, True, functools.partial(as_in_a_graph, TILED), least=90, marks=EARLY
    ),
    "block GEMM, one row, launched early": Template(
        linears,
        ((1, 256), *QKV[1:]),
        GEMM,
        False,
        functools.partial(as_in_a_graph, functools.partial(block, "row")),
        least=90,
        marks=EARLY,
    ),
    "block GEMM, persistent": Template(linears, QKV, GEMM, True, PERSISTENT, least=90, marks=BULK),
    "block GEMM, persistent, in parts": Template(
        linears, QKV, GEMM, False, functools.partial(PERSISTENT, subtiles=2), least=90, marks=BULK
    ),
    "gated MLP, tiled": Template(gated, GATED, GEMM, True, TILED),
    "gated MLP, persistent": Template(gated, GATED, GEMM, False, PERSISTENT, least=90, marks=BULK),
    "adapters": Template(lora, LORA, NARROW, True, TILED, fixed=(1,)),
    "adapters of float32": Template(
        lora, LORA, (*NARROW, "lora_split"), True, PERSISTENT, (BF16, BF16, FP32, FP32), (1,), 90, BULK
    ),
    "adapters, few rows": Template(lora, FEW, PAIR, False, functools.partial(pair, False)),
    "adapters, few rows, early": Template(
        lora, FEW, PAIR, False, functools.partial(pair, True), least=90, marks=EARLY
    ),
    "adapters, one row": Template(
        lora, ((1, 512), *FEW[1:]), PAIR, False, functools.partial(pair, True), least=90, marks=EARLY
    ),
    "adapters, three rows": Template(
        lora, ((3, 512), *FEW[1:]), PAIR, False, functools.partial(pair, True), least=90, marks=EARLY
    ),
    "adapters, few rows, both launched early": Template(
        lora, FEW, PAIR, False, IN_A_GRAPH, least=90, marks=BOTH_EARLY
    ),
    "adapters, one row, both launched early": Template(
        lora, ((1, 512), *FEW[1:]), PAIR, False, IN_A_GRAPH, least=90, marks=BOTH_EARLY
    ),
    "adapters, few rows, a lane for each warp": Template(
        lora, FEW, PAIR, False, functools.partial(pair, True, block_k=256, lanes=4), least=90, marks=LANES
    ),
    "adapters, added to what is in memory": Template(
        accumulated, ((512, 384), *LORA[:1], *LORA[2:], (512, 384)), ("lora_accumulate",)
    ),
    "adapters behind a mask": Template(
        behind_a_mask, (*LORA, LORA[0]), (*NARROW, "lora_accumulate"), True, fixed=(1, 4)
    ),
    "adapters of float32 behind a mask": Template(
        behind_a_mask,
        (*LORA, LORA[0]),
        (*NARROW, "lora_accumulate"),
        True,
        dtypes=(BF16, BF16, FP32, FP32),
        fixed=(1, 4),
    ),
    "short attention": Template(biased, SHORT, ("short_attention",), True, short_everywhere, (FP32,) * 4),
    "short attention, bfloat16": Template(biased, SHORT, ("short_attention",), True, short_everywhere),
    "decoding": Template(
        cached, ((2, 8, 3, 64), *((2, 2, 300, 64),) * 2, (2, 1, 3, 300)), (), forced=decode_everywhere
    ),
    "outer product": Template(outer, ((200, 4), (200, 48), (96, 192)), (), True),
    "dot interaction": Template(interaction, ((200, 27, 64), (200, 64)), (), True),
    "loss head": Template(loss_head, ((200, 64), (1003, 64)), (), True),
    "given pairs": Template(given_pairs, ((200, 27, 64), (200, 64)), (), True),
    "flex, window": Template(windowed, HEADS, ("flex_attention",), True, FLEX, (FP32,) * 3),
    "flex, documents and softcap": Template(
        packed, (*HEADS, ("ids", 2, 300)), ("flex_attention",), True, FLEX, (FP32,) * 3
    ),
}

#: The kernels as models have them, each in the configuration that the table of the device gives it: what goes
#: wrong now and then may do so only where every multiprocessor is busy.
LARGE: dict[str, Template] = {
    "linears": Template(linears, ((512, 4096), (4096, 4096), (1024, 4096), (1024, 4096)), GEMM, True),
    "gated MLP": Template(gated, ((2048, 2048), (8192, 2048), (8192, 2048), (2048, 8192)), GEMM, True),
    "adapters": Template(lora, WIDE_LORA, NARROW, True, fixed=(1,)),
    "adapters of float32": Template(
        lora, WIDE_LORA, NARROW, True, dtypes=(BF16, BF16, FP32, FP32), fixed=(1,)
    ),
    "adapters, one row": Template(lora, ((1, 4096), (4096, 4096), (16, 4096), (4096, 16)), PAIR),
    "adapters, added to what is in memory": Template(
        accumulated,
        ((4096, 2048), *WIDE_LORA[:1], *WIDE_LORA[2:], (4096, 2048)),
        ("lora_accumulate",),
    ),
    "adapters of float32 behind a mask": Template(
        behind_a_mask,
        (*WIDE_LORA, WIDE_LORA[0]),
        (*NARROW, "lora_accumulate"),
        True,
        dtypes=(BF16, BF16, FP32, FP32),
        fixed=(1, 4),
    ),
    "short attention": Template(
        biased, (((2048, 3, 49, 32),) * 3) + ((1, 3, 49, 49),), ("short_attention",), True, short_everywhere
    ),
    "decoding": Template(
        cached, ((16, 32, 1, 128), *((16, 8, 4096, 128),) * 2, (16, 1, 1, 4096)), (), forced=decode_everywhere
    ),
    "square of features": Template(square, ((2048, 432), (512, 432**2)), (), True),
    "square of features, float32": Template(
        square, ((2048, 432), (512, 432**2)), (), True, tf32, dtypes=(FP32, FP32)
    ),
    "outer product": Template(product, ((2048, 432), (2048, 400), (512, 432 * 400)), (), True),
    "dot interaction": Template(interaction, ((8192, 27, 64), (8192, 64)), (), True),
    "loss head": Template(loss_head, ((4096, 1024), (50257, 1024)), (), True),
    "given pairs": Template(given_pairs, ((8192, 27, 64), (8192, 64)), (), True),
}


# Running -----------------------------------------------------------------------------------------------


def compiled(template: Template, **options: Any) -> Callable[..., list[Tensor]]:
    """`run(inputs, cotangents)` -> outputs and gradients of the compiled function.

    It must run first inside `template.active()`. Cotangents are tensors like the outputs; ones by default.
    """
    # Dynamo keeps what it compiled by code object.
    function = template.function

    def call(*inputs: Tensor) -> Any:
        return function(*inputs)

    call.__code__ = call.__code__.replace()
    run = torch.compile(call, dynamic=False, **options)
    return functools.partial(differentiated, template, run)


def differentiated(
    template: Template, run: Callable[..., Any], inputs: list[Tensor], cotangents: list[Tensor] | None = None
) -> list[Tensor]:
    """Outputs and gradients of a function."""
    with torch.set_grad_enabled(template.train):
        found = run(*inputs)
    outputs = list(found) if isinstance(found, (tuple, list)) else [found]
    if not template.train:
        return outputs
    given = [torch.ones_like(y) for y in outputs] if cotangents is None else cotangents
    leaves = [x for x in inputs if x.requires_grad]
    return [y.detach() for y in outputs] + list(torch.autograd.grad(outputs, leaves, given))
