"""A stand-in for a CUDA device that is not in this machine."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class AbsentDevice:
    """The properties of a CUDA device that Inductor and Triton ask for.

    Attributes:
        name: as `torch.cuda.get_device_name` gives it.
        capability: compute capability (major, minor).
        shared_bytes: most shared memory of one thread block.
        total_bytes: device memory.
        l2_bytes: size of the L2 cache.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int
    total_bytes: int = 80 * 2**30
    l2_bytes: int = 50 * 2**20

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


_absent = 0


def is_absent() -> bool:
    """Whether the CUDA device is one that is not in this machine."""
    return _absent > 0


@contextlib.contextmanager
def absent_device(device: AbsentDevice) -> Iterator[None]:
    """Inside, everything that torch and Triton are asked of the CUDA device is answered from `device`."""
    global _absent
    with contextlib.ExitStack() as stack:
        is_available = torch.cuda.is_available
        for patch in _answered(device):
            stack.enter_context(patch)
        if importlib.util.find_spec("triton") is not None:
            stack.enter_context(_stub_driver(device))
        stack.enter_context(_ctc_loss())
        for patch in _traced_without_device(is_available):
            stack.enter_context(patch)
        stack.enter_context(device_guard())
        _forget_answers()
        stack.callback(_forget_answers)
        _absent += 1
        try:
            yield
        finally:
            _absent -= 1


def _answers(device: AbsentDevice) -> dict[str, Callable[..., Any]]:
    """Functions of `torch.cuda`, by name, as they answer where there is this device."""
    properties = device.properties()
    return {
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
        "is_current_stream_capturing": lambda: False,  # Dynamo asks; a torch built with CUDA asks the driver
    }


def _answered(device: AbsentDevice) -> Iterator[contextlib.AbstractContextManager[Any]]:
    """Patches of what torch asks of a device."""
    from torch._dynamo import device_interface
    from torch._subclasses import fake_tensor

    # Dynamo reads the current stream of an accelerator, which only a device that is there has.
    accelerated = torch.accelerator.is_available()
    yield mock.patch.object(torch.accelerator, "is_available", lambda: accelerated)
    if not accelerated:  # a fake would initialise the device
        yield mock.patch.object(fake_tensor, "init_gpu_context", lambda device: None)
    for name, answer in _answers(device).items():
        if hasattr(torch.cuda, name):
            yield mock.patch.object(torch.cuda, name, answer)
        if name in vars(device_interface.CudaInterface) and name != "is_available":
            yield mock.patch.object(device_interface.CudaInterface, name, staticmethod(answer))
    for name, takes in _attention(device.capability).items():
        yield mock.patch.object(torch.backends.cuda, name, takes)


def _traced_without_device(
    is_available: Callable[[], bool],
) -> Iterator[contextlib.AbstractContextManager[Any]]:
    """Patches of what torch would compute on the device while it traces.

    Args:
        is_available: of `torch.cuda`, as it is.
    """
    from torch._inductor.fx_passes import joint_graph, post_grad
    from torch._subclasses import fake_impls, fake_tensor
    from torch.fx.experimental import proxy_tensor

    def with_real_tensors(initialize: Callable[..., Any]) -> Callable[..., Any]:
        """Stock traces its patterns on the device that there is."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with mock.patch.object(torch.cuda, "is_available", is_available):
                return initialize()

        return call

    for module in (joint_graph, post_grad):
        yield mock.patch.object(module, "lazy_init", with_real_tensors(module.lazy_init))
    # torch has no meta kernel of it, and would run it on the device to see its results.
    gru = {torch.ops.aten._thnn_fused_gru_cell.default: _gru_cell}
    yield mock.patch.dict(fake_impls.op_implementations_dict, gru)
    # No constant is computed on the device, such as `torch.tensor(number, device="cuda")`.
    yield mock.patch.object(fake_tensor.FakeTensorMode, "avoid_device_init", True)
    yield mock.patch.object(proxy_tensor, "CONSTANT_NUMEL_LIMIT", -1)
    folder = joint_graph.UniformValueConstantFolder  # it makes constants on the device of their values
    for name in ("__init__", "run"):
        yield mock.patch.object(folder, name, _computing_on_cpu(getattr(folder, name)))


@contextlib.contextmanager
def _ctc_loss() -> Iterator[None]:
    """`ctc_loss` of tensors without values: torch reads its lengths. As in stock, a graph ends before it."""
    from torch._guards import TracingContext
    from torch._subclasses.fake_tensor import DynamicOutputShapeException

    def losses(
        log_probs: torch.Tensor,
        targets: torch.Tensor,
        input_lengths: Any,
        target_lengths: Any,
        blank: int = 0,
        reduction: int = 1,
        zero_infinity: bool = False,
    ) -> torch.Tensor:
        if TracingContext.try_get() is not None:
            raise DynamicOutputShapeException(torch.ops.aten._ctc_loss.Tensor)
        found = log_probs.sum((0, -1))  # one for each sequence, with a gradient
        return found.sum() if reduction else found

    if is_absent():
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    whole = {torch._C.DispatchKey.CompositeImplicitAutograd: losses}  # for inference mode
    try:
        with contextlib.ExitStack() as stack:
            for overload in (torch.ops.aten.ctc_loss.IntList, torch.ops.aten.ctc_loss.Tensor):
                library.impl(overload, losses, "AutogradCUDA")
                stack.enter_context(mock.patch.dict(overload.py_kernels, whole))
            yield
    finally:
        library._destroy()


def _gru_cell(mode: Any, func: Any, input_gates: Any, hidden_gates: Any, hx: Any, *biases: Any) -> Any:
    """The hidden state and the workspace of a GRU's cell, as fakes. Source: RNN.cu of ATen."""
    with mode:
        return hx.new_empty(hx.shape), hx.new_empty([hx.shape[0], 5 * hx.shape[1]])


