"""Linears of real models as grouped GEMMs: the grid, the operands, and each way to compute them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench import tuning_linears
from bench.common import DTYPES
from inductor_fusions.worker.linears import multiplied

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Row:
    """One grouped GEMM to measure.

    Attributes:
        kind: as `problem.Problem` has it.
        tokens: rows of the input; for gradients of weights, their K.
        inner: widths of the inputs: one for linears that share theirs, one for each term of a sum. For
            gradients of weights: the width of the input.
        outer: widths of the outputs; for gradients of weights, of the linears' outputs.
        dtype: a key of `DTYPES`.
        activation: what follows; of the first of a gated pair.
        conv1d: whether weights have the shape (in, out), as those of GPT-2 have, in place of (out, in).
    """

    kind: str
    tokens: int
    inner: tuple[int, ...]
    outer: tuple[int, ...]
    dtype: str = "bfloat16"
    activation: str = ""
    conv1d: bool = False

    @property
    def key(self) -> str:
        """How `--only` and the progress name it."""
        sizes = f"{'+'.join(map(str, self.inner))}->{'+'.join(map(str, self.outer))}"
        words = [self.kind, sizes, "conv1d" if self.conv1d else "", self.activation, f"m{self.tokens}"]
        return " ".join(filter(None, [*words, self.dtype]))

    @property
    def groups(self) -> list[int]:
        """Group of each product."""
        return [0] * len(self.inner) if self.kind == "sum" else list(range(len(self.outer)))


SMALL, LARGE = (1, 4, 16, 32, 64), (128, 256, 512, 1024, 2048, 4096, 8192)
#: Rows whose neighbours bracket all that lie between, for what is wanted at many sizes.
FEW = (512, 2048, 8192)
ODD = (200, 577, 1576, 4100)


def grid() -> list[Row]:
    """What is measured, the widths of the documentation first."""
    rows: list[Row] = []
    for width, outs in (
        (4096, (4096, 1024, 1024)), (768, (768,) * 3), (1024, (1024,) * 3), (2048, (2048, 512, 512)),
        (4096, (4096,) * 3),
    ):  # fmt: skip
        rows += [Row("shared_a", m, (width,), outs) for m in SMALL + LARGE]
    for width in (768, 1024):  # batches of encoders
        rows += [Row("shared_a", 16384, (width,), (width,) * 3)]
        rows += [Row("sum", m, (width,) * 3, (width,)) for m in (4096, 8192, 16384)]
        rows += [Row("shared_b", m, (width,), (width,) * 3) for m in (4096, 8192, 16384)]
    for width, hidden, activation in ((4096, 14336, "silu"), (2048, 8192, "silu"), (4096, 11008, "silu")):
        rows += [Row("gated", m, (width,), (hidden,) * 2, activation=activation) for m in SMALL + LARGE]
        rows += [Row("shared_a", m, (width,), (hidden,) * 2) for m in LARGE[3:]]
        rows += [Row("sum", m, (hidden,) * 2, (width,)) for m in LARGE[3:]]
        rows += [Row("shared_b", m, (width,), (hidden,) * 2) for m in LARGE[3:]]
    for width, hidden, activation in (
        (2304, 9216, "gelu_tanh"), (4096, 12288, "silu"), (2560, 9728, "silu"), (3584, 18944, "silu"),
        (5120, 13824, "silu"), (768, 2048, "gelu_tanh"),
    ):  # fmt: skip
        rows += [Row("gated", m, (width,), (hidden,) * 2, activation=activation) for m in (1, 16, *FEW)]
        rows += [Row("sum", m, (hidden,) * 2, (width,)) for m in FEW[1:]]
    rows += [Row("shared_a", m, (2304,), (2048, 1024, 1024)) for m in (1, 16, *FEW)]
    for width, outs in ((4096, (4096, 1024, 1024)), (2048, (2048, 512, 512)), (768, (768,) * 3)):
        rows += [Row("sum", m, outs, (width,)) for m in LARGE[3:]]
        rows += [Row("shared_b", m, (width,), outs) for m in LARGE[3:]]
    for width, hidden in ((768, 3072), (1024, 4096)):
        for activation, sizes in (
            ("gelu", (*SMALL, *LARGE, 16384)),
            ("relu", (1, 16, *FEW, 16384)),
            ("gelu_tanh", (1, 16, *FEW, 16384)),
        ):
            rows += [Row("linear", m, (width,), (hidden,), activation=activation) for m in sizes]
        sizes = (1, 16, *FEW, 16384)
        rows += [Row("linear", m, (width,), (hidden,), activation="gelu_tanh", conv1d=True) for m in sizes]
    # A few tokens: the output of attention, the second linear of an MLP, and the head, of Llama 8B and 1B,
    # Qwen2.5 1.5B and 7B, Gemma-2 2B, Llama-2 7B and 13B, BERT and GPT-2.
    for width, out in (
        (4096, 4096), (14336, 4096), (4096, 128256), (11008, 4096), (4096, 32000), (2048, 2048), (8192, 2048),
        (2048, 128256), (3584, 3584), (18944, 3584), (3584, 152064), (1536, 1536), (8960, 1536),
        (1536, 151936), (2048, 2304), (9216, 2304), (2304, 256000), (5120, 5120), (13824, 5120), (1024, 1024),
        (4096, 1024), (768, 768), (3072, 768), (768, 50304),
    ):  # fmt: skip
        rows += [Row("linear", m, (width,), (out,)) for m in SMALL]
    return list(dict.fromkeys(rows + _odd_widths()))


def _odd_widths() -> list[Row]:
    """Widths and numbers of tokens that fill a device badly, where the choice of tiles counts most.

    Of Qwen2.5 0.5B, 1.5B and 7B, Llama-3.2 3B, Gemma-3 1B, Qwen3 1.7B and 4B, Mistral-Nemo, gpt-oss, SigLIP
    so400m, ViT-H, ViT-bigG, and DINO's ViT-S.
    """
    rows: list[Row] = []
    for width, outs in (
        (896, (896, 128, 128)), (1536, (1536, 256, 256)), (3584, (3584, 512, 512)),
        (3072, (3072, 1024, 1024)), (1152, (1024, 256, 256)), (2560, (4096, 1024, 1024)),
        (5120, (4096, 1024, 1024)), (2880, (4096, 512, 512)), (1152, (1152,) * 3), (1280, (1280,) * 3),
        (1664, (1664,) * 3), (384, (384,) * 3),
    ):  # fmt: skip
        rows += [Row("shared_a", m, (width,), outs) for m in ODD]
        rows += [Row("sum", m, outs, (width,)) for m in ODD[2:]]
        rows += [Row("shared_b", m, (width,), outs) for m in ODD[2:]]
    for width, hidden, activation in (
        (896, 4864, "silu"), (1536, 8960, "silu"), (3072, 8192, "silu"), (1152, 6912, "gelu_tanh"),
        (2048, 6144, "silu"), (5120, 14336, "silu"),
    ):  # fmt: skip
        rows += [Row("gated", m, (width,), (hidden,) * 2, activation=activation) for m in ODD]
        rows += [Row("sum", m, (hidden,) * 2, (width,)) for m in ODD[2:]]
    for width, hidden, activation in (
        (1152, 4304, "gelu_tanh"), (1280, 5120, "gelu"), (1664, 8192, "gelu"), (384, 1536, "gelu"),
        (3072, 12288, "gelu_tanh"), (512, 2048, "silu"),
    ):  # fmt: skip
        rows += [Row("linear", m, (width,), (hidden,), activation=activation) for m in ODD]
    # Near widths that had no neighbour: Llama-3.2 3B, Qwen2.5 1.5B, T5 large, ViT-H, OPT 1.3B, ViT-g.
    for width, hidden, activation in ((3072, 8192, "silu"), (1536, 8960, "silu"), (1024, 2816, "gelu_tanh")):
        rows += [Row("gated", m, (width,), (hidden,) * 2, activation=activation) for m in (128, *FEW)]
    for width, hidden, activation in ((1280, 5120, "gelu"), (2048, 8192, "relu"), (768, 3072, "silu")):
        rows += [Row("linear", m, (width,), (hidden,), activation=activation) for m in FEW]
    return rows + [Row("shared_a", m, (1408,), (1408,) * 3) for m in ODD]


@dataclass
class Operands:
    """One set of tensors: a and b of each product, in the layouts that a graph has them in."""

    a: Tensors
    b: Tensors

    def flat(self) -> Tensors:
        """Each tensor once."""
        return list({id(t): t for t in (*self.a, *self.b)}.values())


def make(row: Row, device: str, seed: int) -> Operands:
    """Random operands."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        made = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        return (made / shape[-1] ** 0.5).to(DTYPES[row.dtype])

    if row.kind == "sum":  # dX = sum of dY_i @ W_i
        return Operands([rand(row.tokens, n) for n in row.inner], [rand(n, row.outer[0]) for n in row.inner])
    if row.kind == "shared_b":  # dW_i = dY_i^T @ X
        x = rand(row.tokens, row.inner[0])
        return Operands([rand(row.tokens, n).t() for n in row.outer], [x] * len(row.outer))
    x = rand(row.tokens, row.inner[0])
    weights = [rand(n, row.inner[0]).t() for n in row.outer]
    return Operands([x] * len(row.outer), [w.contiguous() if row.conv1d else w for w in weights])


