"""Compiles a model of the ledger for each device, and counts what comes of it."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx

import inductor_fusions
from bench import model_cases
from bench.common import Json, one_line
from devtools import cuda_codegen
from devtools.ledger.entries import Entry, narrow
from inductor_fusions import reporting
from inductor_fusions.decisions import tables
from inductor_fusions.fusions.attention import flex

ARCH = 90
DEVICES = ("cuda", "cpu")
#: Within the reasons that are about flex attention, which is for GPUs.
FLEX = "flex attention"
#: What leaves a site to stock on a CPU, in fusions before autograd.
_ON_A_GPU = (
    "fusions.outer_product_linear.check_kernel", "fusions.dot_interaction.check_kernel",
    "fusions.lora.inputs.check_device", "fusions.lora.profit.check_capability",
    "fusions.lora.merged.check_device", "fusions.lora.norms.check_device",
    "fusions.lora.factors.check_device",
)  # fmt: skip


@contextlib.contextmanager
def on_a_gpu() -> Iterator[None]:
    """What has kernels for a GPU alone is fused all the same."""
    with contextlib.ExitStack() as stack:
        for check in _ON_A_GPU:
            stack.enter_context(mock.patch(f"inductor_fusions.{check}", lambda *_: None))
        yield


@dataclass
class Compiled:
    """What became of one model on one device."""

    sites: Counter[str]
    kernels: int
    extern: Counter[str]
    bytes: int

    def row(self) -> Json:
        """As the ledger holds it."""
        return {
            "sites": dict(sorted(self.sites.items())),
            "kernels": self.kernels,
            "extern": dict(sorted(self.extern.items())),
            "bytes": self.bytes,
        }


def measure(entry: Entry) -> list[Json]:
    """The rows of a model: one for each device."""
    found = compiled(entry)
    return [{**entry.header(device), **each.row()} for device, each in found.items()]


def compiled(entry: Entry) -> dict[str, Compiled]:
    """Compile a model for each device; nothing is run but the graphs that Inductor is given, on the CPU.

    Attention is decided before the device of the code is known, as on a CPU. Where flex attention was left
    because it is for GPUs, the code for a GPU is written once more, with it.
    """
    found, sites = _compiled(entry, DEVICES)
    if any(site.fusion == "attention" and FLEX in site.reason for site in sites):
        with mock.patch.object(flex, "DEVICES", frozenset(DEVICES)):
            found |= _compiled(entry, ("cuda",))[0]
    return found


def _compiled(entry: Entry, devices: Sequence[str]) -> tuple[dict[str, Compiled], list[reporting.Site]]:
    """What became of a model on some devices, and the sites that were decided before the devices were."""
    from torch._inductor import compile_fx
    from torch._inductor import config as inductor_config

    found = {device: Compiled(Counter(), 0, Counter(), 0) for device in devices}
    # Which instructions and how many threads this machine has must not matter.
    settings = {"force_disable_caches": True, "compile_threads": 1, "cpp.simdlen": 1, "cpp.threads": 4}
    torch._dynamo.reset()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(model_cases, "model_config", narrow))
        stack.enter_context(on_a_gpu())
        # A new row of a table can choose another configuration for a kernel whose code did not change.
        stack.enter_context(mock.patch.object(tables, "load", lambda name: None))
        stack.enter_context(inductor_config.patch(settings))
        stack.enter_context(inductor_fusions.config.patch(enabled=True, policy="always"))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        model, inputs = entry.make()
        backend = partial(compile_fx.compile_fx, inner_compile=partial(_count, found))
        before = stack.enter_context(reporting.isolated(keep=False))
        with torch.set_grad_enabled(entry.train):
            out = torch.compile(model, backend=backend, dynamic=False)(**inputs)
            hidden = out if isinstance(out, torch.Tensor) else out.last_hidden_state
            if entry.train:
                hidden.float().pow(2).mean().backward()
    for each in found.values():
        each.sites.update(_fused(before))
    torch._dynamo.reset()
    return found, list(before)


def _count(
    found: Mapping[str, Compiled], gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
) -> Callable[..., Any]:
    """Inductor's inner compile: writes the code for both devices, and runs the graph as it is."""
    from functorch.compile import make_boxed_func

    for device in found:
        # What was recorded up to here belongs to every device.
        with reporting.isolated(keep=False) as sites:
            if device == "cuda":
                moved, inputs = cuda_codegen.on_cuda(gm, example_inputs)
                with cuda_codegen.pretended(cuda_codegen.DEVICES[ARCH]):
                    written = cuda_codegen.write(moved, inputs, **kwargs)
            else:
                written = cuda_codegen.write(cuda_codegen.copied(gm), example_inputs, **kwargs)
        each = found[device]
        each.sites.update(_fused(sites))
        each.kernels += len(written.launches) if device == "cuda" else cpp_kernels(written.wrapper)
        each.extern.update(extern_name(call) for call in written.extern_calls)
        each.bytes += written.bytes_accessed
    return make_boxed_func(gm.forward)


def _fused(sites: Iterable[reporting.Site]) -> Counter[str]:
    return Counter(site.fusion for site in sites if site.verdict == "fused")


def cpp_kernels(wrapper: str) -> int:
    """C++ kernels that a wrapper calls."""
    body = wrapper.split("def call(", 1)[-1].split("\ndef ")[0]
    return len(re.findall(r"^\s*cpp_fused\w*\(|^\s*cpp_\w+\(", body, re.MULTILINE))


def extern_name(call: str) -> str:
    """ "extern_kernels.addmm" -> "addmm"; every kernel that SDPA may take is "attention"."""
    name = call.removeprefix("extern_kernels.").removeprefix("torch.ops.").removesuffix(".default")
    if "scaled_dot_product" in name:
        return "attention backward" if "backward" in name else "attention"
    return name


def set_up() -> None:
    """Settings of a process that measures."""
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.ERROR)
    logging.getLogger("inductor_fusions").setLevel(logging.ERROR)


def work(entry: Entry, lock: Path) -> tuple[list[Json] | str, bool]:
    """In a worker: the rows of a model, or why there are none."""
    set_up()
    try:
        return measure(entry), True
    except Exception as error:
        return one_line(error, 300), True
