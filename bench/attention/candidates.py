"""The ways to compute an attention, compiled by stock `torch.compile`."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.attention.inputs import Inputs
from bench.attention.rows import Row
from bench.attention.spellings import Tensors, fused, short, unfused
from bench.common import one_line

BACKENDS = {
    "flash": (SDPBackend.FLASH_ATTENTION, "_scaled_dot_product_flash_attention"),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, "_scaled_dot_product_efficient_attention"),
    "cudnn": (SDPBackend.CUDNN_ATTENTION, "_scaled_dot_product_cudnn_attention"),
}
SHORT = 128
"""Queries and keys of an attention that `short` takes."""


class CompiledOnlyError(Exception):
    """Raised in place of the first run: everything is compiled, nothing has run."""


class Backend:
    """Inductor as a backend that can stop before the first run, and that notes the attention ops it saw.

    Each candidate has one of its own: Dynamo shares compiled code between equal backends only.
    """

    def __init__(self) -> None:
        self.armed = False
        self.compiled = False
        self.ops: set[str] = set()

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        if self.compiled:  # outside of sdpa_kernel: it would be another kernel that runs
            raise RuntimeError("compiled a second time")
        self.compiled = True

        def inner(graph: torch.fx.GraphModule, inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            found = (re.search(r"_scaled_dot_product\w*", str(node.target)) for node in graph.graph.nodes)
            self.ops |= {match[0] for match in found if match and not match[0].endswith("_backward")}
            return compile_fx_inner(graph, inputs, *args, **kwargs)

        compiled: Any = compile_fx(gm, example_inputs, inner_compile=inner)

        def run(*args: Any) -> Any:
            if not self.armed:
                raise CompiledOnlyError
            return compiled(*args)

        return run


class RefusedError(RuntimeError):
    """A candidate that cannot be compiled, with the reasons that PyTorch gave as warnings."""

    def __init__(self, error: BaseException, warned: Sequence[warnings.WarningMessage]) -> None:
        while error.__cause__ is not None:
            error = error.__cause__
        reasons = dict.fromkeys(str(w.message).partition("(Triggered")[0].strip() for w in warned)
        idle = ("kernel not used because", "has been runtime disabled")
        told = [reason for reason in reasons if reason and not any(text in reason for text in idle)]
        within = re.search(r": got (\w+)\((['\"])(.*?)\2\)", str(error))  # as Dynamo quotes it
        text = f"{within[1]}: {within[3]}" if within else one_line(error)
        super().__init__("; ".join([text, *told])[:400])


@dataclass
class Candidate:
    """One compiled way to compute a row."""

    function: Callable[..., torch.Tensor]
    backend: Backend

    def run(self, row: Row, name: str, inputs: Inputs) -> Tensors:
        """Output, and in training the gradients."""
        with torch.set_grad_enabled(row.train):  # as when it was compiled: Dynamo guards on it
            out = self.function(*inputs.arguments(name))
            if not row.train:
                return (out,)
            return (out, *torch.autograd.grad(out, inputs.leaves(row), inputs.cotangent))


def candidate_names(row: Row, device: str) -> list[str]:
    """The candidates of a row."""
    names = ["sdpa", *BACKENDS] if device == "cuda" else ["sdpa"]
    if row.heads != row.kv_heads:
        names += [f"{name}_repeat" for name in names]
    elif max(row.q_len, row.kv_len) <= SHORT:
        names.append("short")
    return ["unfused", *names]


def compile_candidate(row: Row, name: str, inputs: Inputs) -> Candidate:
    """Compile, forward and backward, without running anything.

    Raises:
        RefusedError: it cannot be compiled, as where the forced backend cannot do it.
        RuntimeError: PyTorch took another backend.
    """
    base, _, repeat = name.partition("_")
    backend = Backend()

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *masks: torch.Tensor) -> torch.Tensor:
        if base == "short":
            return short(row, q, k, v, *masks)
        return (
            unfused(row, q, k, v, *masks) if base == "unfused" else fused(row, bool(repeat), q, k, v, *masks)
        )

    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)
    chosen: AbstractContextManager[None] = nullcontext()
    if base in BACKENDS:
        chosen = sdpa_kernel([BACKENDS[base][0]])
    with chosen, torch.set_grad_enabled(row.train), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            compiled(*inputs.arguments(name))
        except CompiledOnlyError:
            pass
        except Exception as error:
            raise RefusedError(error, said) from error
    if base in BACKENDS and BACKENDS[base][1] not in backend.ops:
        raise RuntimeError(f"compiled to {', '.join(sorted(backend.ops)) or 'math'}")
    backend.armed = True
    return Candidate(compiled, backend)
