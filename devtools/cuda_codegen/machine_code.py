"""Machine code of kernels, and what it takes of a chip."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .device import DEVICES, Device, pretended
from .hazards import overwritten
from .written import load


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
        overwritten: matrix products one of whose operands changes while it may still be read.
    """

    config: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    shared_limit: int
    warps: int
    ptx: str
    overwritten: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """No register spills, shared memory is within the limit, and no operand changes while it is read."""
        in_registers = self.spill_bytes == 0 and self.stack_bytes == 0 and not self.overwritten
        return in_registers and self.shared_bytes <= self.shared_limit

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
            + "".join(f", overwritten while it is read: {dot}" for dot in self.overwritten)
        )


def compile_kernel(source: str, arch: int = 90) -> list[MachineCode]:
    """Compile the module of one kernel to machine code, in each of its configurations.

    Args:
        arch: a key of `DEVICES`; it need not be the one that the source was generated for.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    device = DEVICES[arch]
    with pretended(device, None):
        autotuner = load(source)
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
        signature: argument -> Triton type ("*bf16", "i32", "constexpr").
        constants: argument -> value, of those that are constexpr.
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
        overwritten=overwritten(binary.asm["ttgir"]),
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
