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

import ast
import contextlib
import copy
import ctypes
import functools
import importlib
import importlib.util
import math
import os
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Device:
    """What Inductor and Triton ask of a CUDA device.

    Attributes:
        name: as `torch.cuda.get_device_name` gives it.
        capability: compute capability (major, minor).
        multiprocessors: their number.
        shared_bytes: most shared memory of one thread block.
        total_bytes: device memory.
        l2_bytes: size of the L2 cache.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int
    total_bytes: int
    l2_bytes: int

    def properties(self) -> types.SimpleNamespace:
        """The fields of `torch.cuda.get_device_properties`."""
        return types.SimpleNamespace(
            name=self.name,
            major=self.capability[0],
            minor=self.capability[1],
            multi_processor_count=self.multiprocessors,
            total_memory=self.total_bytes,
            regs_per_multiprocessor=65536,
            max_threads_per_multi_processor=2048,
            max_threads_per_block=1024,
            warp_size=32,
            shared_memory_per_block=49152,
            shared_memory_per_block_optin=self.shared_bytes,
            shared_memory_per_multiprocessor=self.shared_bytes + 1024,
            L2_cache_size=self.l2_bytes,
            is_integrated=0,
            is_multi_gpu_board=0,
            gcnArchName="",
        )


#: One device of each architecture: 10 * major + minor -> device.
DEVICES: Mapping[int, Device] = {
    80: Device("NVIDIA A100-SXM4-80GB", (8, 0), 108, 166912, 80 * 2**30, 40 * 2**20),
    90: Device("NVIDIA H200", (9, 0), 132, 232448, 141 * 2**30, 50 * 2**20),
    100: Device("NVIDIA B200", (10, 0), 148, 232448, 180 * 2**30, 126 * 2**20),
}


@dataclass(frozen=True)
class Kernel:
    """A Triton kernel of generated code.

    Attributes:
        name: its function.
        source: the module that Inductor writes for it; `compile_kernel` takes it.
        is_template: it comes from a TritonTemplate rather than from Inductor's own loops.
    """

    name: str
    source: str
    is_template: bool


@dataclass(frozen=True)
class Module:
    """What Inductor wrote for one graph.

    Attributes:
        wrapper: the Python module that launches the kernels.
        graph: the graph it was written for, after the post-grad passes.
        is_backward: whether it is a backward.
        bytes_accessed: read and written by all kernels and extern calls, as Inductor counts them.
    """

    wrapper: str
    graph: fx.Graph
    is_backward: bool
    bytes_accessed: int = 0

    @functools.cached_property
    def kernels(self) -> list[Kernel]:
        """The Triton kernels in it."""
        found = []
        for node in ast.walk(ast.parse(self.wrapper)):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr == "triton" and ast.unparse(node.func.value) == "async_compile":
                name, source = (ast.literal_eval(argument) for argument in node.args[:2])
                found.append(Kernel(name, source, "@triton_heuristics.template(" in source))
        return found

    @property
    def extern_calls(self) -> list[str]:
        """Calls that launch no kernel of this code, in order: "extern_kernels.mm", "torch.ops.aten...."."""
        body = self.wrapper.split("def call(", 1)[-1].split("\ndef ")[0]
        return re.findall(r"\b(extern_kernels\.\w+|torch\.ops\.\w+\.\w+(?:\.\w+)?)\(", body)

    @property
    def shapes(self) -> list[tuple[str, ...]]:
        """The shape of each buffer that is allocated, in order: numbers and expressions of symbols."""
        calls = re.findall(r"= (empty_strided_\w+\(.*\))", self.wrapper)
        nodes = [ast.parse(call, mode="eval").body for call in calls]
        return [tuple(ast.unparse(size) for size in node.args[0].elts) for node in nodes]  # type: ignore[attr-defined]

    @property
    def buffers(self) -> list[int]:
        """Elements of each buffer that is allocated, in order; the sizes must be numbers."""
        return [math.prod(int(size) for size in shape) for shape in self.shapes]

    @property
    def launches(self) -> list[str]:
        """Names of the Triton kernels launched, in order."""
        return re.findall(r"^\s*(\w+)\.run\(", self.wrapper, re.MULTILINE)


@dataclass
class Generated:
    """All modules of one compiled function, in the order of their compiles.

    Attributes:
        modules: forward first, then backward.
        outputs: what the function returned on the CPU.
        grads: gradients of its inputs and parameters that require one, in order.
    """

    modules: list[Module] = field(default_factory=list)
    outputs: Any = None
    grads: tuple[torch.Tensor | None, ...] = ()

    @property
    def kernels(self) -> list[Kernel]:
        """The Triton kernels of all modules."""
        return [kernel for module in self.modules for kernel in module.kernels]

    @property
    def forward(self) -> Module:
        """The first forward."""
        return next(module for module in self.modules if not module.is_backward)

    @property
    def backward(self) -> Module:
        """The first backward."""
        return next(module for module in self.modules if module.is_backward)


def generate(
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    train: bool = False,
    run_backward: bool = True,
    arch: int = 90,
    dynamic: bool | None = None,
    config: Mapping[str, Any] | None = None,
    prefer: Callable[[str], float] | None = None,
    change: Callable[[fx.Graph], None] | None = None,
    interpreted: bool = False,
) -> Generated:
    """Compile `fn` as if its tensors were on a CUDA device.

    Args:
        fn: a function or a module, on the CPU.
        args: its arguments, CPU tensors among them; those that require a gradient are differentiated.
        train: run a backward, with ones as cotangents. Else nothing requires a gradient.
        run_backward: False only compiles it, with the forward: uncompiled, that of flex attention takes
            minutes on a CPU.
        arch: a key of `DEVICES`.
        dynamic: as in `torch.compile`.
        config: Inductor's config inside, such as {"max_autotune": True}.
        prefer: what autotuning would measure: name of a choice -> milliseconds. By default the first
            choice wins.
        change: called with each graph of aten operations before Inductor gets it, to replace what was
            decomposed for the CPU.
        interpreted: compute the outputs and gradients with the generated code, by `interpret`.

    Returns:
        The code of each graph.
    """
    import torch._dynamo
    import torch._functorch.config
    from torch._inductor import compile_fx
    from torch._inductor import config as inductor_config

    found = Generated()
    inner = functools.partial(_inner_compile, found, arch, prefer, change, dict(config or {}), interpreted)
    backend = functools.partial(compile_fx.compile_fx, inner_compile=inner)
    torch._dynamo.reset()
    eager_backward = torch._functorch.config.patch(force_non_lazy_backward_lowering=not run_backward)
    with inductor_config.patch(force_disable_caches=True), _no_parallel_compile(), eager_backward:
        with torch.enable_grad() if train else torch.no_grad():
            outputs = torch.compile(fn, backend=backend, dynamic=dynamic)(*args)
            if train and run_backward:
                tensors = [t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor)]
                tensors = [t for t in tensors if t.requires_grad]
                leaves = [t for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
                leaves += list(fn.parameters()) if isinstance(fn, torch.nn.Module) else []
                wanted = [t for t in leaves if t.requires_grad and t.is_leaf]
                ones = [torch.ones_like(t) for t in tensors]
                found.grads = torch.autograd.grad(tensors, wanted, ones, allow_unused=True)
        found.outputs = outputs
    torch._dynamo.reset()
    return found


def _inner_compile(
    found: Generated,
    arch: int,
    prefer: Callable[[str], float] | None,
    change: Callable[[fx.Graph], None] | None,
    config: dict[str, Any],
    interpreted: bool,
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    **kwargs: Any,
) -> Any:
    from functorch.compile import make_boxed_func

    moved, inputs = on_cuda(gm, example_inputs)
    if change is not None:
        for module in moved.modules():
            if isinstance(module, fx.GraphModule):
                change(module.graph)
                module.recompile()
    with pretended(DEVICES[arch], prefer), _config_patch(config):
        written = write(moved, inputs, **kwargs)
    found.modules.append(written)
    if interpreted:
        return make_boxed_func(lambda *values: interpret(written, values))
    return make_boxed_func(gm.forward)


def write(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Module:
    """What Inductor writes for a graph of aten operations; nothing of it is compiled or loaded.

    Args:
        gm: the graph, which the post-grad passes change.
        inputs: fake tensors and sizes, as Inductor's inner compile gets them.
        **kwargs: of the inner compile.
    """
    from torch._inductor import compile_fx

    kwargs.pop("cudagraphs", None)
    is_backward = bool(kwargs.get("is_backward"))
    found: list[Module] = []

    def keep(lowering: Any, lines: Any) -> None:
        count = sum(node.get_read_write_buffers_sizes() for node in lowering.scheduler.nodes)
        found.append(Module(getattr(lines, "value", lines), lowering.orig_gm.graph, is_backward, int(count)))

    with _stub_module_load(keep), contextlib.suppress(_Done):
        compile_fx.compile_fx_inner(gm, inputs, cudagraphs=None, **kwargs)
    return found[-1]


class _Done(BaseException):
    """The code was written; what would load it is not run. No `except Exception` may catch it."""


@contextlib.contextmanager
def _stub_module_load(keep: Callable[[Any, Any], None]) -> Iterator[None]:
    from torch._inductor.graph import GraphLowering

    def stop(self: Any, lines: Any) -> Any:
        keep(self, lines)
        raise _Done

    with mock.patch.object(GraphLowering, "_compile_to_module_lines", stop):
        yield


def _config_patch(changes: dict[str, Any]) -> Any:
    from torch._inductor import config

    # Nothing can be run to see whether an epilogue pays.
    return config.patch({"benchmark_epilogue_fusion": False, **changes})


@contextlib.contextmanager
def _no_parallel_compile() -> Iterator[None]:
    """No worker processes: the stubs below hold in this one alone."""
    from torch._inductor import config

    with config.patch(compile_threads=1):
        yield


# Moving a graph --------------------------------------------------------------------------------------


def on_cuda(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[fx.GraphModule, list[Any]]:
    """A copy of a graph with everything on a device ("cuda:0"), and fake inputs for it."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    _register_guard()
    values = [n.meta.get("val") for n in gm.graph.nodes]
    leaves = [v for v in [*pytree.tree_leaves(values), *example_inputs] if isinstance(v, FakeTensor)]
    mode = leaves[0].fake_mode if leaves else FakeTensorMode()

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        device = "cpu" if value.dim() == 0 and not isinstance(value, FakeTensor) else "cuda:0"
        with mode:
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)

    moved = copied(gm)
    for module in moved.modules():
        if isinstance(module, fx.GraphModule):
            _rewrite_devices(module)
            for node in module.graph.nodes if module is not moved else ():  # the body of an operation
                if "val" in node.meta:
                    node.meta["val"] = pytree.tree_map(move, node.meta["val"])
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    inputs = [
        move(node.meta.get("val", given)) for node, given in zip(placeholders, example_inputs, strict=True)
    ]
    _propagate(moved, mode, inputs)
    return moved, inputs


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph and of those inside it, with the same tensors.

    They are only looked at, and a deep copy of a fake loses its mode."""
    held = [*gm.parameters(), *gm.buffers()]
    held += [t for module in gm.modules() for t in vars(module).values() if isinstance(t, torch.Tensor)]
    moved: fx.GraphModule = copy.deepcopy(gm, {id(t): t for t in held})
    return moved


def _rewrite_devices(module: fx.GraphModule) -> None:
    def one(argument: Any) -> Any:
        return torch.device("cuda", 0) if isinstance(argument, torch.device) else argument

    for node in module.graph.nodes:
        node.args = pytree.tree_map(one, node.args)
        node.kwargs = pytree.tree_map(one, node.kwargs)
    module.recompile()


def _propagate(module: fx.GraphModule, mode: Any, inputs: Sequence[Any]) -> None:
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    def move(value: Any) -> Any:
        with mode:
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cuda:0")

    class Prop(FakeTensorProp):
        def fetch_attr(self, target: str) -> Any:
            value = super().fetch_attr(target)
            if not isinstance(value, torch.Tensor):
                return value
            return move(value)

    Prop(module, mode=mode).propagate_dont_convert_inputs(*inputs)


# A device that does not exist ------------------------------------------------------------------------

_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static const c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
static const c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);
"""


