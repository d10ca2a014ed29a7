"""What the suites of `python -m inductor_fusions bench` compile: operations and blocks.

They are written as models write them. Whole models are those of `bench.models`.

    attention     softmax(q @ kT + mask) @ v: the rows of `bench.attention`
    projections   linears that share an input, gated MLPs, a linear and its activation
    lora          a frozen linear with a low-rank adapter
    blocks        layers of an encoder and of a decoder

Variants of a case:

    stock      torch.compile
    fused      the same with inductor_fusions, under its policy in force
    autotuned  stock with max-autotune, where asked for
    limit      what someone can write by hand, or what the products take alone: SDPA told that it is causal,
               one product on concatenated weights, two bare products for a gated MLP and one for a linear
               with its activation, the frozen linear of an adapter
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from bench.attention.inputs import SMALL_INPUTS, allocate, fill
from bench.attention.reference import check, reference
from bench.attention.rows import Row, rows_of
from bench.attention.spellings import fused, unfused
from bench.common import DTYPES, relative_error
from bench.layers import (
    MLP,
    Adapted,
    DecoderLayer,
    EncoderLayer,
    GatedMLP,
    Linears,
    Projections,
    bare,
    bare_pair,
    concatenated,
)
from inductor_fusions.checking.budget import worst

Tensors = tuple[torch.Tensor, ...]
Errors = dict[str, float]


class Work(Protocol):
    """A case on a device: inputs, what is compiled, one step of it, and how its result is judged.

    Attributes:
        hands: variants besides stock, of their own source: "limit" where there is one.
        sets: number of sets of inputs; small ones are taken in turn. Where a call is short, it is timed
            with the L2 cache emptied as well.
        flops: floating-point operations of a step.
        nbytes: bytes that a step has to read and write at least.
    """

    hands: tuple[str, ...]
    sets: int
    flops: float
    nbytes: int

    def function(self, variant: str) -> Callable[..., Any]:
        """What is compiled."""

    def step(self, variant: str, compiled: Callable[..., Any], which: int) -> Tensors:
        """Outputs, and in training the gradients, on one of the sets."""

    def errors(self, run: Callable[[], Tensors]) -> Errors:
        """Relative errors against float64 of what a run on the first set gives."""


@dataclass(frozen=True)
class Case:
    """One case of a suite.

    Attributes:
        suite, name: what it is called.
        dtype: a key of `bench.common.DTYPES`.
        train: forward and backward, else the forward alone.
        make: the work on a device.
        line: cases of the same line differ in `length` alone, and make a curve over it.
        quick: whether it is in the quick selection.
        tf32: whether float32 may be multiplied as TF32.
    """

    suite: str
    name: str
    dtype: str
    train: bool
    make: Callable[[str], Work]
    line: str = ""
    length: int = 0
    quick: bool = False
    tf32: bool = False


# Attention ---------------------------------------------------------------------------------------------


class AttentionWork:
    """A row of `bench.attention`."""

    def __init__(self, row: Row, device: str) -> None:
        self.row = row
        first = allocate(row, device)
        self._inputs = [first] if first.nbytes() > SMALL_INPUTS else [first, allocate(row, device)]
        for seed, inputs in enumerate(self._inputs):
            fill(row, inputs, seed)
        self._expected: Any = None
        self.sets = len(self._inputs)
        self.hands = ("limit",)
        products = 4.0 * row.batch * row.heads * row.q_len * row.kv_len * row.head_dim
        self.flops = products * (3.5 if row.train else 1.0) * (0.5 if row.mask == "causal" else 1.0)
        self.nbytes = sum(x.nbytes for x in first.qkv) + first.cotangent.nbytes
        self.nbytes += sum(x.nbytes for x in first.fused_masks)
        self.nbytes *= 2 if row.train else 1

    def function(self, variant: str) -> Callable[..., torch.Tensor]:
        if variant == "limit":
            return partial(fused, self.row, False)
        return partial(causal if self.row.mask == "causal" else unfused, self.row)

    def step(self, variant: str, compiled: Callable[..., torch.Tensor], which: int) -> Tensors:
        row, inputs = self.row, self._inputs[which]
        with torch.set_grad_enabled(row.train):
            out = compiled(*inputs.arguments("sdpa" if variant == "limit" else "unfused"))
            if not row.train:
                return (out,)
            return (out, *torch.autograd.grad(out, inputs.leaves(row), inputs.cotangent))

    def errors(self, run: Callable[[], Tensors]) -> Errors:
        if self._expected is None:
            self._expected = reference(self.row, self._inputs[0])
        return check(self.row, run, *self._expected)


def causal(row: Row, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Unfused attention whose mask the graph makes, as models do: of one that is given nothing is known."""
    keys = torch.arange(row.kv_len, device=q.device)
    future = keys > keys[row.kv_len - row.q_len :, None]
    made = torch.zeros_like(mask).masked_fill(future, torch.finfo(mask.dtype).min)
    return unfused(row, q, k, v, made)