def unfused(row: Row, a: Tensors, b: Tensors) -> Tensors:
    """What the graph of a model has."""
    return multiplied(row.kind, row.activation, a, b)


def fused(row: Row, a: Tensors, b: Tensors) -> Tensors:
    """The same as one operation."""
    from inductor_fusions import ops

    activations = [row.activation, *[""] * row.groups[-1]]
    return ops.block_mm(a, b, groups=row.groups, gated=row.kind == "gated", activations=activations)


def problem(row: Row, operands: Operands) -> Any:
    """The problem that the lowering sees."""
    from inductor_fusions.block_mm.problem import of_operands

    def shape(t: torch.Tensor) -> tuple[Any, Any]:
        return tuple(t.shape), tuple(t.stride())

    return of_operands(
        [shape(t) for t in operands.a],
        [shape(t) for t in operands.b],
        row.groups,
        row.kind == "gated",
        DTYPES[row.dtype],
        [(id(x), id(w)) for x, w in zip(operands.a, operands.b, strict=True)],
        row.activation,
    )


Run = Callable[[Operands], Tensors]


def compiled(row: Row, fn: Callable[..., Tensors], operands: Operands, **options: Any) -> Run:
    """A function under `torch.compile`, compiled for `operands`."""
    run = tuning_linears.compiled(fn, row, **options)
    run(operands.a, operands.b)
    return lambda one: run(one.a, one.b)  # type: ignore[no-any-return]