@functools.cache
def _register_guard() -> None:
    """Let C++ switch to a CUDA device where there is none, as many operations do before they see fakes."""
    if torch.cuda.is_available():
        return
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(prefix="cuda_codegen_") as folder:
        source, library = Path(folder) / "guard.cpp", Path(folder) / "guard.so"
        source.write_text(_GUARD)
        command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O0", "-shared", "-fPIC", str(source)]
        command += [f"-I{root / 'include'}", f"-L{root / 'lib'}", "-lc10", "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            raise RuntimeError(f"no guard of a CUDA device: {' '.join(command)}\n{done.stderr}")
        ctypes.CDLL(str(library))


#: Modules whose cached answers depend on the device.
_CACHED_IN = (
    "torch.utils._triton",
    "torch._inductor.utils",
    "torch._inductor.runtime.hints",
    "torch._inductor.select_algorithm",
    "torch._inductor.codecache",
    "torch._inductor.kernel.mm_common",
    "torch._inductor.kernel.mm",
    "torch._inductor.choices",
    "torch._inductor.codegen.cuda.cuda_env",
    "torch._inductor.codegen.triton",
    "torch._inductor.template_heuristics.triton",
    "torch._inductor.runtime.triton_heuristics",
    "torch._inductor.runtime.triton_helpers",
    "torch._dynamo.device_interface",
)


def _forget_answers() -> None:
    for name in _CACHED_IN:
        module = sys.modules.get(name)
        for value in list(vars(module).values()) if module is not None else ():
            if isinstance(value, functools._lru_cache_wrapper) and value.__module__.startswith("torch"):
                value.cache_clear()
    interface = sys.modules.get("torch._dynamo.device_interface")
    for cache in ("caching_worker_device_properties", "caching_worker_current_devices"):
        if interface is not None:
            getattr(interface, cache, {}).pop("cuda", None)
    hints = sys.modules.get("torch._inductor.runtime.hints")
    if hints is not None and hasattr(hints.DeviceProperties.create, "cache_clear"):
        hints.DeviceProperties.create.cache_clear()
    codecache = sys.modules.get("torch._inductor.codecache")
    if codecache is not None:
        codecache.CacheBase.get_system.cache_clear()


@contextlib.contextmanager
def pretended(device: Device, prefer: Callable[[str], float] | None = None) -> Iterator[None]:
    """Inside, everything that Inductor asks of the CUDA device is answered from `device`.

    Args:
        device: one of `DEVICES`.
        prefer: as in `generate`.
    """
    from torch._dynamo import device_interface
    from torch._inductor import select_algorithm

    properties = device.properties()
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_device_name": lambda device=None: properties.name,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_tf32_supported": lambda: True,
        "synchronize": lambda device=None: None,
        "get_rng_state": lambda device=0: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=0: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "is_initialized": lambda: False,
    }
    for name in ("triton.runtime.driver", "torch._inductor.codegen.triton", "torch._inductor.kernel.mm"):
        importlib.import_module(name)
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            if hasattr(torch.cuda, name):
                stack.enter_context(mock.patch.object(torch.cuda, name, answer))
            if name in vars(device_interface.CudaInterface) and name != "is_available":
                stack.enter_context(
                    mock.patch.object(device_interface.CudaInterface, name, staticmethod(answer))
                )
        stack.enter_context(_stub_driver(device))
        selector = select_algorithm.AlgorithmSelectorCache

        def time(self: Any, *args: Any, **kwargs: Any) -> dict[Any, float]:
            choices = kwargs["choices"] if "choices" in kwargs else args[5]
            if prefer is None:
                return {choice: float(index + 1) for index, choice in enumerate(choices)}
            return {choice: prefer(str(choice.name)) for choice in choices}

        stack.enter_context(mock.patch.object(selector, "do_autotuning", time))
        stack.enter_context(
            mock.patch.object(selector, "make_precompile_fn", lambda *a, **k: lambda *b, **c: None)
        )
        _forget_answers()
        stack.callback(_forget_answers)
        yield


