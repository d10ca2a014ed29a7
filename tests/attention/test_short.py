"""Attention over short sequences: the operation, its kernels, and which attentions become it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from devtools import cuda_codegen
from inductor_fusions import config, ops, testing
from inductor_fusions.fusions.attention.short import plan
from tests.attention.short_interpreted import CASES as INTERPRETED
from tests.attention.support import (
    LOWEST,
    additive,
    capture,
    cases,
    check,
    code_for_a_gpu,
    qkv,
    rand,
    scored,
    short_everywhere,
    visible,
)
from tests.support.arguments import named
from tests.support.interpreter import errors_of
from tests.support.processes import start

# The operation -----------------------------------------------------------------------------------


def test_meaning() -> None:
    q, k, v = (rand(4, 2, 5, 3, dtype=torch.float64) for _ in range(3))
    bias, keep = rand(2, 2, 5, 5, dtype=torch.float64), visible(4, 1, 1, 5)
    found = ops.short_attention(q, k, v, [bias, keep], causal=True)
    scores = q @ k.mT * 3**-0.5 + bias.repeat(2, 1, 1, 1)
    scores = scores.masked_fill(~keep, -math.inf).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    torch.testing.assert_close(found, torch.softmax(scores, -1) @ v)


def test_layout() -> None:
    """Heads beside each other, so that a projection reads it without a copy."""
    q, k, v = qkv(grad=False)
    assert ops.short_attention(q, k, v).transpose(1, 2).is_contiguous()


def test_heads_that_share_keys() -> None:
    q, k, v = qkv(heads=4, kv_heads=2)
    bias = rand(1, 4, 7, 13)
    found = ops.short_attention(q, k, v, [bias])
    wanted = ops.short_attention(q, *(x.repeat_interleave(2, 1) for x in (k, v)), [bias])
    cotangent = torch.randn_like(found)
    for ours, theirs in zip(
        torch.autograd.grad(found, (q, k, v, bias), cotangent),
        torch.autograd.grad(wanted, (q, k, v, bias), cotangent),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(found, wanted)


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_sharded() -> None:
    """Batch and heads over two processes, eager and compiled: outputs and gradients of one process."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = start(*launcher, "-m", "tests.attention.short_sharded", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-4000:]


def test_flops() -> None:
    q, k, v = qkv()
    with FlopCounterMode(display=False) as counter:
        ops.short_attention(q, k, v).sum().backward()
    products = 2 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * q.shape[3]
    assert counter.get_total_flops() == 7 * products


@pytest.mark.parametrize(("change", "says"), [
    ({"q": torch.ones(4, 2, 3)}, "q of short_attention must be .*not 3-D"),
    ({"k": torch.ones(4, 2, 5, 8).half()}, "k is torch.float16"),
    ({"k": torch.ones(4, 1, 5, 8)}, "k of short_attention needs the number of heads of q, 2, not 1"),
    (dict.fromkeys("kv", torch.ones(4, 3, 5, 8)), "heads of k, 3, does not divide that of q, 2"),
    ({"k": torch.ones(4, 2, 5, 4)}, "head dim of q, 8, not 4"),
    ({"v": torch.ones(4, 2, 6, 8)}, "v of short_attention needs the length of k, 5, not 6"),
    ({"q": torch.ones(4, 2, 129, 8)}, "q of short_attention may have at most 128 rows, not 129"),
    ({"masks": [torch.ones(1, 1, 3, 5).int()]}, r"masks\[0\] .*floating or boolean, not torch.int32"),
    ({"masks": [torch.ones(1, 1, 3, 4)]}, r"masks\[0\] of short_attention has size 4 in dim 3, not 1 or 5"),
    ({"masks": [torch.ones(3, 5)]}, r"masks\[0\] of short_attention must be 4-D, not 2-D"),
    ({"masks": [torch.ones(3, 1, 3, 5)]}, r"masks\[0\] of short_attention, 3, must divide the batch"),
    ({"masks": [torch.ones(1, 1, 3, 5)], "numbers": []}, "one number for each of its 1 masks"),
    ({"masks": torch.ones(1, 1, 3, 5)}, "masks of short_attention must be a list of tensors"),
    ({"k": torch.ones(4, 2, 5, 8, device="meta")}, "on one device, not on cpu and meta"),
])  # fmt: skip
def test_arguments_that_do_not_fit(change: dict[str, Any], says: str) -> None:
    given = {"q": torch.ones(4, 2, 3, 8), "k": torch.ones(4, 2, 5, 8), "v": torch.ones(4, 2, 5, 8)}
    with pytest.raises((TypeError, ValueError), match=says):
        ops.short_attention(**{**given, **change})