def stock(row: Row, operands: Operands, mode: str | None) -> Run:
    """Stock's own, with the fusions switched off."""
    from inductor_fusions import config

    with config.patch(enabled=False):
        return compiled(row, unfused, operands, mode=mode)


def ours(row: Row, operands: Operands, chosen: Any) -> Run:
    """One configuration."""
    from unittest import mock

    from inductor_fusions import config
    from inductor_fusions.block_mm import heuristics

    with config.patch(policy="always"), mock.patch.object(heuristics, "choose", lambda *given: chosen):
        return compiled(row, fused, operands)


def bare(row: Row) -> Run:
    """The products alone, by the library."""

    def run(one: Operands) -> Tensors:
        return [x @ w for x, w in zip(one.a, one.b, strict=True)]

    return run


def limit(row: Row, sets: Sequence[Operands]) -> Run:
    """One product of the library on concatenated operands, which are made here."""
    joined: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for one in sets:
        if row.kind == "sum":
            pair = torch.cat(one.a, dim=1), torch.cat(one.b, dim=0)
        elif row.kind == "shared_b":
            pair = torch.cat([x.t() for x in one.a], dim=1).t(), one.b[0]
        else:
            pair = one.a[0], torch.cat([w.t() for w in one.b], dim=0).t()
        joined[id(one)] = pair
    return lambda one: [joined[id(one)][0] @ joined[id(one)][1]]
