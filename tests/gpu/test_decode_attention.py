"""Attention of a few queries to a cache on a CUDA device: numbers, garbage, repeats, and CUDA graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from inductor_fusions import config, testing
from inductor_fusions.fusions.attention.decode import plan
from tests.attention import decode_interpreted as cases
from tests.attention.decode_interpreted import CASES, Case, attend
from tests.attention.test_decode import repeated
from tests.support.errors import relative

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16]
LARGE = Case(
    batch=3, heads=32, kv_heads=8, keys=4096, dim=128, v_dim=128, scale=128**-0.5, tile=(64, 16),
    used=((1000, 3000), (0, 1024), (4090, 4096)), mask="bfloat16",
)  # fmt: skip
SHAPES: dict[str, Case] = {
    **CASES,
    "a cache": LARGE,
    "a cache, boolean": replace(LARGE, mask="boolean"),
    "a cache, no mask": replace(LARGE, mask="", garbage=0.0),
    "a cache, 16 queries": replace(LARGE, mask="float32", queries=16, shape="bq"),
    "a cache, heads of their own": replace(LARGE, kv_heads=32, keys=4097),
    "a cache, head dim 96": replace(LARGE, dim=96, v_dim=96, layout="bshd"),
    "a cache, head dim 256": replace(LARGE, dim=256, v_dim=256, tile=(32, 7)),
    "a cache, one part": replace(LARGE, tile=(128, 1), dim=64, v_dim=64),
    "a cache that is all hidden": replace(LARGE, used=((0, 0), (0, 1024), (9, 9)), garbage=1.0),
}


def inputs(case: Case, dtype: torch.dtype) -> tuple[Any, ...]:
    """q, k, v, mask, and what is right, on the device."""
    return tuple(None if x is None else x.cuda() for x in cases.prepared(case, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_numbers(name: str, dtype: torch.dtype) -> None:
    """About as exact as SDPA's math, whatever is in keys that nobody sees."""
    case = SHAPES[name]
    q, k, v, mask, right = inputs(case, dtype)
    found = attend(q, k, v, mask, (*case.tile, 4, 2), case.scale, case.causal)
    assert found.dtype == dtype and found.transpose(1, 2).is_contiguous()
    assert relative(found, right, 1e-3) < torch.finfo(dtype).eps


@pytest.mark.parametrize("tiles", [(32, 64, 2, 3), (64, 8, 4, 3), (64, 1, 4, 1), (128, 5, 8, 2)])
@pytest.mark.parametrize("mask", ["boolean", "bfloat16", "float32"])
def test_tiles(tiles: tuple[int, ...], mask: str) -> None:
    case = replace(LARGE, mask=mask)
    q, k, v, given, right = inputs(case, torch.bfloat16)
    found = attend(q, k, v, given, tiles, case.scale)
    assert relative(found, right, 1e-3) < torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("batch", [1, 3])
def test_more_elements_than_int32_holds(batch: int) -> None:
    """Caches of more than 2^31 elements: of several samples, and the end of a long one."""
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GB")
    keys = 2**31 // (batch * 8 * 128) + 4096
    q = torch.randn(batch, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(batch, 8, keys, 128, device="cuda", dtype=torch.bfloat16)
    v = torch.randn_like(k)
    mask = torch.zeros(batch, 1, 1, keys, device="cuda", dtype=torch.bool)
    mask[..., -1000:] = True
    found = attend(q, k, v, mask, (64, 8, 4, 2))
    part = [x[..., -1000:, :].double().repeat_interleave(4, 1) for x in (k, v)]
    right = (q.double() @ part[0].mT * 128**-0.5).softmax(-1) @ part[1]
    assert relative(found, right, 1e-3) < torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("kind", ["boolean", "bfloat16", ""])
@pytest.mark.parametrize("queries", [1, 5])
def test_compiled(kind: str, queries: int) -> None:
    """The whole way through Inductor, against stock's SDPA."""
    case = replace(LARGE, mask=kind, queries=queries, shape="bq", garbage=0.0)
    q, k, v, mask, _ = inputs(case, torch.bfloat16)
    given = [x for x in (q, k, v, mask) if x is not None]
    with config.patch(attention_kernel="decode", strict=True):
        testing.check(repeated, given, train=False, kernel="decode")


def test_symbolic_sizes() -> None:
    with config.patch(attention_kernel="decode", strict=True), torch.no_grad():
        compiled = torch.compile(repeated)
        for number, (batch, keys) in enumerate(((3, 4096), (5, 1000), (9, 2049))):
            case = replace(LARGE, batch=batch, keys=keys, used=((0, 70),) * batch)
            q, k, v, mask, right = inputs(case, torch.bfloat16)
            for tensor, dims in ((q, 0), (k, (0, 2)), (v, (0, 2)), (mask, (0, 3))):
                torch._dynamo.mark_dynamic(tensor, dims)
            with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
                found = compiled(q, k, v, mask)
            assert relative(found, right, 1e-3) < torch.finfo(torch.bfloat16).eps


def test_cuda_graph_reads_the_mask_anew() -> None:
    """One graph serves a cache that fills: what is seen is found at run time."""
    case = replace(LARGE, mask="bfloat16", garbage=0.0)
    q, k, v, mask, _ = inputs(case, torch.bfloat16)
    low = torch.finfo(torch.bfloat16).min
    with config.patch(attention_kernel="decode", strict=True), torch.no_grad():
        compiled = torch.compile(repeated, mode="reduce-overhead")
        for used in (1, 63, 64, 65, 500, 4096, 2, 0):
            mask.fill_(low)
            mask[..., :used] = 0
            found = compiled(q, k, v, mask).clone()
            right = cases.exact(case, *(x.cpu() for x in (q, k, v, mask))).cuda()
            assert relative(found, right, 1e-3) < torch.finfo(torch.bfloat16).eps, used


def test_default_tiles_run_at_each_width() -> None:
    for dim in (64, 80, 96, 128, 192, 256):
        case = replace(LARGE, dim=dim, v_dim=dim, queries=8, shape="bq")
        shape = plan.Shape(3, 32, 8, 8, 4096, dim, torch.bfloat16, "additive")
        q, k, v, mask, right = inputs(case, torch.bfloat16)
        found = attend(q, k, v, mask, plan.tiles(shape, q.device), case.scale)
        assert relative(found, right, 1e-3) < torch.finfo(torch.bfloat16).eps, dim
