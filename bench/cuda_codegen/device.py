"""A CUDA device that does not exist, and what answers in its place."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch


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


_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static const c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
static const c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);
"""


@functools.cache
def register_guard() -> None:
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
