"""The CUDA code that Inductor would emit, and its machine code, on a machine without a GPU.

`generate` compiles a function on CPU tensors. After Dynamo and autograd it moves Inductor's input graph to
a CUDA device that does not exist (fake tensors; the properties of the device come from `DEVICES`), lets
stock Inductor and its custom passes write the code for it, and then runs the CPU graph, so that a backward
is met as well. `compile_kernel` compiles one of the kernels to machine code for any architecture and says
what it takes of the chip.

    code = generate(model, (x,), train=True, arch=90)
    for kernel in code.kernels:
        print(kernel.name, compile_kernel(kernel.source, 90))

`interpret` runs the generated code on the CPU with Triton's interpreter, in a process that was started with
TRITON_INTERPRET=1, for numbers in float16 and float32 (bfloat16 would be silently wrong there).

What it cannot show: launches, races, and anything that Inductor finds out by running a kernel.
"""

from __future__ import annotations

from inductor_fusions._inductor import copied, on_cuda

from .compiling import Generated, generate
from .device import DEVICES, Device, pretended
from .interpreter import interpret
from .machine_code import MachineCode, compile_function, compile_kernel
from .written import Kernel, Module, write

__all__ = [
    "DEVICES",
    "Device",
    "Generated",
    "Kernel",
    "MachineCode",
    "Module",
    "compile_function",
    "compile_kernel",
    "copied",
    "generate",
    "interpret",
    "on_cuda",
    "pretended",
    "write",
]
