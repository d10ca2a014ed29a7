"""Attention of a few queries to a cache: the operation and its kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from inductor_fusions.fusions.attention.decode import op, plan
from tests.attention import decode_interpreted
from tests.attention.decode_interpreted import CASES, attend
from tests.attention.support import qkv, visible
from tests.support.interpreter import errors_of

DTYPE = torch.bfloat16
#: Half an ulp of float16, once for the weights and once for the result.
LIMIT = 6e-4

errors = errors_of("tests.attention.decode_interpreted")


@pytest.mark.parametrize("name", CASES)
def test_numbers_of_the_kernels(name: str, errors: Callable[[str], float]) -> None:
    assert errors(name) < LIMIT


@pytest.mark.parametrize("name", CASES)
def test_numbers_without_kernels(name: str) -> None:
    """What torch makes of the operation, in float64."""
    case = CASES[name]
    q, k, v, mask, right = decode_interpreted.prepared(case, torch.float64)
    found = attend(q, k, v, mask, (*case.tile, 4, 2), case.scale, case.causal)
    # A row in which all keys hold the lowest number of float32 has the digits of float32.
    torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-7)


def test_flops() -> None:
    q, k, v = torch.ones(2, 4, 3, 8), torch.ones(2, 2, 5, 8), torch.ones(2, 2, 5, 6)
    with FlopCounterMode(display=False) as counter:
        op.DECODE_ATTENTION(q, k, v, None, None, None, 0.3, False, 3, [16, 3, 4, 2])
    assert counter.get_total_flops() == 2 * 2 * 4 * 3 * 5 * (8 + 6)


def test_tiles_that_are_seen() -> None:
    """Those in which any query of the heads that share keys sees a key, in order."""
    mask = torch.zeros(2, 4, 1, 50, dtype=torch.bool)
    mask[0, 1, 0, 17], mask[0, 0, 0, 49], mask[1, 3, 0, 0] = True, True, True
    found = op.DECODE_TILES(mask, None, 2, 16)
    assert found[0, 0, :3].tolist() == [2, 1, 3] and found[0, 1, 0] == 0
    assert found[1, 0, 0] == 0 and found[1, 1, :2].tolist() == [1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_hides(dtype: torch.dtype) -> None:
    """The lowest number beside a key that is seen; -inf always; nothing else."""
    least = torch.finfo(dtype).min
    rows = torch.tensor([[0.0, least], [least, least], [least, -math.inf], [-math.inf, -math.inf]])
    found = op.lowest_of(rows.to(dtype)[:, None, None, :], dtype)
    assert found.flatten().tolist() == [least, -math.inf, -math.inf, -math.inf]


@pytest.mark.parametrize(("change", "message"), [
    (lambda a: {**a, "k": a["k"][:, :, :, :8]}, "heads"),
    (lambda a: {**a, "q": a["q"][0]}, "4-D"),
    (lambda a: {**a, "v": a["v"].double()}, "dtype"),
    (lambda a: {**a, "causal": True}, "either a mask or is_causal"),
    (lambda a: {**a, "mask": a["mask"].int()}, "boolean or floating"),
    (lambda a: {**a, "mask": a["mask"][..., :5]}, "one column"),
])  # fmt: skip
def test_arguments_that_do_not_fit(change: Any, message: str) -> None:
    q, k, v = qkv(1, 13, heads=4, kv_heads=2, grad=False)
    given = change({"q": q, "k": k, "v": v, "mask": visible(2, 1, 1, 13), "causal": False})
    with pytest.raises((ValueError, RuntimeError), match=message):
        op.DECODE_ATTENTION(
            *(given[name] for name in "qkv"),
            given["mask"],
            None,
            None,
            0.3,
            given["causal"],
            1,
            [16, 1, 4, 2],
        )


def machine_code(arch: int, kind: int, by_row: bool, dim: int, block_m: int, config: plan.Config) -> Any:
    from devtools import cuda_codegen
    from inductor_fusions.fusions.attention.decode import kernels

    fn = kernels.part_kernel
    constants: dict[str, Any] = {
        "KIND": kind, "CAUSAL": False, "BY_ROW": by_row, "SCALE": 0.1, "GROUP": 4, "D": dim, "E": dim,
        "IS_SPLIT": True, "BLOCK_M": block_m, "BLOCK_N": config.block_n, "BLOCK_D": kernels.padded(dim),
        "BLOCK_E": kernels.padded(dim),
    }  # fmt: skip
    ones = {"q_d", "k_d", "v_e", "mask_j", "lowest_i", *(() if by_row else ("queries",))}
    pointers = dict.fromkeys("qkv", "*bf16") | {
        "mask": ("", "*i1", "*fp32")[kind] or "*bf16",
        "order": "*i32",
    }
    pointers |= dict.fromkeys(("lowest", "acc_out", "most_out", "total_out"), "*fp32")
    signature, aligned = {}, []
    for name in fn.arg_names:
        if name in constants or name in ones:
            signature[name] = "constexpr"
            constants.setdefault(name, 1)
            continue
        signature[name] = pointers.get(name, "i32")
        if name not in ("order_b", "order_h", "kv_heads", "queries"):
            aligned.append(name)
    return cuda_codegen.compile_function(
        fn, signature, constants, arch, aligned=aligned,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


@pytest.mark.parametrize(("kind", "by_row", "dim", "block_m", "archs"), [
    (1, False, 128, 16, (80, 90, 100, 120)),
    (2, False, 128, 16, (90, 120)),
    (2, True, 128, 32, (80, 90)),
    (1, True, 256, 32, (90, 120)),
    (0, False, 64, 16, (90,)),
    (1, False, 80, 16, (90,)),
])  # fmt: skip
def test_machine_code(kind: int, by_row: bool, dim: int, block_m: int, archs: tuple[int, ...]) -> None:
    """Tensor cores, loads that are under way beside them, and shared memory that every device has."""
    shape = plan.Shape(1, 32, 8, 1, 4096, dim, DTYPE, "boolean")
    for arch in archs:
        found = machine_code(arch, kind, by_row, dim, block_m, plan.default(shape))
        assert found.fits and found.uses_mma, found
        assert found.shared_bytes <= 99 * 1024, found
        assert "cp.async" in found.ptx, found


def test_configurations_fit() -> None:
    for dim in (64, 80, 128, 256):
        assert plan.default(plan.Shape(1, 8, 8, 1, 512, dim, DTYPE, "none")).fits(dim)
    assert not plan.Config(128, 1, 4, 3).fits(256)


@pytest.mark.parametrize(
    ("batch", "keys", "splits"), [(1, 4096, 64), (16, 4096, 4), (64, 4096, 1), (1, 64, 1), (1, 200, 4)]
)
def test_parts_fill_the_device(batch: int, keys: int, splits: int) -> None:
    """About four thread blocks for each of 132 multiprocessors, and no more parts than tiles."""
    shape = plan.Shape(batch, 32, 8, 1, keys, 128, DTYPE, "boolean")
    assert plan.Config(64, 4, 4, 2).splits(shape, 132) == splits
