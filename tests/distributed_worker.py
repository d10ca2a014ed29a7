"""One process of `bench.distributed.torchrun`: a small Llama under torch's engines, one after the other.

An engine whose name ends in "lora" trains adapters of PEFT on the frozen model.

The first rank writes a JSON file after each engine: engine -> "" or what was wrong. With `--times` before
them it is engine -> times of a training step of a larger model, with the fusions as they are by default and
without.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import re
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import inductor_fusions
from bench import model_cases
from inductor_fusions import config, fusions
from inductor_fusions.driver import passes
from tests import blocks
from tests.support.processes import leave

#: Of the model that is timed, on a GPU and to try it on a CPU: samples of a process, and their tokens.
TIMED = {"cuda": (4, 2048), "cpu": (2, 16)}
#: Steps: before times are taken, in each block of them; and blocks.
STEPS = {"cuda": (6, 15, 3), "cpu": (2, 3, 1)}
#: Counters of fused sites.
COUNTED = "fusions_(?!record_)[a-z_]+"

#: How many attentions the model that is checked has.
BLOCKS = 1
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWS = ("o_proj", "down_proj")


def made(engine: str, model: nn.Module | None = None) -> Any:
    """The model of an engine, the same in each process: `model`, or the small one that is checked."""
    model = blocks.model(BLOCKS) if model is None else model
    if engine.endswith("inference"):
        model.eval()
    if not engine.endswith("lora"):
        return model
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=[*COLUMNS, *ROWS], init_lora_weights=False))


def llama(device: str) -> tuple[nn.Module, dict[str, Any]]:
    """Llama-3.2-1B with its loss head, and random weights in bfloat16; on a CPU a small one in float32.
    With a batch."""
    kind = device.partition(":")[0]
    dtype = "bfloat16" if kind == "cuda" else "float32"
    case = model_cases.Case("timed", "llama-1b", "sdpa", *TIMED[kind], train=True, dtype=dtype)
    model = model_cases.build(case, case.attn, device, kind == "cpu", auto="AutoModelForCausalLM")
    batch = model_cases.make_inputs(case, model_cases.model_config(case, kind == "cpu")[1], device)
    return model, batch


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """The blocks of a model, with or without adapters."""
    return next(each for each in model.modules() if isinstance(each, nn.ModuleList))


def tensor_parallel(model: nn.Module, mesh: Any) -> nn.Module:
    """Heads and hidden columns over a mesh. Of an adapter the matrix on the split side is split too."""
    for block in blocks_of(model):
        plan: dict[str, Any] = {}
        for name, module in block.named_modules():
            words = set(name.split("."))
            if isinstance(module, nn.Linear) and words.intersection(COLUMNS) and "lora_A" not in words:
                plan[name] = ColwiseParallel()
            if isinstance(module, nn.Linear) and words.intersection(ROWS) and "lora_B" not in words:
                plan[name] = RowwiseParallel()
        parallelize_module(block, mesh, plan)
    return model


def wrapped(engine: str, size: int, model: Any) -> tuple[Any, int]:
    """(a compiled model under an engine, into how many parts the samples go over the ranks)."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    model.to(device)
    if engine.startswith("fsdp_tp"):
        pairs = init_device_mesh(device, (size // 2, 2), mesh_dim_names=("samples", "heads"))
        return sharded(tensor_parallel(model, pairs["heads"]), pairs["samples"]), size // 2
    mesh = init_device_mesh(device, (size,))
    if engine in ("ddp", "ddp_lora"):
        return DistributedDataParallel(torch.compile(model)), size
    if engine == "ddp_outside":
        return torch.compile(DistributedDataParallel(model)), size
    if engine.startswith("fsdp"):
        return sharded(model, mesh), size
    assert engine.startswith("tp")
    model = tensor_parallel(model, mesh)
    for block in blocks_of(model):
        block.compile()
    return model, 1


def sharded(model: Any, mesh: Any) -> Any:
    """FSDP2 of compiled blocks."""
    for block in blocks_of(model):
        block.compile()
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def modules_of_code() -> list[Any]:
    """What Inductor has written, or found in a cache, and loaded."""
    from torch._inductor.codecache import PyCodeCache

    return list(PyCodeCache.modules)


def written_code(first: int) -> list[str]:
    """Hashes of those modules, from the first one asked for on, without numbers of devices and groups."""
    found = []
    for module in modules_of_code()[first:]:
        text = Path(str(module.__file__)).read_text()
        if "AsyncCompile()" in text:
            text = re.sub(r"(cuda:|index=|stream\(?|Guard\(|device\()\d+", r"\1", text)
            # Groups of ranks along one dim of a mesh have names of their own, on stock as well.
            text = re.sub(r"(_c10d_functional\.\w+\.default\(.*)'\d+'\)", r"\1)", text)
            # Files of kernels are named after their text, with the number of the device in it.
            text = re.sub(r"(# kernel path:).*", r"\1", text)
            found.append(hashlib.sha256(text.encode()).hexdigest()[:16])
    return sorted(found)


def problems(engine: str, device: str) -> str:
    """What is wrong on this rank: a result that is not that of one process, or a site that was not fused."""
    rank, size = dist.get_rank(), dist.get_world_size()
    inductor_fusions.clear()
    torch._dynamo.reset()
    counters.clear()
    first = len(modules_of_code())
    train = not engine.endswith("inference")
    with config.patch(policy="always"), torch.set_grad_enabled(train):
        model, parts = wrapped(engine, size, made(engine))
        x, mine = blocks.batch(4).to(device), rank * parts // size
        out = model(x.chunk(parts)[mine])
        if train:
            out.square().mean().backward()
    report = inductor_fusions.report()

    alone = made(engine).to(device)
    expected = alone(x)
    if train:
        expected.square().mean().backward()
    grads = dict(alone.named_parameters())
    expected = expected.chunk(parts)[mine]
    found = {"the output": (whole(out), expected)}
    for name, parameter in model.named_parameters():
        name = name.replace("module.", "").replace("_orig_mod.", "")
        if parameter.requires_grad and train:
            found[name] = (whole(parameter.grad), grads[name].grad)
    wrong = [name for name, pair in found.items() if not torch.allclose(*pair, rtol=1e-4, atol=1e-5)]

    # Each rank fuses the same, calls it by the same name, and gets the same code.
    said: list[Any] = [None] * size
    sites = [(site.verdict, site.kernel, site.reason) for site in report]
    code = written_code(first)
    dist.all_gather_object(said, (passes.FusionPass("pre_grad", fusions.ALL).uuid(), sites, code))
    text = f"not equal: {wrong}. " if wrong else ""
    text += "" if all(other == said[0] for other in said) else f"the ranks differ: {said}. "
    text += "" if code else "no code was written. "
    fused = counters["inductor"]["fusions_attention"]  # also where a cache served what another engine made
    return text + ("" if fused == BLOCKS and not report.count("failed") else f"{fused} fused: {report}")


def step_time(engine: str, device: str, fused: bool) -> tuple[list[float], int, int]:
    """(seconds of a step, the median of each block of them; its peak of memory in bytes; fused sites), under
    one setting. A step is a forward and a backward, or the forward of a prompt."""
    kind = device.partition(":")[0]
    first, steps, count = STEPS[kind]
    train = not engine.endswith("inference")
    torch._dynamo.reset()
    gc.collect()  # the model before this one
    counters.clear()
    with config.patch(enabled=fused), torch.set_grad_enabled(train):
        model, batch = llama(device)
        model, _ = wrapped(engine, dist.get_world_size(), made(engine, model))
        more = {"labels": batch["input_ids"]} if train else {"logits_to_keep": 1}

        def step() -> float:
            started = time.perf_counter()
            out = model(**batch, **more)
            if train:
                out.loss.backward()
                model.zero_grad(set_to_none=True)
            if kind == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - started

        for _ in range(first):
            step()
        if kind == "cuda":
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        found = [statistics.median(step() for _ in range(steps)) for _ in range(count)]
        peak = torch.cuda.max_memory_allocated() if kind == "cuda" else 0
    sites = sum(n for name, n in counters["inductor"].items() if re.fullmatch(COUNTED, name))
    return found, peak, sites


def times(engine: str, device: str) -> dict[str, Any]:
    """Times of both settings, which take turns, on the slowest rank, and memory of the one with most."""
    found: dict[bool, list[float]] = {False: [], True: []}
    peaks, sites = {False: 0, True: 0}, 0
    for _ in range(2):
        for fused in (False, True):
            blocks_of_steps, peak, count = step_time(engine, device, fused)
            found[fused] += blocks_of_steps
            peaks[fused] = max(peaks[fused], peak)
            sites = count if fused else sites
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, (found, peaks, sites))
    stock, ours = (
        [max(each) for each in zip(*(s[0][kind] for s in said), strict=True)] for kind in (False, True)
    )
    return {
        "stock_ms": round(1e3 * min(stock), 4),
        "fused_ms": round(1e3 * min(ours), 4),
        "ratio": round(min(stock) / min(ours), 4),
        "spread": round(max(max(t) / min(t) - 1 for t in (stock, ours)), 4),
        "stock_gib": round(max(s[1][False] for s in said) / 2**30, 3),
        "fused_gib": round(max(s[1][True] for s in said) / 2**30, 3),
        "sites": [s[2] for s in said],
    }


def write(path: Path, results: dict[str, Any]) -> None:
    """In one step: whoever stops this finds a whole file."""
    if dist.get_rank() == 0:
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(results, indent=1))
        os.replace(temporary, path)


def main(backend: str, result: str, *engines: str) -> None:
    dist.init_process_group(backend)
    device = "cpu"
    if backend == "nccl":
        device = f"cuda:{dist.get_rank()}"
        torch.cuda.set_device(device)
    timed = engines[:1] == ("--times",)
    results: dict[str, Any] = {}
    for engine in engines[timed:]:
        if timed:
            results[engine] = times(engine, device)
            write(Path(result), results)
            continue
        said: list[Any] = [None] * dist.get_world_size()
        try:
            mine = problems(engine, device)
        except Exception:
            mine = traceback.format_exc()
        dist.all_gather_object(said, mine)
        results[engine] = "\n".join(filter(None, said))
        write(Path(result), results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave()