def attention(rows: Iterable[Row], quick: bool = False, line: str = "") -> list[Case]:
    """Cases of the attention suite; with a `line`, one curve over the key length."""
    return [
        Case("attention", f"attention {row.key}", row.dtype, row.train, partial(AttentionWork, row),
             line, row.kv_len if line else 0, quick)
        for row in rows
    ]  # fmt: skip


# Modules -----------------------------------------------------------------------------------------------


class ModuleWork:
    """A module, and where there is one the same written by hand with its weights.

    Args:
        by_hand: from the module, what someone would write for speed.
        draw: a set of its inputs; those that are floating are brought to the dtype.
        train: whether there is a backward; inputs and parameters that take a gradient get one.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        by_hand: Callable[[Any], Callable[..., Any]] | None,
        draw: Callable[[], Tensors],
        dtype: str,
        train: bool,
        device: str,
    ) -> None:
        torch.manual_seed(0)
        self.train = train
        with torch.device(device):
            self.module = make().to(DTYPES[dtype]).train(train)
            inputs = [self._cast(draw(), DTYPES[dtype]) for _ in range(2)]
        if not train:
            self.module.requires_grad_(False)
        size = sum(t.nbytes for t in (*inputs[0], *self.module.parameters()))
        self._inputs = inputs[:1] if size > SMALL_INPUTS else inputs
        self.sets = len(self._inputs)
        self._by_hand = by_hand(self.module) if by_hand is not None else None
        self.hands = ("limit",) if by_hand is not None else ()
        # The counter looks for the gradient functions of what takes a gradient.
        with torch.set_grad_enabled(train), FlopCounterMode(display=False) as counter:
            outputs = _tuple(self.module(*inputs[0]))
        self._cotangents = [torch.randn_like(out.detach()) for out in outputs]
        self.flops = float(counter.get_total_flops()) * (3 if train else 1)
        self.nbytes = (size + sum(out.nbytes for out in outputs)) * (2 if train else 1)
        self._expected: Tensors | None = None

    def _cast(self, inputs: Tensors, dtype: torch.dtype) -> Tensors:
        return tuple(
            t.detach().to(dtype).requires_grad_(self.train) if t.is_floating_point() else t for t in inputs
        )

    def function(self, variant: str) -> Callable[..., Any]:
        return self._by_hand if variant == "limit" and self._by_hand is not None else self.module

    def step(self, variant: str, compiled: Callable[..., Any], which: int) -> Tensors:
        return self._step(compiled, self.module, self._inputs[which])

    def _step(self, function: Callable[..., Any], module: nn.Module, inputs: Tensors) -> Tensors:
        with torch.set_grad_enabled(self.train):
            outputs = _tuple(function(*inputs))
            if not self.train:
                return outputs
            cotangents = [c.to(out.dtype) for c, out in zip(self._cotangents, outputs, strict=True)]
            leaves = [t for t in (*inputs, *module.parameters()) if t.requires_grad]
            return (*outputs, *torch.autograd.grad(outputs, leaves, cotangents))

    def errors(self, run: Callable[[], Tensors]) -> Errors:
        if self._expected is None:
            exact = copy.deepcopy(self.module).double()
            self._expected = self._step(exact, exact, self._cast(self._inputs[0], torch.float64))
        outputs = len(self._cotangents)
        pairs = [relative_error(x, y) for x, y in zip(run(), self._expected, strict=True)]
        found = {"out": worst(pairs[:outputs])}
        return found | ({"grad": worst(pairs[outputs:])} if self.train else {})


def _random(shape: Sequence[int]) -> Tensors:
    return (torch.randn(*shape),)


def _tuple(outputs: Any) -> Tensors:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def modules(
    suite: str,
    name: str,
    make: Callable[[], nn.Module],
    shape: Sequence[int],
    dtype: str,
    by_hand: Callable[[Any], Callable[..., Any]] | None = None,
    trains: Sequence[bool] = (False,),
    quick: bool = False,
    line: str = "",
) -> list[Case]:
    """A module as cases, in inference or training or both; a curve goes over the number of tokens."""
    tokens = math.prod(shape[:-1])
    return [
        Case(
            suite, f"{name} {'x'.join(map(str, shape))} {dtype}{' train' if train else ''}", dtype, train,
            partial(ModuleWork, make, by_hand, partial(_random, shape), dtype, train),
            line and f"{line} {dtype}", tokens, quick,
        )
        for train in trains
    ]  # fmt: skip


# The suites --------------------------------------------------------------------------------------------


def cases(device: str) -> list[Case]:
    """Every case of the operations and blocks, in sizes for a device."""
    return _cuda_cases() if device == "cuda" else _cpu_cases()


def _cuda_cases() -> list[Case]:
    rows, both, bf16 = rows_of, (False, True), "bfloat16"
    found: list[Case] = []
    for seq in (512, 1024, 2048, 4096, 8192):
        for train, title in ((False, "inference"), (True, "training")):
            row = rows([(1, 32, seq, 64)], ["causal"], trains=[train], kv_heads=8)
            found += attention(row, seq == 2048, f"causal, 32/8 heads of 64, {title}")
    found += attention(rows([(32, 12, 512, 64)], ["pad"]), quick=True)
    found += attention(rows([(64, 12, 197, 64)], ["none"]) + rows([(32, 12, 384, 64)], ["bias"]))
    found += attention(rows([(8, 16, 1024, 64)], ["bias_batch", "alibi"]))
    found += attention(rows([(1024, 6, 49, 32)], ["window"]) + rows([(16, 12, 512, 64)], ["bias_grad"]))
    found += attention(rows([(32, 32, 2048, 128)], ["pad"], trains=[False], kv_heads=8, q_len=1), quick=True)
    wide, narrow = (
        partial(Linears, 4096, (4096, 1024, 1024), False),
        partial(Linears, 768, (768,) * 3, True),
    )
    adapted = partial(Adapted, 2048, 2048, 16)
    curves: list[tuple[str, str, int, Any, Any, bool]] = [
        ("projections", "qkv 4096", 4096, wide, concatenated, True),
        ("projections", "qkv 768", 768, narrow, concatenated, True),
        ("projections", "gated_mlp 4096", 4096, partial(GatedMLP, 4096, 14336, False), bare_pair, False),
        ("projections", "linear_gelu 768", 768, partial(MLP, 768, 3072, False), bare, False),
        ("lora", "lora 2048 r16", 2048, adapted, _base, True),
    ]
    for tokens in (1, 16, 128, 1024, 4096):
        for suite, name, width, make, by_hand, quick in curves:
            shape = (tokens, width)
            found += modules(suite, name, make, shape, bf16, by_hand, quick=quick and tokens == 16, line=name)
        if tokens >= 1024:
            found += modules("lora", "lora 2048 r16", adapted, (tokens, 2048), bf16, trains=(True,))
    found += modules("projections", "qkv 768", narrow, (4096, 768), bf16, concatenated, (True,))
    lengths = torch.linspace(256, 512, 32).long().tolist()
    encoder = partial(EncoderLayer, 768, 12, lengths, 512)
    found += modules("blocks", "encoder_layer padded", encoder, (32, 512, 768), bf16, None, both, quick=True)
    decoder, hand = partial(DecoderLayer, 2048, 32, 8, 8192), _decoder_by_hand
    for batch, seq in ((4, 2048), (1, 4096)):
        shape = (batch, seq, 2048)
        found += modules("blocks", "decoder_layer", decoder, shape, bf16, hand, both, quick=seq == 2048)
    found += modules("blocks", "mlp gated", partial(GatedMLP, 2048, 8192), (4, 512, 2048), bf16, None, both)
    linears = partial(Projections, 4096, 1024, 14336)
    found += modules("blocks", "linears of a layer", linears, (4096, 4096), bf16, None, both)
    return found


def _cpu_cases() -> list[Case]:
    rows, both, fp32 = partial(rows_of, dtype="float32", trains=[False]), (False, True), "float32"
    found: list[Case] = []
    for seq in (128, 256, 512, 1024):
        curve = rows([(1, 12, seq, 64)], ["causal"])
        found += attention(curve, seq == 512, "causal, 12 heads of 64, inference")
    found += attention(rows([(1, 12, 512, 64)], ["pad"]), quick=True)
    found += attention(rows([(1, 12, 512, 64)], ["bias", "none"]))
    found += attention(rows([(2, 12, 128, 64)], ["bias_full"], trains=[True]), quick=True)
    found += attention(rows([(1, 32, 256, 64)], ["bias_batch"], kv_heads=8))
    qkv, hand = partial(Linears, 256, (256, 256, 256), True), concatenated
    for tokens in (16, 256):
        quick = tokens == 16
        found += modules(
            "projections", "qkv 256", qkv, (tokens, 256), fp32, hand, quick=quick, line="qkv 256"
        )
    gated, act = partial(GatedMLP, 256, 1024, False), partial(MLP, 256, 1024, False)
    found += modules("projections", "gated_mlp 256", gated, (64, 256), fp32, bare_pair)
    found += modules("projections", "linear_gelu 256", act, (64, 256), fp32, bare)
    lora = partial(Adapted, 256, 256, 16)
    found += modules("lora", "lora 256 r16", lora, (64, 256), fp32, _base, quick=True)
    found += modules("lora", "lora 256 r16", lora, (64, 256), fp32, None, (True,))
    encoder = partial(EncoderLayer, 256, 4, (64, 128), 128)
    found += modules("blocks", "encoder_layer padded", encoder, (2, 128, 256), fp32, None, both, quick=True)
    decoder = partial(DecoderLayer, 256, 4, 2, 512)
    found += modules("blocks", "decoder_layer", decoder, (1, 256, 256), fp32, _decoder_by_hand, both)
    found += modules("blocks", "mlp gated", partial(GatedMLP, 256, 1024), (2, 64, 256), fp32, None, (True,))
    linears = partial(Projections, 256, 64, 512)
    found += modules("blocks", "linears of a layer", linears, (64, 256), fp32, None, both)
    return found


def _base(module: Adapted) -> Callable[..., Any]:
    return module.base


def _decoder_by_hand(module: DecoderLayer) -> Callable[..., Any]:
    return module.by_hand
