"""bench.outer_product: its grid and table; bench.outer_product_tiles: what it tries, interpreted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import outer_product as bench
from bench import outer_product_tiles as tiles
from tests.support.interactions import TIMES, table_of
from tests.support.processes import start


def test_grid_has_what_the_documentation_states() -> None:
    """The linear alone and the whole model, at both numbers of samples, in both dtypes, with a backward."""
    rows = bench.grid(quick=False)
    assert len({row.key for row in rows}) == len(rows)
    for kind in ("linear", "dlrm"):
        found = {(row.rows, row.dtype, row.train) for row in rows if row.kind == kind}
        wanted = {(n, d, t) for n in (2048, 128) for d in ("float32", "bfloat16") for t in (False, True)}
        assert wanted <= found


def test_table(tmp_path: Path) -> None:
    row = {
        "kind": "linear", "rows": 2048, "train": False, "p": 432, "q": 432, "columns": 512,
        "dtype": "float32", "fused": 1, "correct": True, **TIMES,
    }  # fmt: skip
    assert len(table_of(bench, row, "outer_product_linear", tmp_path)) == 2


@pytest.mark.parametrize("size", [2, 4])
def test_tiles_in_force_are_among_the_candidates(size: int) -> None:
    """Each candidate has what the kernel takes, and no other."""
    pytest.importorskip("triton")
    from inductor_fusions.fusions.outer_product_linear import launch

    force = launch.LINEAR[size]
    found = tiles.candidates(size)
    assert len({tiles.named(*candidate) for candidate in found}) == len(found) > 10
    assert all(set(tile) == set(force) for _, tile in found)
    assert any(block == launch.BLOCK_Q[size] for block, _ in found)


@pytest.mark.slow
def test_tiles_are_compared_and_timed(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    out = tmp_path / "tiles.json"
    command = ("-m", "bench.outer_product_tiles", "--quick", "--device", "cpu", "--out", str(out))
    done = start(*command, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 1
    for row in rows:
        assert len(row["times_us"]) == 2 and not row["skipped"] and row["gain"] >= 1.0, row
