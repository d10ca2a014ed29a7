"""Kernels in their default configurations fit where a block has 99 KiB of shared memory (8.6, 8.9, 12.0).

No configuration is tuned there, and those of other capabilities are not taken over (`decisions.tiles`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from devtools import cuda_codegen
from inductor_fusions import decisions
from inductor_fusions.decisions import tables
from inductor_fusions.decisions.deciding import Query
from tests.block_mm import test_machine_code as linears
from tests.lora import test_machine_code as adapters

SMALL = (86, 89, 120)


def each_on_one(names: Iterable[Any]) -> list[Any]:
    """Each name on one of the capabilities in turn; on the others at night."""
    return [
        pytest.param(name, arch, marks=[] if number % 3 == place else [pytest.mark.long], id=f"{name}-{arch}")
        for number, name in enumerate(names)
        for place, arch in enumerate(SMALL)
    ]


def check(found: cuda_codegen.MachineCode) -> None:
    assert found.shared_limit == 99 * 1024
    assert found.shared_bytes <= found.shared_limit, found
    assert not found.overwritten, found


@pytest.mark.parametrize(("problem", "arch"), each_on_one(linears.DEFAULTS))
def test_linears(problem: tuple[str, int], arch: int) -> None:
    check(linears.code(linears.problem(*problem), None, arch))


@pytest.mark.parametrize(("name", "arch"), each_on_one(adapters.SHAPES))
def test_narrow_products(name: str, arch: int) -> None:
    check(adapters.narrow_code(adapters.SHAPES[name], arch))


@pytest.mark.parametrize(("name", "arch"), each_on_one(adapters.SUMS))
def test_sums(name: str, arch: int) -> None:
    check(adapters.accumulate_code(adapters.SUMS[name], arch))


@pytest.mark.parametrize(("name", "arch"), each_on_one(adapters.FEW))
def test_few_rows(name: str, arch: int) -> None:
    for found in adapters.pair_code(adapters.FEW[name], arch):
        check(found)


@pytest.mark.parametrize("arch", sorted(cuda_codegen.DEVICES))
def test_tiles_of_another_capability_are_never_taken(arch: int) -> None:
    rows = [row for row in (tables.load("nvidia_h200") or {})["narrow_mm"] if row["config"] is not None]
    problem = {name: value for name, value in rows[0].items() if name not in ("gain", "config")}
    with cuda_codegen.pretended(cuda_codegen.DEVICES[arch]):
        found = decisions.tiles(
            Query("narrow_mm", problem), torch.device("cuda", 0), lambda row: row["config"]
        )
    assert (found is not None) == (arch == 90)