def _attention(capability: tuple[int, int]) -> dict[str, Callable[..., bool]]:
    """Which fused kernels of SDPA take an attention: what torch asks of a device, for one that is absent."""

    def filled(params: Any) -> bool:
        return bool(params.query.shape[2] != 0 and params.key.shape[2] != 0)

    def efficient(params: Any, debug: bool = False) -> bool:
        q, k, v = params.query, params.key, params.value
        aligned = 8 if q.dtype != torch.float32 else 4
        return (
            torch.backends.cuda.mem_efficient_sdp_enabled()
            and filled(params)
            and q.dtype in (torch.float16, torch.bfloat16, torch.float32)
            and q.shape[-3] == k.shape[-3]
            and q.shape[-1] % aligned == v.shape[-1] % aligned == 0
        )

    def half(params: Any, widest: int) -> bool:
        dim, *others = (t.shape[-1] for t in (params.query, params.key, params.value))
        known = params.query.dtype in (torch.float16, torch.bfloat16) and filled(params)
        return bool(known and all(each == dim for each in others) and dim <= widest and dim % 8 == 0)

    def flash(params: Any, debug: bool = False) -> bool:
        return torch.backends.cuda.flash_sdp_enabled() and params.attn_mask is None and half(params, 256)

    def cudnn(params: Any, debug: bool = False) -> bool:
        mask = params.attn_mask
        fits = (mask is None or not mask.requires_grad) and params.key.shape[2] != 1
        return torch.backends.cuda.cudnn_sdp_enabled() and capability >= (9, 0) and fits and half(params, 128)

    return {
        "can_use_efficient_attention": efficient,
        "can_use_flash_attention": flash,
        "can_use_cudnn_attention": cudnn,
    }


@contextlib.contextmanager
def _stub_driver(device: AbsentDevice) -> Iterator[None]:
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


#: Numbers of device types in C++, and how many are reserved for them.
_CUDA, _META, _TYPES = 1, 14, 21


@contextlib.contextmanager
def device_guard() -> Iterator[None]:
    """Let C++ switch to a CUDA device that is absent, as operations do before they see fake tensors.

    A torch that is built with CUDA brings what is needed. For one that is not, the guard of the meta device,
    which does nothing, stands in that of CUDA.

    Raises:
        RuntimeError: torch's library has no such registry.
    """
    torch._C._ensureCUDADeviceGuardSet()
    if torch.backends.cuda.is_built():
        yield
        return
    folder = Path(torch.__file__).parent / "lib"
    try:
        library = ctypes.CDLL(str(next(folder.glob("*c10.*"))))
        symbol = "_ZN3c104impl26device_guard_impl_registryE"
        registry = (ctypes.c_void_p * _TYPES).in_dll(library, symbol)
    except (OSError, StopIteration, ValueError) as error:
        raise RuntimeError(f"this torch cannot stand in for a CUDA device: {error}") from error
    before = registry[_CUDA]
    registry[_CUDA] = before or registry[_META]
    try:
        yield
    finally:
        registry[_CUDA] = before


class _OnCPU(TorchFunctionMode):
    """What is computed inside is computed on the CPU, also what names another device."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(
            torch.device, lambda device: torch.device("cpu"), (args, kwargs or {})
        )
        return func(*args, **kwargs)


def _computing_on_cpu(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that computes on the CPU."""

    def compute(*args: Any, **kwargs: Any) -> Any:
        with _OnCPU():
            return method(*args, **kwargs)

    return compute
