"""What torch.compile makes of each model, counted without a GPU: the ledger `bench/ledger.json`.

A row stands for a model of `configs/models` with its layers, heads and widths cut down, in inference or in
training, in one dtype, compiled by one version of torch for one device. It holds

    sites     fused sites by fusion
    kernels   kernels that Inductor wrote and launches
    extern    calls of other libraries, by name: matrix products, attention
    bytes     read and written by all of them, as Inductor counts them

`INDUCTOR_FUSIONS_POLICY=always`: what is proved is fused, whatever a table of measurements says, so that a row
changes with the code and with torch alone. CUDA is a device that does not exist (`bench.cuda_codegen`). There
attention is decided as on a CPU, because that is settled before the graph is moved; attention calls are counted
under one name, since which kernel SDPA takes is not known without a GPU.

A row is worse where a fusion has fewer sites, or where there are more kernels, extern calls or bytes; it is stale
where it only gained. Rewriting the file accepts both, and the diff is what is reviewed.

    python -m bench.ledger                  # rewrite the rows of this torch: make ledger
    python -m bench.ledger --check          # exit 1, with the rows named, where one is worse or stale
    python -m bench.ledger --check --quick  # one dtype, the models of QUICK: a minute; what the tests run
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx

import inductor_fusions
from bench import cuda_codegen, models
from bench.common import Json, Progress
from inductor_fusions import reporting

PATH = Path(__file__).with_name("ledger.json")
ARCH = 90
DEVICES = ("cuda", "cpu")
DTYPES = ("bfloat16", "float32")
HEADS = 4
#: Versions that decide what a row holds. Their rows are compared only where all of them are the same.
PACKAGES = ("torch", "transformers", "triton")
#: Cases of the quick check: every fusion is in one of them.
QUICK = ("bert-base eager padded", "llama-1b sdpa", "gpt2 eager")

#: Names of a configuration for the number of heads, of shared heads, and for what is a multiple of the heads.
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_SHARED = ("num_key_value_heads",)
_WIDTHS = "hidden_size intermediate_size n_embd n_inner d_model d_ff ffn_dim word_embed_proj_dim".split()


# Cases -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One model to compile: `name` is that of its rows."""

    name: str
    case: models.Case


def entries(quick: bool = False) -> list[Entry]:
    """Each kind of model and attention of `bench.models`, in inference and in training, in each dtype."""
    found: dict[str, Entry] = {}
    for case in models.CASES:
        words = [case.model, case.attn]
        words += ["padded"] * case.padded + ["cache"] * case.use_cache + ["dropout"] * (case.dropout > 0)
        load = " ".join(words)
        trains = (True,) if case.dropout > 0 else (False,) if case.use_cache else (False, True)
        for train in trains:
            for dtype in DTYPES[:1] if quick else DTYPES:
                small = replace(models.quick_case(case), name=load, train=train, dtype=dtype, mode="default")
                name = f"{load} {'training' if train else 'inference'} {dtype}"
                if not quick or load in QUICK:
                    found.setdefault(name, Entry(name, small))
    return list(found.values())


def narrow(case: models.Case, quick: bool) -> tuple[str, Json]:
    """The configuration of a case, in the sizes of its quick form, with few heads of the same head dim."""
    architecture, values = models_config(case, True)
    heads = next((values[n] for n in _HEADS if isinstance(values.get(n), int)), HEADS)
    if heads > HEADS:
        for name in (*_HEADS, *_WIDTHS):
            if isinstance(values.get(name), int):
                values[name] = values[name] * HEADS // heads
        for name in _SHARED:
            if isinstance(values.get(name), int):
                values[name] = max(1, values[name] * HEADS // heads)
    return architecture, values


models_config = models.model_config


# Compiling ---------------------------------------------------------------------------------------------


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


def compiled(entry: Entry) -> dict[str, Compiled]:
    """Compile a model for each device; nothing is run but the graphs that Inductor is given, on the CPU."""
    from torch._inductor import compile_fx
    from torch._inductor import config as inductor_config

    found = {device: Compiled(Counter(), 0, Counter(), 0) for device in DEVICES}
    # Which instructions and how many threads this machine has must not matter.
    settings = {"force_disable_caches": True, "compile_threads": 1, "cpp.simdlen": 1, "cpp.threads": 4}
    case = entry.case
    torch._dynamo.reset()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(models, "model_config", narrow))
        stack.enter_context(inductor_config.patch(settings))
        stack.enter_context(inductor_fusions.config.patch(enabled=True, policy="always"))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        model = models.build(case, case.attn, "cpu", quick=True)
        inputs = models.make_inputs(case, narrow(case, True)[1], "cpu")
        backend = partial(compile_fx.compile_fx, inner_compile=partial(_count, found))
        before = stack.enter_context(reporting.isolated(keep=False))
        with torch.set_grad_enabled(case.train):
            hidden = torch.compile(model, backend=backend, dynamic=False)(**inputs).last_hidden_state
            if case.train:
                hidden.float().pow(2).mean().backward()
    for each in found.values():
        each.sites.update(_fused(before))
    torch._dynamo.reset()
    return found


def _count(
    found: Mapping[str, Compiled], gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
) -> Callable[..., Any]:
    """Inductor's inner compile: writes the code for both devices, and runs the graph as it is."""
    from functorch.compile import make_boxed_func

    for device in DEVICES:
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


def measure(entry: Entry) -> dict[str, Json]:
    """The rows of a model, by key."""
    return {key(entry.name, device): each.row() for device, each in compiled(entry).items()}


# The file ----------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """What rows are compared under: the versions of torch and of what writes the models' graphs."""
    found = {name: metadata.version(name).partition("+")[0] for name in PACKAGES}
    return {"torch": found.pop("torch"), **found}


def series(version: str) -> str:
    """ "2.13.0+cpu" -> "2.13" """
    return ".".join(version.split(".")[:2])


def key(name: str, device: str) -> str:
    """The name of a row, without the version of torch."""
    return f"{name} {device}"
