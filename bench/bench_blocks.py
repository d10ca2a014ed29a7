"""Projections, adapters and layers, compiled by stock `torch.compile` and with the fusions: `make bench`.

The quick cases of `bench.cases`, in sizes for the device there is, under the policy in force. As in
`bench_attention`: a case is a group of two benchmarks, and each is compared with float64 before it is timed.
`python -m inductor_fusions bench` interleaves its variants, and is what comparisons come from.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench import cases, suites
from bench.common import synchronize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [case for case in cases.cases(DEVICE) if case.quick and case.suite != "attention"]


@functools.lru_cache(maxsize=1)
def compiled(case: cases.Case) -> tuple[dict[str, Callable[[], Any]], suites.Json]:
    """A call of each variant, and what is known of them."""
    return suites.compiled_variants(case.make(DEVICE), ("stock", "fused"), DEVICE)


@pytest.mark.benchmark(max_time=0.5)
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
@pytest.mark.parametrize("variant", ["stock", "fused"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_block(benchmark: Any, case: cases.Case, variant: str) -> None:
    calls, facts = compiled(case)
    assert not facts["failed"], facts["failed"]
    assert suites.within_budget(facts["error"], case.dtype), facts["error"]
    fused = facts["sites"].get("fused", 0)
    benchmark.group = f"{case.name}: {f'{fused} sites fused' if fused else 'left to stock'}"
    benchmark.extra_info |= {"fused": fused, "errors": facts["error"][variant]}
    call = calls[variant]

    def step() -> None:
        call()
        synchronize(DEVICE)

    benchmark(step)
