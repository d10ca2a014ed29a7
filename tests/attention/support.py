"""Small attentions and the checks that the files of this folder share."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from inductor_fusions import config, testing
from inductor_fusions.fusions.attention import flex
from inductor_fusions.fusions.attention.decode import plan as decode
from inductor_fusions.fusions.attention.short import terms

#: Sizes that differ from each other, and of which no product is another one of them.
BATCH, HEADS, Q_LEN, KV_LEN, DIM = 2, 3, 7, 13, 16
LOWEST, INF = torch.finfo(torch.float32).min, float("inf")
TRAIN = pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])

Function = Callable[..., Any]


def rand(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A random leaf."""
    return torch.randn(shape, dtype=dtype).requires_grad_(grad)


def qkv(
    q_len: int = Q_LEN,
    kv_len: int = KV_LEN,
    *,
    batch: int = BATCH,
    heads: int = HEADS,
    kv_heads: int | None = None,
    dim: int = DIM,
    v_dim: int | None = None,
    grad: bool = True,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of shape (batch, heads, length, dim)."""
    kv_heads = kv_heads or heads
    shapes = ((heads, q_len, dim), (kv_heads, kv_len, dim), (kv_heads, kv_len, v_dim or dim))
    return tuple((torch.randn(batch, *s) * 0.7).to(dtype).requires_grad_(grad) for s in shapes)


def visible(*shape: int, share: float = 0.6) -> torch.Tensor:
    """A random boolean mask, True where a key is seen, in which every row sees the first key."""
    mask = torch.rand(shape) < share
    mask[..., 0] = True
    return mask


def additive(mask: torch.Tensor, fill: float = LOWEST) -> torch.Tensor:
    """A boolean mask as a bias: 0 where a key is seen, else `fill`."""
    return torch.zeros(mask.shape).masked_fill(~mask, fill)


def scored(change: Function = lambda scores: scores) -> Function:
    """Attention that does `change(scores, *extra)` between the product of q and k and the softmax."""

    def attention(q: Any, k: Any, v: Any, *extra: Any) -> Any:
        return torch.softmax(change(q @ k.transpose(-2, -1), *extra), dim=-1) @ v

    return attention


def check(fn: Function, inputs: Sequence[Any] | Mapping[str, Any], **options: Any) -> testing.Checked:
    """`testing.check` without Inductor's code generation, unless `backend` says otherwise.

    In float32 the budget has two eps: a fused backward computes the weights anew from the logsumexp,
    with an error of eps times the score, where the unfused one has kept them.
    """
    wide = options.get("dtype", torch.float32) == torch.float32
    defaults = {"backend": testing.EAGER_AFTER_PASSES, "slack": 2.0 if wide else 1.0}
    with config.patch(stock_misfires=False):  # a softmax over another dim is one site, not two
        return testing.check(fn, inputs, **{**defaults, **options})


#: `testing.capture` without Inductor's code generation.
capture = functools.partial(testing.capture, backend=testing.EAGER_AFTER_PASSES)


def same_as_eager(fn: Function, inputs: Sequence[torch.Tensor], **options: Any) -> testing.Capture:
    """The run with the fusions, of which none fails; its outputs are those of eager mode, not of float64."""
    run = capture(fn, *inputs, **options)
    assert not [site for site in run.sites if site.verdict == "failed"], run.sites
    torch.testing.assert_close(run.outputs, fn(*(x.clone() for x in inputs)))
    return run


def unfused(fn: Function, inputs: Sequence[Any] | Mapping[str, Any], reason: str, **options: Any) -> None:
    """Assert that the one candidate in `fn` is left alone for `reason`, and that the result is right."""
    seen = check(fn, inputs, fused=0, reason=reason, **options)
    assert len(seen.sites) == 1, seen.sites


#: Reason of a case that only flex attention can express.
FLEX = "flex attention is used on cuda only"


@contextlib.contextmanager
def flex_everywhere(kernel: str = "auto") -> Iterator[None]:
    """Flex attention on the CPU too: the graphs are run, not the template, which has no backward there."""
    devices = mock.patch.object(flex, "DEVICES", frozenset({"cpu", "cuda"}))
    with devices, config.patch(attention_kernel=kernel):
        yield


@contextlib.contextmanager
def _everywhere(module: Any, kernel: str) -> Iterator[None]:
    with mock.patch.object(module, "unsupported", lambda device: ""), config.patch(attention_kernel=kernel):
        yield


#: The operations for short attention and for few queries wherever they can be, on the CPU too.
short_everywhere = functools.partial(_everywhere, terms, "short")
decode_everywhere = functools.partial(_everywhere, decode, "decode")


def through_flex(fn: Function, inputs: Sequence[Any] | Mapping[str, Any], **options: Any) -> testing.Checked:
    """Assert that the one candidate is left alone on a CPU, and is flex attention elsewhere."""
    unfused(fn, inputs, FLEX, **options)
    with flex_everywhere():
        return check(fn, inputs, kernel="flex", **options)


def counted(fn: Function) -> tuple[Function, CompileCounterWithBackend]:
    """A function as it is compiled for all sizes, without generated code; and what counts its graphs."""
    torch._dynamo.reset()
    counter, passes = CompileCounterWithBackend("aot_eager"), testing.AfterPasses([])

    def backend(graph: Any, example_inputs: Any) -> Any:
        counter(graph, example_inputs)
        return passes(graph, example_inputs)

    return torch.compile(fn, dynamic=True, backend=backend), counter


def code_for_a_gpu(fn: Function, inputs: Sequence[Any], **options: Any) -> Any:
    """What Inductor writes for a GPU: `cuda_codegen.generate` without running it."""
    pytest.importorskip("triton")
    from devtools import cuda_codegen

    return cuda_codegen.generate(fn, inputs, run=False, **options)


def sdpa(run: testing.Capture) -> torch.fx.Node:
    """The only call of scaled_dot_product_attention in the graphs of a run."""
    (call,) = run.calls("scaled_dot_product_attention")
    return call


def cases(table: Mapping[str, Any]) -> pytest.MarkDecorator:
    """One test for each entry of `table`, named by its key."""
    return pytest.mark.parametrize("case", list(table.values()), ids=list(table))
