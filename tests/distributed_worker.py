"""One process of `bench.distributed.torchrun`: a small Llama under torch's engines, one after the other.

An engine whose name ends in "lora" trains adapters of PEFT on the frozen model.

The first rank writes a JSON file after each engine: engine -> "" or what was wrong. With `--times` before
them it is engine -> times of a training step of a larger model, with the fusions as they are by default and
without.
"""

from __future__ import annotations

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
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import inductor_fusions
from inductor_fusions import config, fusions
from inductor_fusions.driver import passes
from tests import blocks

#: Of the model that is timed: blocks, width, heads, heads of the keys; samples and their length.
TIMED = {"cuda": ((4, 2048, 16, 4), (4, 2048)), "cpu": ((1, 64, 4, 2), (2, 16))}
#: Steps: before times are taken, in each block of them; and blocks.
STEPS = {"cuda": (6, 15, 3), "cpu": (2, 3, 1)}

COLUMNS = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.gate_proj", "mlp.up_proj")
#: How many attentions there are.
BLOCKS = 1
ROWS = ("attention.o_proj", "mlp.down_proj")


def made(engine: str, sizes: tuple[int, ...] = (BLOCKS,)) -> Any:
    """The model of an engine, the same in each process."""
    model = blocks.model(*sizes)
    if not engine.endswith("lora"):
        return model
    from peft import LoraConfig, get_peft_model

    targets = [name.rpartition(".")[2] for name in (*COLUMNS, *ROWS)]
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))


def blocks_of(model: Any) -> Any:
    """The blocks of a model, with or without adapters."""
    return getattr(model, "base_model", model).get_submodule("model.blocks" if is_peft(model) else "blocks")


def is_peft(model: Any) -> bool:
    return hasattr(model, "peft_config")


def tensor_parallel(model: Any, mesh: Any) -> Any:
    plan: dict[str, Any] = {}
    for name in COLUMNS:  # of an adapter the second matrix is split as the weight, the first is whole
        parts = (f"{name}.base_layer", f"{name}.lora_B.default") if is_peft(model) else (name,)
        plan |= {part: ColwiseParallel() for part in parts}
    for name in ROWS:
        parts = (f"{name}.base_layer", f"{name}.lora_A.default") if is_peft(model) else (name,)
        plan |= {part: RowwiseParallel() for part in parts}
    for block in blocks_of(model):
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
    with config.patch(policy="always"):
        model, parts = wrapped(engine, size, made(engine))
        x, mine = blocks.batch(4).to(device), rank * parts // size
        out = model(x.chunk(parts)[mine])
        out.square().mean().backward()
    report = inductor_fusions.report()

    alone = made(engine).to(device)
    expected = alone(x)
    expected.square().mean().backward()
    grads = dict(alone.named_parameters())
    expected = expected.chunk(parts)[mine]
    found = {"the output": (whole(out), expected)}
    for name, parameter in model.named_parameters():
        name = name.replace("module.", "").replace("_orig_mod.", "")
        if parameter.requires_grad:
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


def step_time(engine: str, device: str, fused: bool) -> tuple[list[float], int]:
    """(seconds of a training step, the median of each block of them; fused sites), under one setting."""
    kind = device.partition(":")[0]
    sizes, (samples, length) = TIMED[kind]
    first, steps, count = STEPS[kind]
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    torch._dynamo.reset()
    counters.clear()
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(samples, length, sizes[1], generator=generator).to(device, dtype)
    with config.patch(enabled=fused):
        model, _ = wrapped(engine, dist.get_world_size(), made(engine, sizes).to(dtype))

        def step() -> float:
            started = time.perf_counter()
            model(x).square().mean().backward()
            model.zero_grad(set_to_none=True)
            if kind == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - started

        for _ in range(first):
            step()
        dist.barrier()
        found = [statistics.median(step() for _ in range(steps)) for _ in range(count)]
    return found, sum(
        n for name, n in counters["inductor"].items() if re.fullmatch("fusions_(?!record_)[a-z_]+", name)
    )


def times(engine: str, device: str) -> dict[str, Any]:
    """Times of both settings, which take turns, on the slowest rank."""
    found: dict[bool, list[float]] = {False: [], True: []}
    sites = 0
    for _ in range(2):
        for fused in (False, True):
            blocks_of_steps, count = step_time(engine, device, fused)
            found[fused] += blocks_of_steps
            sites = count if fused else sites
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, (found, sites))
    stock, ours = (
        [max(each) for each in zip(*(s[0][kind] for s in said), strict=True)] for kind in (False, True)
    )
    return {
        "stock_ms": round(1e3 * min(stock), 4),
        "fused_ms": round(1e3 * min(ours), 4),
        "ratio": round(min(stock) / min(ours), 4),
        "spread": round(max(max(t) / min(t) - 1 for t in (stock, ours)), 4),
        "sites": [s[1] for s in said],
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
    # Threads of gloo outlive the groups that DistributedDataParallel has used: one that lets go of a tensor
    # while the interpreter shuts down aborts the process. All results are written.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
