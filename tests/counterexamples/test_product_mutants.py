"""Linears, adapters and interactions that are fused, of which one detail is changed.

They are those of `tests/cases/fusions.py`, decided as on a GPU; the graphs run on the CPU.
"""

from __future__ import annotations

from functools import partial

import pytest

pytest.importorskip("triton")

from tests.cases.fusions import CASES
from tests.counterexamples.mutator import verify
from tests.support.on_a_gpu import judge

#: `test_mutants.py` has attentions, and `tests/linear_cross_entropy` losses.
PRODUCTS = {name: case for name, case in CASES.items() if name not in ("attention", "loss")}


@pytest.mark.slow
@pytest.mark.parametrize("name", PRODUCTS)
def test_some_mutants(name: str) -> None:
    case = PRODUCTS[name]
    every = 8 if case.early else 48  # which have fewer mutants, that take less time
    judged = partial(judge, early=case.early)
    assert verify(case.function, case.inputs(), judged, lambda index: index % every == len(name) % every)


@pytest.mark.long
@pytest.mark.parametrize("name", PRODUCTS)
def test_all_mutants(name: str) -> None:
    case = PRODUCTS[name]
    assert verify(case.function, case.inputs(), partial(judge, early=case.early))
