"""Which kernels write over their input, and which leave it as it is."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from devtools import cuda_codegen
from inductor_fusions import config
from inductor_fusions._inductor import reuse
from inductor_fusions.fusions.lora.accumulate import LORA_ACCUMULATE
from tests.block_mm.support import rand

HALF = torch.bfloat16
ROWS, INNER, COLUMNS, RANK = 96, 48, 64, 16


def accumulated(base: Any, a: Any, b: Any, dtype: torch.dtype = HALF) -> Any:
    return LORA_ACCUMULATE(base, [a], [b], [2.0], [], [], dtype)


def last_reader(x: Any, w: Any, a: Any, b: Any) -> Any:
    return accumulated(x @ w, a, b)


def read_before(x: Any, w: Any, a: Any, b: Any) -> Any:
    base = x @ w
    return accumulated(base, a @ base.float().sum((0,), keepdim=True)[:, :1].to(HALF).expand(RANK, RANK), b)


def read_later(x: Any, w: Any, a: Any, b: Any) -> Any:
    base = x @ w
    y = accumulated(base, a, b)
    return base @ y.t()


def returned(x: Any, w: Any, a: Any, b: Any) -> Any:
    base = x @ w
    return base, accumulated(base, a, b)


def view_returned(x: Any, w: Any, a: Any, b: Any) -> Any:
    base = x @ w
    return base[1:, 3:].t(), accumulated(base, a, b)


def both_operands(x: Any, w: Any, a: Any, b: Any) -> Any:
    base = x @ w
    return accumulated(base, base, b.t() @ b)


def view_under_another_name(x: Any, w: Any, a: Any, b: Any) -> Any:
    """Complex views are calls, whose results have names of their own and the memory of the base."""
    base = (x @ w).float() @ (b.t() @ b).float()
    pairs = torch.view_as_real(torch.view_as_complex(base.view(ROWS, COLUMNS // 2, 2)))
    right = (w.t() @ w).float()
    return LORA_ACCUMULATE(base, [pairs.view(ROWS, COLUMNS)], [right], [2.0], [], [], torch.float32)


def written(fn: Callable[..., Any], **changes: Any) -> list[bool]:
    """Of each sum, whether it is written over its base."""
    args = rand(ROWS, INNER), rand(INNER, COLUMNS), rand(ROWS, RANK), rand(RANK, COLUMNS)
    with config.patch(policy="always", strict=True), torch.no_grad():
        made = cuda_codegen.generate(fn, args, run=False, config=changes)
    wrapper = made.forward.wrapper
    found = []
    for call in re.findall(r"lora_accumulate\w*\.run\((.*)\)", wrapper):
        base, *_, result = re.findall(r"\b(?:buf\d+|arg\d+_1)\b", call)
        assert (base == result) == bool(re.search(rf"{result} = buf\d+; del buf\d+  # reuse", wrapper)), (
            wrapper
        )
        found.append(base == result)
    assert found, wrapper
    return found


#: What is compiled, settings of Inductor, and whether each sum is written over its base.
SUMS: dict[str, tuple[Callable[..., Any], dict[str, bool], list[bool]]] = {
    "last reader": (last_reader, {}, [True]),
    "read before": (read_before, {}, [True]),
    # The second sum writes over the first one, which is that of the product.
    "twice": (lambda x, w, a, b: accumulated(accumulated(x @ w, a, b), a * 2, b), {}, [True, True]),
    "read later": (read_later, {}, [False]),
    "returned": (returned, {}, [False]),
    "view returned": (view_returned, {}, [False]),
    "fused behind": (lambda x, w, a, b: torch.sigmoid(accumulated(x @ w, a, b)), {}, [False]),
    "other dtype": (lambda x, w, a, b: accumulated(x @ w, a, b, torch.float32), {}, [False]),
    "transposed": (lambda x, w, a, b: accumulated((w.t() @ x.t()).t(), a, b), {}, [False]),
    "part": (lambda x, w, a, b: accumulated((x @ w)[: ROWS // 2], a[: ROWS // 2], b), {}, [False]),
    "both operands": (both_operands, {}, [False]),
    "view under another name": (view_under_another_name, {}, [False]),
    "input of the graph": (
        lambda x, w, a, b: (accumulated(x @ w, a, b), accumulated(w[:RANK], a[:RANK], b)), {}, [False, True],
    ),
    "setting of Inductor": (last_reader, {"inplace_buffers": False}, [False]),
    # Whether it pays to fuse something behind a kernel is asked before anything was written.
    "benchmarks of Inductor": (last_reader, {"benchmark_fusion": True}, [True]),
}  # fmt: skip


@pytest.mark.parametrize("name", SUMS)
def test_input_is_written_over(name: str) -> None:
    fn, changes, sums = SUMS[name]
    assert sorted(written(fn, **changes)) == sums


def test_torch_of_other_names(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def raising(*args: Any) -> bool:
        raise AttributeError("name_to_buf")

    monkeypatch.setattr(reuse, "_may_write", raising)
    assert written(last_reader) == [False]
    assert "name_to_buf" in caplog.text
