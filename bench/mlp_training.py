"""Measure what fusing an MLP can bring in training: a step of forward and backward, beside its GEMMs alone.

    llama-1b t4096      (silu(x Wg') * (x Wu')) Wd', 4096 tokens of width 2048, 8192 hidden columns
    bert-base t16384    gelu(x W1' + b1) W2' + b2

    stock          torch.compile, forward and backward
    max_autotune   the same with mode="max-autotune-no-cudagraphs", which fuses epilogues where they pay
    gemms          the GEMMs of the step alone, by the library: what a step would take if the activation and
                   its gradient were free epilogues of GEMMs as fast as the library's
    up, hidden     those of them that would carry the epilogues: the product in front of the activation, and
                   the gradient of the hidden layer
    up_triton, hidden_triton   the same by the fastest of Inductor's Triton templates, persistent or not, bare

An epilogue needs a kernel that can have one. With Triton's, a fused step takes at least

    gemms - up - hidden + up_triton + hidden_triton

    python -m bench.mlp_training --out bench/results/mlp_training_h100.json --budget 300
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from bench import tuning
from bench.common import DTYPES, Json, apart, both_clocks, compiled_only, fresh_cache, peak_bytes, skipping
from inductor_fusions import config

#: Width, hidden columns, and whether the MLP is gated.
MODELS = {
    "llama-1b": (2048, 8192, True),
    "llama-8b": (4096, 14336, True),
    "bert-base": (768, 3072, False),
    "vit-l": (1024, 4096, False),
    "tiny": (32, 64, True),
    "tiny plain": (32, 64, False),
}
#: Options of `torch.compile`, by variant.
COMPILED: dict[str, Json] = {
    "stock": {},
    "max_autotune": {"mode": "max-autotune-no-cudagraphs"},
    "triton": {
        "options": {
            "max_autotune": True, "max_autotune_gemm_backends": "TRITON",
            "triton.enable_persistent_tma_matmul": True,
        }
    },
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        model: a name in `MODELS`.
        tokens: rows of x.
    """

    model: str
    tokens: int

    @property
    def key(self) -> str:
        """Its name."""
        return f"{self.model} t{self.tokens}"


def grid(quick: bool) -> list[Row]:
    """What is measured; the most wanted first."""
    if quick:
        return [Row("tiny", 24), Row("tiny plain", 24)]
    pairs = ("llama-1b", 4096), ("llama-8b", 4096), ("bert-base", 16384), ("llama-1b", 16384)
    return [Row(*pair) for pair in (*pairs, ("llama-8b", 16384), ("vit-l", 16384))]


def gated(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """x (tokens, width), first (2 * hidden, width), second (width, hidden), no biases."""
    hidden = second.shape[1]
    return F.linear(F.silu(F.linear(x, first[:hidden])) * F.linear(x, first[hidden:]), second)


def plain(
    x: torch.Tensor, first: torch.Tensor, second: torch.Tensor, b1: torch.Tensor, b2: torch.Tensor
) -> torch.Tensor:
    """The same with first (hidden, width), gelu and biases."""
    return F.linear(F.gelu(F.linear(x, first, b1)), second, b2)


def gemms(is_gated: bool, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> dict[str, Callable]:
    """The GEMMs of a step, and the two that would carry an epilogue, with results in memory that is there."""
    parts = first.chunk(2) if is_gated else (first,)
    hidden = second.shape[1]
    each = [x.new_empty(len(x), hidden).normal_() for _ in parts]
    y, dx = torch.empty_like(x), torch.empty_like(x)
    dweights = [torch.empty_like(part) for part in parts]
    dsecond, dh = torch.empty_like(second), torch.empty_like(each[0])

    def up() -> None:
        for part, out in zip(parts, each, strict=True):
            torch.mm(x, part.t(), out=out)

    def hidden_gradient() -> None:
        torch.mm(y, second, out=dh)

    def all_of_them() -> None:
        up()
        torch.mm(each[0], second.t(), out=y)
        hidden_gradient()
        torch.mm(y.t(), each[0], out=dsecond)
        for number, (part, out) in enumerate(zip(parts, dweights, strict=True)):
            torch.mm(each[number].t(), x, out=out)
            if number:
                torch.addmm(dx, each[number], part, out=dx)
            else:
                torch.mm(each[number], part, out=dx)

    return {"gemms": all_of_them, "up": up, "hidden": hidden_gradient}


def measure(row: Row, device: str, quick: bool) -> Json:
    """One row of the results."""
    torch.manual_seed(0)
    dtype = "bfloat16" if device == "cuda" else "float32"
    width, hidden, is_gated = MODELS[row.model]
    shapes = [(2 * hidden if is_gated else hidden, width), (width, hidden)]
    shapes += [] if is_gated else [(hidden,), (width,)]
    scales = width**-0.5, hidden**-0.5, 0.1, 0.1
    x, dy = (torch.randn(row.tokens, width, device=device).to(DTYPES[dtype]) for _ in range(2))
    weights = [
        (torch.randn(shape, device=device) * scale).to(DTYPES[dtype])
        for shape, scale in zip(shapes, scales, strict=False)
    ]
    leaves = [t.requires_grad_() for t in (x, *weights)]
    function = gated if is_gated else plain
    calls: Json = {}
    skipped: Json = {}
    found: Json = {}
    torch._dynamo.reset()
    names = ["stock"] if quick else ["stock", "max_autotune"]
    with config.patch(enabled=False):
        for name in names:
            with skipping(skipped, name), fresh_cache():
                compiled = torch.compile(apart(function, name), dynamic=False, **COMPILED[name])

                def step(compiled: Callable[..., torch.Tensor] = compiled) -> tuple[torch.Tensor, ...]:
                    return torch.autograd.grad(compiled(*leaves), leaves, dy)

                step()
                calls[name] = step
        with torch.no_grad():
            bare = gemms(is_gated, x, *weights[:2])
            for name, operands in {"up": (x, weights[0].t()), "hidden": (dy, weights[1])}.items():
                if device != "cuda":
                    continue
                with fresh_cache():
                    product = torch.compile(apart(torch.mm, name), dynamic=False, **COMPILED["triton"])
                    product(*operands)
                bare[f"{name}_triton"] = lambda product=product, operands=operands: product(*operands)
        calls |= {name: torch.no_grad()(call) for name, call in bare.items()}
        with compiled_only():
            found["peak_bytes"] = {name: peak_bytes(calls[name], device) for name in names if name in calls}
            rounds, block = (3, 0.001) if quick else (7, 0.05)
            times = both_clocks(calls, device, rounds, block)
    return {
        "key": row.key, "model": row.model, "width": width, "hidden": hidden, "gated": is_gated,
        "tokens": row.tokens, "dtype": dtype, "persistent": True, **times, **found, "skipped": skipped,
        "limits": limits(times.get("device_us") or times["times_us"]),
    }  # fmt: skip


def limits(times: Json) -> Json:
    """How much faster than the better form of stock a step can be: with free epilogues, and in Triton."""
    stock = min(times[name] for name in ("stock", "max_autotune") if name in times)
    found = {"free": round(stock / times["gemms"], 3)}
    if "up_triton" in times:
        fused = times["gemms"] + sum(times[f"{n}_triton"] - times[n] for n in ("up", "hidden"))
        found["triton"] = round(stock / fused, 3)
    return found


def main() -> None:
    """The command line."""
    tuning.script(
        "bench.mlp_training", __doc__, grid, measure,
        lambda found: f"{found.get('device_us') or found['times_us']}, at most {found['limits']}",
    )  # fmt: skip


if __name__ == "__main__":
    main()
