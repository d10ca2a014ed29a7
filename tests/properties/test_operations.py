"""What holds of every operation of the package: torch's own checks, and gradients through AOTAutograd."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from inductor_fusions._inductor import needs_python
from inductor_fusions.fusions.lora.split import LORA_SPLIT
from tests.attention.support import rand, visible
from tests.support.devices import on

BF16 = torch.bfloat16
#: Arguments of a call, and how many of them take a gradient: the first ones.
Call = Callable[[], tuple[tuple[Any, ...], int]]


def heads(length: int, dim: int = 16) -> torch.Tensor:
    return torch.randn(4, 2, length, dim)


def decoding(name: str) -> tuple[tuple[Any, ...], int]:
    """One of the cases of the kernels."""
    pytest.importorskip("triton")
    from tests.attention import decode_interpreted

    case = decode_interpreted.CASES[name]
    q, k, v, shown = decode_interpreted.inputs(case, torch.float32)
    mask = decode_interpreted.mask_of(case, shown)
    return decode_interpreted.arguments(q, k, v, mask, (16, 3, 4, 2), case.scale, case.causal), 0


def tiles(name: str) -> tuple[tuple[Any, ...], int]:
    (_, k, _, mask, lowest, *_), _ = decoding(name)
    return (mask, lowest, k.shape[1], 16), 0


def short(masks: Callable[[], list[torch.Tensor]], numbers: list[float], backward: bool = False) -> Any:
    """A call in float64, with a dim of values of its own."""
    leaf = partial(rand, dtype=torch.float64, grad=not backward)
    tensors = leaf(4, 2, 3, 2), leaf(4, 2, 5, 2), leaf(4, 2, 5, 3)
    given = [m.detach() if backward else m for m in masks()]
    gradient = (torch.randn(4, 2, 3, 3).double(),) if backward else ()
    return (*gradient, *tensors, given, numbers, 0.3, False, *([2] if backward else ())), 0 if backward else 4


def of_windows() -> list[torch.Tensor]:
    return [rand(1, 2, 3, 5, dtype=torch.float64), rand(2, 1, 3, 5, dtype=torch.float64)]


def around_a_fill() -> list[torch.Tensor]:
    return [rand(1, 2, 3, 5, dtype=torch.float64), visible(2, 1, 3, 5), rand(4, 1, 1, 5, dtype=torch.float64)]


def summands() -> tuple[tuple[Any, ...], int]:
    """A product with a matrix that is split up already."""
    (stack,) = LORA_SPLIT([torch.randn(16, 64)], [3], [0], [0], BF16)
    return (torch.randn(80, 64).to(BF16), [stack.permute(0, 2, 1)], [0.5], [2.0], False, []), 0


#: Pairs of seven features, as cells of the matrix of all of them.
CELLS = [1, 9, 9, 20]
LABELS = [0, 6, -100, 3, 2]
#: One of each operation.
CALLS: dict[str, Call] = {
    "block_mm": lambda: (
        ([rand(5, 8)] * 2, [rand(8, 6), rand(8, 6)], [], [], [0, 1], [1.0, 0.5], "silu,", True,
         torch.float32, ""), 2,
    ),
    "decode_attention": lambda: (
        (heads(3), heads(5), heads(5), None, None, None, 0.25, True, 3, [16, 1, 4, 1]), 0,
    ),
    "decode_tiles": lambda: ((torch.arange(5).view(1, 1, 1, 5) < 3, None, 2, 16), 0),
    "dot_interaction": lambda: ((rand(5, 7, 8), rand(5, 6), torch.tensor(CELLS), False, False, []), 2),
    "dot_interaction_gradient": lambda: (
        (torch.randn(5, 27), torch.randn(5, 7, 8), 6, None, False, False, []), 0,
    ),
    "linear_cross_entropy": lambda: (
        (rand(5, 8), rand(7, 8), rand(7), torch.tensor(LABELS), None, None, 1.0, 0.0, -100, 0.1, True,
         [True] * 3), 3,
    ),
    "linear_softmax_rows": lambda: (
        (rand(5, 8), rand(7, 8), rand(7), torch.tensor([0, 6, -1, 3, 2]), torch.rand(7), 0.5, 3.0, True, True,
         False), 3,
    ),
    "linear_softmax_rows_gradient": lambda: (
        (*torch.randn(4, 5), torch.randn(5, 8), torch.randn(7, 8), torch.randn(7),
         torch.tensor([0, 6, -1, 3, 2]), torch.rand(7), 0.5, 3.0, True, False, [True] * 3), 0,
    ),
    "lora_accumulate": lambda: (
        (torch.randn(5, 6), [torch.randn(5, 3), torch.randn(5, 2)], [torch.randn(3, 6), torch.randn(2, 6)],
         [0.5, 2.0], [torch.arange(30).view(5, 6) % 3 > 0], [1], torch.float32), 0,
    ),
    "lora_down": lambda: (
        (rand(2, 5, 8), rand(3, 8), torch.arange(80).view(2, 5, 8) % 3 > 0, 1.25), 2,
    ),
    "lora_linear": lambda: (
        (torch.randn(5, 8), [torch.randn(8, 6)], [torch.randn(6)], [0], [torch.randn(8, 3)],
         [torch.randn(3, 6)], [0], [0.5], False, torch.float32), 0,
    ),
    "lora_split": lambda: (
        ([torch.randn(5, 8), torch.randn(3, 8)], [3, 0], [0, 0], [0, 16], BF16), 0,
    ),
    "lora_narrow_mm": lambda: (
        (rand(5, 8), [rand(8, 3), rand(8, 2)], [0.5, 2.0], [0.0] * 2, False,
         [torch.arange(40).view(5, 8) % 3 > 0] * 2), 2,
    ),
    "lora_rounded": lambda: ((rand(5, 8),), 1),
    "even": lambda: ((rand(5, 8).t(),), 1),
    "own": lambda: ((rand(5, 8),), 1),
    "outer_product_linear": lambda: ((rand(5, 4), rand(5, 3), rand(6, 12)), 3),
    "outer_product_linear_factors": lambda: (
        (torch.randn(5, 6), torch.randn(5, 4), torch.randn(5, 3), torch.randn(6, 12)), 0,
    ),
    "outer_product_linear_weight": lambda: ((torch.randn(5, 6), torch.randn(5, 4), torch.randn(5, 3)), 0),
    "short_attention": lambda: (
        (rand(4, 2, 3, 16), rand(4, 2, 5, 16), rand(4, 2, 5, 16), [], [], 0.25, False), 3,
    ),
    "short_attention_backward": lambda: (
        (heads(3), heads(3), heads(5), heads(5), [], [], 0.25, False, 2), 0,
    ),
    "stored": lambda: ((torch.arange(12).view(3, 4).t(),), 0),
}  # fmt: skip
#: Further ones, on the CPU: a GPU's kernel leaves some memory as it is. Behind a comma is what is special.
OTHERS: dict[str, Call] = {
    **{f"decode_attention, {name}": partial(decoding, name)
       for name in ("boolean", "float32", "no mask", "mask of heads")},
    **{f"decode_tiles, {name}": partial(tiles, name) for name in ("boolean", "float32", "mask of heads")},
    "lora_narrow_mm, summands": summands,
    "lora_split, transposed": lambda: (
        ([torch.randn(5, 6), torch.randn(6, 5).t(), torch.randn(4, 7), torch.randn(7, 4)],
         [3, 2, 0, 0], [0, 0, 1, 0], [0, 0, 24, 24], BF16), 0,
    ),
    "short_attention, float64": lambda: short(list, []),
    "short_attention, masks of windows": lambda: short(of_windows, [1.0, -2.0]),
    "short_attention, fill between biases": lambda: short(around_a_fill, [1.0, -10.0, 1.0]),
    "short_attention_backward, float64": lambda: short(list, [], True),
    "short_attention_backward, masks of windows": lambda: short(of_windows, [1.0, -2.0], True),
    "short_attention_backward, fill between biases": lambda: short(around_a_fill, [1.0, -10.0, 1.0], True),
    "stored, float32": lambda: ((torch.arange(12.0).view(3, 4).t(),), 0),
}  # fmt: skip


def test_every_operation_is_called() -> None:
    known = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names()
             if name.startswith("inductor_fusions::")}  # fmt: skip
    known.discard("cudnn_attention_backward")  # tests/gpu/test_kernel_defects.py
    assert known == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_X1_operation(name: str, device: torch.device) -> None:
    check(name, CALLS[name], device)


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls(name: str) -> None:
    check(name.partition(",")[0], OTHERS[name], torch.device("cpu"))


#: What compiled code for a CPU calls in Python, so that a package of AOTInductor cannot hold it.
IN_PYTHON = frozenset(
    "decode_attention decode_tiles linear_cross_entropy linear_softmax_rows linear_softmax_rows_gradient "
    "outer_product_linear outer_product_linear_factors outer_product_linear_weight".split()
)


@pytest.mark.parametrize("name", CALLS)
def test_what_a_package_cannot_hold(name: str) -> None:
    arguments, _ = CALLS[name]()
    op = getattr(torch.ops.inductor_fusions, name).default
    assert needs_python(op, *arguments) == (name in IN_PYTHON)


def check(name: str, call: Call, device: torch.device) -> None:
    """An operation passes opcheck; its gradients are those of eager mode through AOTAutograd."""
    arguments, count = call()
    arguments = on(device, arguments)
    op = getattr(torch.ops.inductor_fusions, name).default
    if name != "lora_down":  # it is made of another one
        checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static"]
        checks += [] if name.startswith("lora") else ["test_aot_dispatch_dynamic"]
        torch.library.opcheck(op, arguments, test_utils=checks)
    leaves = [t for t in pytree.tree_leaves(arguments[:count]) if isinstance(t, torch.Tensor)]
    leaves = [t for t in leaves if t.requires_grad]
    if not leaves:
        return

    def step(fn: Any) -> tuple[torch.Tensor, ...]:
        outputs = pytree.tree_leaves(fn(*arguments))
        total = sum((y * torch.linspace(0.5, 2, y.numel(), device=device).view_as(y)).sum() for y in outputs)
        return torch.autograd.grad(total, list(dict.fromkeys(leaves)))

    expected = step(op)
    assert all(grad.abs().sum() > 0 for grad in expected)
    torch._dynamo.reset()
    found = step(torch.compile(lambda *given: op(*given), backend="aot_eager", fullgraph=True))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
