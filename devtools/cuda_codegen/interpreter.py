"""Generated code on CPU tensors: its kernels run in Triton's interpreter."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Sequence
from typing import Any

import torch

from .device import DEVICES, pretended
from .written import Module, load


def interpret(module: Module, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Run generated code on CPU tensors with Triton's interpreter.

    Args:
        inputs: the inputs of its graph, in order: CPU tensors of float16, float32 or integers.

    Raises:
        RuntimeError: the process was not started with TRITON_INTERPRET=1.
        ValueError: an input is bfloat16, on which the interpreter computes nonsense.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("start the process with TRITON_INTERPRET=1")
    if any(isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 for value in inputs):
        raise ValueError("Triton's interpreter has no bfloat16")
    wrapper = module.wrapper
    for gpu, cpu in _ON_CPU.items():
        wrapper = wrapper.replace(gpu, cpu)
    scope: dict[str, Any] = {"_Launcher": _Launcher, "__name__": "generated"}
    exec(compile(wrapper, "generated", "exec"), scope)
    return tuple(scope["call"](list(inputs)))


#: What a wrapper has of the GPU, and what stands for it.
_ON_CPU = {
    "from torch._C import _cuda_getCurrentRawStream as get_raw_stream": "get_raw_stream = lambda i: 0",
    "empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda": "",
    "empty_strided_cuda(": "empty_strided_cpu(",
    "with torch.cuda._DeviceGuard(0):": "if True:",
    "torch.cuda.set_device(0)": "pass",
    "async_compile.triton(": "_Launcher(",
    "async_compile.wait(globals())": "",
}


_TANH = """

@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1
"""


#: Rows that one program of a loop takes.
MOST_ROWS = 256


class _Launcher:
    """A kernel of generated code; `run` is the interpreter."""

    def __init__(self, name: str, source: str, device_str: str = "cuda") -> None:
        # The interpreter's libdevice returns None.
        source = source.replace("libdevice.tanh(", "_tanh(").replace("libdevice.", "tl.math.")
        # Constants of a kernel that a graph holds were those of the process that wrote the code.
        source = source.replace("INTERPRETED = tl.constexpr(False)", "INTERPRETED = tl.constexpr(True)")
        # Programs run one after the other: what the kernel in front makes is there.
        source = re.sub(r"tl\.extra\.cuda\.gdc_\w+\(\)", "pass", source)
        with pretended(DEVICES[90], None):
            self.autotuner = load(source + _TANH)

    def run(self, *arguments: Any, stream: int = 0, **kwargs: Any) -> None:
        """Launch it over its whole grid, in its first configuration.

        The time goes by the number of programs, so those of Inductor's own loops take more rows each.
        """
        from torch._inductor.runtime.triton_heuristics import GridExpr

        autotuner = self.autotuner
        config, kernel = copy.copy(autotuner.configs[0]), autotuner.fn
        extra = autotuner.inductor_meta.get("extra_launcher_args", [])
        # Of a kernel that a graph holds, what is constexpr is told apart from the configuration.
        declared = autotuner.inductor_meta.get("declared_constexpr_names", [])
        config.kwargs = {**config.kwargs, **{x: autotuner.triton_meta["constants"][x] for x in declared}}
        names = [name for name in kernel.arg_names if name not in config.kwargs]
        scope = dict(zip([*names, *extra], arguments, strict=True))
        if {"XBLOCK", "xnumel"} <= {*config.kwargs, *scope}:  # a loop of Inductor's own, for any block
            wide = min(MOST_ROWS, 1 << (int(scope["xnumel"]) - 1).bit_length())
            config.kwargs = {**config.kwargs, "XBLOCK": max(config.kwargs["XBLOCK"], wide)}
        expressions = GridExpr.from_meta(autotuner.inductor_meta, config)
        exec("\n".join(expressions.prefix), scope)
        grid = tuple(
            eval(str(e), scope) for e in (expressions.x_grid, expressions.y_grid, expressions.z_grid)
        )
        if 0 not in grid:
            kernel[grid](*arguments[: len(names)], **config.kwargs)
