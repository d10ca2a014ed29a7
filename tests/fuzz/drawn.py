"""Programs that the fuzzer draws, as tests: other ones for each seed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from inductor_fusions import config, testing

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.calls import Calls
from tests.fuzz.running import KINDS
from tests.fuzz.situations import Situated

#: Programs of each kind, in batches from one seed.
BATCHES, SIZE = 16, 8


def drawn(kind: str, number: int) -> list[Any]:
    """Some programs of a kind."""
    found: list[Any] = []

    @seed(number)
    @settings(
        max_examples=SIZE, deadline=None, database=None, phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(KINDS[kind]())
    def keep(program: Any) -> None:
        found.append(program[0] if isinstance(program, tuple) else program)

    keep()
    return found


@pytest.mark.parametrize("batch", range(BATCHES))
@pytest.mark.parametrize("kind", KINDS)
def test_drawn(kind: str, batch: int) -> None:
    task = json.loads(Path(os.environ["PROGRAMS_TASK"]).read_text())
    for program in drawn(kind, 1000 * task["seed"] + batch):
        given = program.arguments(program.calls[0]) if isinstance(program, Calls) else program.tensors()
        reference = program.plain().function() if isinstance(program, Situated) else None
        with config.patch(attention_kernel=program.kernel):
            testing.check(program.function(), given, fused=None, reference=reference)
