"""Attention written out, compiled by stock `torch.compile` and with the fusions: `make bench`.

A small selection of the shapes of `bench.attention`, in sizes for a CPU, under the policy in force. A
case is a group of two benchmarks, stock and fused, which run one after the other: look at the medians of a
group. `python -m bench.models` interleaves its variants, and is what figures in the documentation come from.

Correct before fast: before a case is timed, output and gradients of the code that is timed are compared with
float64. A fused result out of the error budget fails.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import inductor_fusions
from bench.attention.inputs import Inputs, allocate, fill
from bench.attention.reference import check, reference
from bench.attention.rows import Row, rows_of
from bench.attention.spellings import Tensors, unfused
from bench.common import DTYPES, Json, error_limit, synchronize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

rows = functools.partial(rows_of, dtype="float32")
CASES = [
    *rows([(1, 12, 512, 64)], ["pad", "bias"], trains=[False]),
    *rows([(1, 12, 512, 64)], ["causal"], trains=[True]),
    *rows([(2, 12, 128, 64)], ["bias_full", "bias_grad"], trains=[True]),
    *rows([(1, 32, 256, 64)], ["bias_batch"], trains=[False], kv_heads=8),
    *rows([(1, 16, 1024, 64)], ["pad"], trains=[False], q_len=1),
    *rows_of([(1, 12, 512, 64)], ["none"], dtype="bfloat16", trains=[True]),
]


def run(function: Any, row: Row, inputs: Inputs) -> Tensors:
    """Output, and in training the gradients, of one call."""
    with torch.set_grad_enabled(row.train):
        out = function(*inputs.arguments("unfused"))
        found = torch.autograd.grad(out, inputs.leaves(row), inputs.cotangent) if row.train else ()
    synchronize(DEVICE)
    return (out, *found)


@functools.lru_cache(maxsize=1)
def compiled(row: Row) -> tuple[dict[str, Callable[[], Tensors]], dict[str, Json], int]:
    """(variant -> a call of it, variant -> errors against float64, number of sites that were fused)."""
    torch._dynamo.reset()
    inputs = allocate(row, DEVICE)
    fill(row, inputs, seed=0)
    expected, cut = reference(row, inputs)
    before = inductor_fusions.report().count()
    calls, errors = {}, {}
    for variant in ("stock", "fused"):

        def attention(*args: torch.Tensor) -> torch.Tensor:  # one of its own for each variant
            return unfused(row, *args)

        function = torch.compile(attention, fullgraph=True, dynamic=False)
        call = functools.partial(run, function, row, inputs)
        # A cache would serve code without a report of what was fused.
        with (
            torch._inductor.config.patch(force_disable_caches=True),
            inductor_fusions.config.patch(enabled=variant == "fused"),
        ):
            errors[variant] = check(row, call, expected, cut)
        calls[variant] = call
    return calls, errors, inductor_fusions.report().count() - before


@pytest.mark.benchmark(max_time=0.5)
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
@pytest.mark.parametrize("variant", ["stock", "fused"])
@pytest.mark.parametrize("row", CASES, ids=lambda row: row.key.replace(" ", "-"))
def test_attention(benchmark: Any, row: Row, variant: str) -> None:
    calls, errors, fused = compiled(row)
    for name, error in errors[variant].items():
        assert error <= error_limit(errors["stock"][name], DTYPES[row.dtype]), (name, errors)
    benchmark.group = f"{row.key}: {'fused' if fused else 'left to stock, the same code twice'}"
    benchmark.extra_info |= {"fused": bool(fused), "errors": errors[variant]}
    benchmark(calls[variant])
