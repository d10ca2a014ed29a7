"""What the package adds to a compile: Python calls and CPU seconds of whole compiles, beside those of stock.

    python -m bench.compile_cost --out bench/results/compile_cost_cpu.json
    python -m bench.compile_cost --only lora --out /tmp/compile_cost.json

Models are those of the ledger, of few layers. Every candidate is let through. Inductor writes the code
for an H200 that need not be there, from empty caches. Not included: Triton's compiler, which works in
other processes, and everything that runs on a GPU. Each variant has a process of its own, which has
compiled the model before, so what a process does once does not count. Calls are those of Python and C
functions under cProfile, which hardly differ between runs.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from bench.common import Json
from bench.provenance import write

VARIANTS = ("stock", "fused")
#: Compiles whose CPU seconds are measured; the least counts.
REPEATS = 2
#: Entries of the ledger; in `CONVOLUTIONS` there is nothing to fuse.
CONVOLUTIONS = "convolutions training"
CASES = (
    "llama-1b sdpa inference bfloat16",
    "llama-1b sdpa training bfloat16",
    "llama-1b eager training bfloat16",
    "bert-base eager padded training bfloat16",
    "gpt2 eager inference bfloat16",
    "t5-base eager training bfloat16",
    "swin-tiny eager training bfloat16",
    "llama-1b lora float32 training bfloat16",
    "dlrm dot products training bfloat16",
    CONVOLUTIONS,
)


class Convolutions(nn.Module):
    """Convolutions with batch norms, some of them residual."""

    def __init__(self, width: int = 16, blocks: int = 4) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2 * blocks))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2 * blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(0, len(self.norms), 2):
            y = torch.relu(self.norms[i](self.convolutions[i](x)))
            x = torch.relu(x + self.norms[i + 1](self.convolutions[i + 1](y)))
        return x


class _Positional(nn.Module):
    """A model whose inputs have no names, and whose output is a tensor."""

    def __init__(self, model: nn.Module, inputs: Json) -> None:
        super().__init__()
        self.model, self.others = model, {k: v for k, v in inputs.items() if not torch.is_tensor(v)}
        self.names = [name for name in inputs if name not in self.others]

    def forward(self, *tensors: torch.Tensor) -> Any:
        out = self.model(**dict(zip(self.names, tensors, strict=True)), **self.others)
        return out if torch.is_tensor(out) else out.last_hidden_state


def made(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The model of a case, and its inputs."""
    from devtools.ledger.entries import entries

    if name == CONVOLUTIONS:
        return Convolutions(), (torch.randn(2, 16, 8, 8),)
    model, inputs = next(entry for entry in entries() if entry.name == name).make()
    return _Positional(model, inputs), tuple(value for value in inputs.values() if torch.is_tensor(value))


def measure(name: str, variant: str) -> Json:
    """In a process of its own: one case with one variant."""
    import inductor_fusions
    from bench import model_cases
    from devtools import cuda_codegen
    from devtools.ledger.compiling import on_a_gpu, set_up
    from devtools.ledger.entries import narrow

    set_up()
    with (
        on_a_gpu(),
        mock.patch.object(model_cases, "model_config", narrow),
        inductor_fusions.config.patch(enabled=variant == "fused", policy="always"),
    ):
        model, inputs = made(name)

        def compile() -> int:
            code = cuda_codegen.generate(model, inputs, train="training" in name, run=False)
            return sum(len(module.launches) + len(module.extern_calls) for module in code.modules)

        compile()
        seconds = []
        for _ in range(REPEATS):
            gc.collect()  # a collection takes a tenth of a compile, and may fall into one of them by chance
            start = time.process_time()
            launches = compile()
            seconds.append(time.process_time() - start)
        with cProfile.Profile() as profile:
            compile()
    calls = sum(entry.callcount for entry in profile.getstats())
    return {"calls": calls, "cpu_s": round(min(seconds), 2), "launches": launches}


def run(name: str) -> Json:
    """One case, with both variants."""
    row: Json = {"key": name}
    for variant in VARIANTS:
        command = [sys.executable, "-m", "bench.compile_cost", "--one", name, "--variant", variant]
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        for what, value in found.items():
            row.setdefault(what, {})[variant] = value
    row["ratio"] = round(row["calls"]["fused"] / row["calls"]["stock"], 3)
    return row


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--only", default="", help="only cases whose name matches this expression")
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.variant)))
        return
    rows = []
    for name in CASES:
        if re.search(options.only, name):
            rows.append(run(name))
            print(rows[-1], flush=True)
    if options.out:
        write(options.out, "bench.compile_cost", rows)


if __name__ == "__main__":
    main()
