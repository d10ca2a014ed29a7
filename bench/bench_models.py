"""Whole models, compiled by stock `torch.compile` and with the fusions: `make bench`.

A few cases of `bench.models` with two layers, in sizes for a CPU, under the policy in force; outputs and
gradients are compared with float64 before a case is timed. `python -m bench.models` measures all of them in
full size.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from bench import model_cases
from bench.common import Json, synchronize
from bench.models.correctness import check, is_correct, make_reference
from bench.models.variants import Variant, make_variants

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = (
    "bert-base eager padded b32 s512",
    "bert-base eager b32 s512 train",
    "gpt2 eager b16 s1024",
    "t5-base encoder padded b16 s512",
)
CASES = [
    replace(model_cases.quick_case(case), dtype="float32") for case in model_cases.CASES if case.name in NAMES
]


@functools.lru_cache(maxsize=1)
def compiled(case: model_cases.Case) -> tuple[dict[str, Variant], Json]:
    """The variants, and their errors."""
    torch._dynamo.reset()
    model = model_cases.build(case, case.attn, DEVICE, quick=True)
    inputs = model_cases.make_inputs(case, model_cases.model_config(case, True)[1], DEVICE)
    variants = make_variants(case, model, inputs, ("stock", "fused"), DEVICE, True)
    for variant in variants.values():
        variant.first_step(DEVICE)
    reference = make_reference(case, model, inputs, DEVICE, True)
    errors = check(case, variants, reference, {}, DEVICE)[0]
    return variants, errors


@pytest.mark.benchmark(max_time=0.5)
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
@pytest.mark.parametrize("variant", ["stock", "fused"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_model(benchmark: Any, case: model_cases.Case, variant: str) -> None:
    variants, errors = compiled(case)
    assert is_correct(case, errors), errors
    fused = sum(site.verdict == "fused" for site in variants["fused"].sites)
    benchmark.group = f"{case.name}: {f'{fused} sites fused' if fused else 'left to stock'}"
    benchmark.extra_info |= {"fused": fused, "errors": errors[variant]}

    def step() -> None:
        variants[variant].step()
        synchronize(DEVICE)

    benchmark(step)