# Its kernels -------------------------------------------------------------------------------------


errors = errors_of("tests.attention.short_interpreted")


@pytest.mark.parametrize("name", INTERPRETED)
def test_numbers(name: str, errors: Callable[[str], dict[str, float]]) -> None:
    """Half an ulp of float16, where it is the dtype of the result; float32 is multiplied exactly."""
    case, found = INTERPRETED[name], errors(name)
    tensors = 1 if case.merged else 3
    for key, error in found.items():
        of_mask = key.startswith("grad") and int(key.split()[1]) >= tensors
        exact = case.dtype == torch.float32 or of_mask
        assert error < (2e-6 if exact else 5e-4), (key, found)


SHAPES = {
    "windows": ((4, 3, 49, 32), [("bias", 1, 3, 49, 49), ("fixed", 2, 1, 49, 49)], torch.bfloat16),
    "windows, two at a time": (
        (2048, 3, 49, 32), [("bias", 1, 3, 49, 49), ("fixed", 64, 1, 49, 49)], torch.bfloat16,
    ),
    "sentences": ((2, 12, 128, 64), [("keep", 2, 1, 1, 128)], torch.bfloat16),
    "wide heads": ((2, 2, 128, 128), [("bias", 1, 2, 128, 128)], torch.bfloat16),
    "odd": ((2, 2, 17, 80), [], torch.float16),
    "float32": ((2, 2, 49, 32), [("bias", 1, 2, 49, 49)], torch.float32),
}  # fmt: skip


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("shape", SHAPES)
def test_machine_code(shape: str, arch: int) -> None:
    """One kernel each way, without a copy, that fits and does not spill."""
    (batch, heads, length, dim), kinds, dtype = SHAPES[shape]
    if batch > 64 and arch != 90:
        pytest.skip("one architecture is enough for the loop over samples")
    # Few samples are computed here, by the same kernel.
    several = mock.patch.object(plan, "windows_of", lambda *args: 2 if batch > 64 else 1)
    batch = 256 if batch > 64 else batch
    q, k, v = (
        torch.randn(batch, length, heads, dim, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3)
    )
    masks = [
        torch.ones(size, dtype=torch.bool)
        if kind == "keep"
        else torch.zeros(size, dtype=dtype).requires_grad_(kind == "bias")
        for kind, *size in kinds
    ]

    def fn(q: Any, k: Any, v: Any, *masks: Any) -> Any:
        return ops.short_attention(q, k, v, masks).transpose(1, 2).flatten(2)

    with several, config.patch(strict=True):
        made = code_for_a_gpu(fn, (q, k, v, *masks), train=True, arch=arch)
    for module in made.modules:
        assert not module.extern_calls
        (kernel,) = [kernel for kernel in module.kernels if kernel.is_template]
        copies = [name for name in module.launches if name != kernel.name and "sum" not in name]
        assert not copies, module.launches
        (found,) = cuda_codegen.compile_kernel(kernel.source, arch)
        assert found.fits, str(found)
        assert found.uses_mma or dtype == torch.float32


# Who becomes it ----------------------------------------------------------------------------------

BIAS = scored(lambda s, b: s * 0.3 + b)


def windows(q: Any, k: Any, v: Any, bias: Any, mask: Any) -> Any:
    """A bias of each head, and a mask of each window that is the same for all images."""
    count, length = mask.shape[0], mask.shape[-1]
    scores = q @ k.mT * 0.3 + bias
    scores = scores.view(-1, count, q.shape[1], length, length) + mask.unsqueeze(1).unsqueeze(0)
    return torch.softmax(scores.view(-1, q.shape[1], length, length), -1) @ v