@contextlib.contextmanager
def _stub_driver(device: Device) -> Iterator[None]:
    """Triton's active driver, for code that asks it of the target."""
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    major, minor = device.capability

    class Driver:
        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 10 * major + minor, 32)

        def get_current_device(self) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

        def get_device_interface(self) -> Any:
            return torch.cuda

        def is_active(self) -> bool:
            return True

    active = mock.patch.object(type(driver), "active", property(lambda self: Driver()), create=True)
    with active, mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None):
        yield


# Numbers ---------------------------------------------------------------------------------------------


def interpret(module: Module, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Run generated code on CPU tensors with Triton's interpreter.

    Args:
        module: the code.
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


class _Launcher:
    """A kernel of generated code; `run` is the interpreter."""

    def __init__(self, name: str, source: str, device_str: str = "cuda") -> None:
        # The interpreter's libdevice returns None.
        source = source.replace("libdevice.tanh(", "_tanh(").replace("libdevice.", "tl.math.")
        # Programs run one after the other: what the kernel in front makes is there.
        source = re.sub(r"tl\.extra\.cuda\.gdc_\w+\(\)", "pass", source)
        with pretended(DEVICES[90], None):
            self.autotuner = _load(source + _TANH)

    def run(self, *arguments: Any, stream: int = 0, **kwargs: Any) -> None:
        """Launch it over its whole grid, in its first configuration."""
        from torch._inductor.runtime.triton_heuristics import GridExpr

        autotuner = self.autotuner
        config, kernel = autotuner.configs[0], autotuner.fn
        extra = autotuner.inductor_meta.get("extra_launcher_args", [])
        names = [name for name in kernel.arg_names if name not in config.kwargs]
        scope = dict(zip([*names, *extra], arguments, strict=True))
        expressions = GridExpr.from_meta(autotuner.inductor_meta, config)
        exec("\n".join(expressions.prefix), scope)
        grid = tuple(
            eval(str(e), scope) for e in (expressions.x_grid, expressions.y_grid, expressions.z_grid)
        )
        if 0 not in grid:
            kernel[grid](*arguments[: len(names)], **config.kwargs)


# Machine code ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MachineCode:
    """What one configuration of a kernel takes of the chip.

    Attributes:
        config: its block sizes, warps and stages, in words.
        registers: 32-bit registers of one thread.
        spill_bytes: registers that went to local memory (stores and loads), in bytes of one thread.
        stack_bytes: local memory of one thread.
        shared_bytes: shared memory of one thread block.
        shared_limit: what the device has of it for one block.
        warps: warps of one block.
        ptx: its PTX.
    """

    config: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    shared_limit: int
    warps: int
    ptx: str

    @property
    def fits(self) -> bool:
        """No register spills, and shared memory is within the limit."""
        return self.spill_bytes == 0 and self.stack_bytes == 0 and self.shared_bytes <= self.shared_limit

    @property
    def uses_wgmma(self) -> bool:
        """Whether it uses Hopper's warpgroup matrix instructions."""
        return "wgmma.mma_async" in self.ptx

    @property
    def uses_mma(self) -> bool:
        """Whether it uses tensor cores in any way."""
        return any(name in self.ptx for name in ("wgmma.mma_async", "mma.sync", "tcgen05.mma"))

    @property
    def uses_tma(self) -> bool:
        """Whether it loads by bulk tensor copies."""
        return "cp.async.bulk.tensor" in self.ptx

    def __str__(self) -> str:
        return (
            f"{self.config}: {self.registers} registers, {self.spill_bytes} B spilled, "
            f"{self.shared_bytes} of {self.shared_limit} B shared"
        )


def compile_kernel(source: str, arch: int = 90) -> list[MachineCode]:
    """Compile the module of one kernel to machine code, in each of its configurations.

    Args:
        source: `Kernel.source`.
        arch: a key of `DEVICES`; it need not be the one that the source was generated for.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    device = DEVICES[arch]
    with pretended(device, None):
        autotuner = _load(source)
        found = []
        for config in autotuner.configs:
            meta = autotuner._create_compile_meta(config)
            meta["cc"] = arch
            options = autotuner._create_compile_options(config, meta)
            binary = triton.compile(
                triton.compiler.ASTSource(
                    autotuner.fn, meta["signature"], meta["constants"], meta["configs"][0]
                ),
                target=GPUTarget("cuda", arch, 32),
                options=options,
            )
            found.append(_read(binary, _name(config), device))
    return found


def compile_function(
    fn: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    arch: int = 90,
    *,
    num_warps: int = 4,
    num_stages: int = 3,
    aligned: Sequence[str] = (),
) -> MachineCode:
    """Compile a `triton.jit` function to machine code.

    Args:
        fn: the function.
        signature: argument -> Triton type ("*bf16", "i32", "constexpr").
        constants: argument -> value, of those that are constexpr.
        arch: a key of `DEVICES`.
        num_warps, num_stages: as for a launch.
        aligned: arguments that are multiples of 16 (pointers: of 16 bytes).
    """
    import triton
    from triton.backends.compiler import GPUTarget

    with pretended(DEVICES[arch], None):
        attributes = {(list(signature).index(name),): [["tt.divisibility", 16]] for name in aligned}
        binary = triton.compile(
            triton.compiler.ASTSource(fn, dict(signature), dict(constants), attributes),
            target=GPUTarget("cuda", arch, 32),
            options={"num_warps": num_warps, "num_stages": num_stages},
        )
    return _read(binary, f"num_warps={num_warps}, num_stages={num_stages}", DEVICES[arch])


def _name(config: Any) -> str:
    parts = [f"{name}={value}" for name, value in config.kwargs.items()]
    return ", ".join([*parts, f"num_warps={config.num_warps}", f"num_stages={config.num_stages}"])


_loaded: list[tempfile.TemporaryDirectory[str]] = []


def _load(source: str) -> Any:
    """The autotuner that the module of a kernel defines."""
    folder = tempfile.TemporaryDirectory(prefix="cuda_codegen_")
    _loaded.append(folder)  # Triton reads the file again
    path = Path(folder.name) / "kernel.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"cuda_codegen_{len(_loaded)}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return next(value for value in vars(module).values() if hasattr(value, "_create_compile_meta"))


_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


def _read(binary: Any, config: str, device: Device) -> MachineCode:
    arch = 10 * device.capability[0] + device.capability[1]
    ptx = binary.asm["ptx"]
    report = _ptxas(ptx, arch)
    frames = _SPILLS.findall(report)
    return MachineCode(
        config=config,
        registers=max((int(n) for n in _REGISTERS.findall(report)), default=0),
        spill_bytes=sum(int(stores) + int(loads) for _, stores, loads in frames),
        stack_bytes=max((int(stack) for stack, _, _ in frames), default=0),
        shared_bytes=int(binary.metadata.shared),
        shared_limit=device.shared_bytes,
        warps=int(binary.metadata.num_warps),
        ptx=ptx,
    )


def _ptxas(ptx: str, arch: int) -> str:
    """What ptxas says of a kernel with -v."""
    suffix = "a" if arch >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [_ptxas_path(arch), "-v", f"--gpu-name=sm_{arch}{suffix}", str(path), "-o", f"{path}.o"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise RuntimeError(f"ptxas refused the kernel for sm_{arch}:\n{done.stderr}")
    return done.stdout + done.stderr


def _ptxas_path(arch: int) -> str:
    """The ptxas that Triton takes for an architecture."""
    from triton.backends.nvidia.compiler import get_ptxas

    return str(get_ptxas(arch).path)