def combined(q: Any, k: Any, v: Any, bias: Any, mask: Any) -> Any:
    """The same, where both are added up for every image first."""
    count, length = mask.shape[0], mask.shape[-1]
    mask = mask[None, :, None].expand(q.shape[0] // count, -1, -1, -1, -1).reshape(-1, 1, length, length)
    return torch.softmax(q @ k.mT * 0.3 + (bias + mask), -1) @ v


def window_inputs(batch: int = 6, count: int = 3, length: int = 7) -> tuple[torch.Tensor, ...]:
    q, k, v = qkv(length, length, batch=batch)
    mask = additive(visible(count, length, length), -100.0)
    return q, k, v, rand(3, length, length).unsqueeze(0).detach().requires_grad_(), mask


def masks_of(run: testing.Checked) -> list[tuple[int, ...]]:
    """Shapes of the masks of the only call."""
    (call,) = run.ours.calls("short_attention.default")
    return [tuple(node.meta["example_value"].shape) for node in named(call).masks]


FUSED: dict[str, tuple[Any, Any, list[tuple[int, ...]]]] = {
    "plain": (scored(lambda s: s * 0.3), qkv, []),
    "bias": (BIAS, lambda: (*qkv(), rand(3, 7, 13)), [(1, 3, 7, 13)]),
    "windows": (windows, window_inputs, [(1, 3, 7, 7), (3, 1, 7, 7)]),
    "windows that were added up": (combined, window_inputs, [(1, 3, 7, 7), (3, 1, 7, 7)]),
    "one window": (windows, lambda: window_inputs(count=1), [(1, 3, 7, 7), (1, 1, 7, 7)]),
    "padding": (BIAS, lambda: (*qkv(), additive(visible(2, 1, 1, 13))), [(2, 1, 1, 13)]),
    "fill": (
        scored(lambda s, m: torch.where(m, s, LOWEST)),
        lambda: (*qkv(), visible(2, 1, 7, 13)),
        [(2, 1, 7, 13)],
    ),
    "fill where hidden": (
        scored(lambda s, m: s.masked_fill(m, LOWEST)),
        lambda: (*qkv(), ~visible(2, 1, 7, 13)),
        [(2, 1, 7, 13)],
    ),
    "fill before a bias": (
        scored(lambda s, m, b: s.masked_fill(m, LOWEST) + b),
        lambda: (*qkv(), ~visible(2, 1, 7, 13), rand(3, 7, 13)),
        [(2, 1, 7, 13), (1, 3, 7, 13)],
    ),
}


@cases(FUSED)
def test_becomes_it(case: tuple[Any, Any, list[tuple[int, ...]]]) -> None:
    fn, inputs, shapes = case
    with short_everywhere():
        run = check(fn, inputs(), kernel="short", fused=1)
    assert masks_of(run) == shapes


@pytest.mark.parametrize("train", [False, True])
def test_fully_masked_rows(train: bool) -> None:
    """A fill is applied as in the unfused graph, so such rows need no care."""
    keep = visible(2, 1, 7, 13)
    keep[:, :, 3] = False
    with short_everywhere():
        check(scored(lambda s, m: torch.where(m, s, LOWEST)), (*qkv(), keep), kernel="short", train=train)
        check(BIAS, (*qkv(), additive(keep)), kernel="short", train=train)


def test_mask_that_is_overwritten() -> None:
    """What was added up is not read anew where its memory was written to."""

    def fn(q: Any, k: Any, v: Any, bias: Any, mask: Any) -> Any:
        mask = mask * 1.0
        total = bias + mask[None, :, None].expand(2, -1, -1, -1, -1).reshape(6, 1, 7, 7)
        mask.zero_()
        return torch.softmax(q @ k.mT * 0.3 + total, -1) @ v

    with short_everywhere():
        run = check(fn, window_inputs(), kernel="short", fused=1)
    assert masks_of(run) == [(1, 3, 7, 7), (6, 1, 7, 7)]


REFUSED = {
    "too long": (scored(lambda s: s * 0.3), lambda: qkv(4, 65)),
    "shared heads": (
        lambda q, k, v: torch.softmax(q @ k.repeat_interleave(3, 1).mT, -1) @ v.repeat_interleave(3, 1),
        lambda: qkv(kv_heads=1),
    ),
    "float64": (scored(lambda s: s * 0.3), lambda: qkv(dtype=torch.float64)),
    "wide heads": (scored(lambda s: s * 0.3), lambda: qkv(dim=72)),
}


@cases(REFUSED)
def test_does_not_become_it(case: tuple[Any, Any]) -> None:
    fn, inputs = case
    with short_everywhere():
        run = capture(fn, *inputs())
    assert len(run.fused) == 1 and not run.calls("short_attention.default")


def test_symbolic_lengths() -> None:
    with short_everywhere():
        check(BIAS, (*qkv(), additive(visible(2, 1, 1, 13))), kernel="sdpa", dynamic=True)


def called(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, bias, scale=0.3)


CALLS = {
    "a bias": lambda: rand(1, 3, 7, 13),
    "a bias of the heads": lambda: rand(3, 7, 13),
    "a matrix": lambda: rand(7, 13),
    "of the samples": lambda: rand(2, 1, 1, 13),
}


@cases(CALLS)
def test_call(case: Any) -> None:
    """A call of SDPA with a learned bias is one, too."""
    with short_everywhere():
        check(called, (*qkv(), case()), kernel="short", train=True)


def test_call_that_may_hide_rows() -> None:
    """SDPA gives zeros where a mask hides every key, and an additive mask that is an input may."""
    with short_everywhere():
        run = capture(called, *qkv(), additive(visible(2, 1, 7, 13)))
    assert not run.calls("short_attention.default")


@pytest.mark.parametrize("shape", [(2, 1, 7, 13), (2, 1, 1, 13), (7, 13), (2, 3, 7, 13)])
def test_call_with_a_boolean_mask(shape: tuple[int, ...]) -> None:
    """Rows that it hides whole are zero and send no gradient, as from SDPA; their neighbours are right."""
    mask = visible(*shape)
    mask[(0,) * (len(shape) - 1)] = False
    inputs = (*qkv(), mask)
    with short_everywhere():
        seen = check(called, inputs, kernel="short", train=True)
        assert check(called, inputs, kernel="short", train=False).ours.calls("short_attention.default")
    assert (seen.ours.outputs == 0).all(-1).any() and not (seen.ours.outputs == 0).all()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_swin(attention: str) -> None:
    """Shifted windows of a whole model: no mask of every image is written."""
    transformers = pytest.importorskip("transformers")
    options = transformers.SwinConfig(
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[2],
        num_heads=[2],
        window_size=4,
        drop_path_rate=0.0,
    )
    model = transformers.SwinModel._from_config(options, attn_implementation=attention).eval()
    pixels = torch.randn(2, 3, 32, 32)
    with short_everywhere():
        check(model, (pixels,), kernel="short", fused=2)
        with config.patch(strict=True), torch.no_grad():
            made = code_for_a_gpu(lambda x: model(x)[0], (pixels,))
    found = [kernel for kernel in made.kernels if kernel.is_template]
    assert len(found) == 2
    assert ["MASK1" in kernel.source for kernel in found] == [False, True]
    assert "// period" in found[1].source and "period = 16" in found[1].source


# On a GPU ----------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("length", [7, 49, 64, 100, 128])
def test_on_the_device(length: int, dtype: torch.dtype) -> None:
    if length > plan.MOST_KEYS_IN_KERNEL[dtype.itemsize]:
        pytest.skip("more keys than the kernel takes")

    q, k, v = (
        torch.randn(64, length, 4, 32, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_()
        for _ in range(3)
    )
    bias = torch.randn(1, 4, length, length, device="cuda", dtype=dtype).requires_grad_()
    mask = torch.where(torch.rand(16, length, length, device="cuda") < 0.3, -100.0, 0.0).to(dtype)
    with config.patch(attention_kernel="short", policy="always"):
        testing.check(windows, (q, k, v, bias, mask), kernel="short", fused=1)
