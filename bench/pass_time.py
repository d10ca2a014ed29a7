"""What our passes take of a compile: seconds for each graph of a Llama, and for each fusion.

    python -m bench.pass_time                     # 6, 12 and 24 layers, to bench/results/pass_time_cpu.json
    python -m bench.pass_time --layers 12 --print

Widths are tiny and every candidate is let through, so that a pass has as much to do as it can have. Graphs
behind autograd seem to be on a GPU; nothing is lowered. Times are those of the processor in this thread, so
that other processes count little.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx, nn

import inductor_fusions
from bench.common import Json
from bench.provenance import write
from devtools import cuda_codegen
from devtools.ledger.compiling import ON_A_GPU
from inductor_fusions import fusions, reporting
from inductor_fusions.driver import passes

LAYERS = (6, 12, 24)
TARGET = Path(__file__).parent / "results" / "pass_time_cpu.json"
ARCH = 90
SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
#: Names of cases: whether linears have adapters, and whether it is trained.
CASES = {
    "inference": (False, False),
    "training": (False, True),
    "adapters, inference": (True, False),
    "adapters, training": (True, True),
}


class Llama(nn.Module):
    """The last hidden state of a small Llama, whose attention is written out.

    Args:
        adapters: whether PEFT gives each linear float32 adapters.
    """

    def __init__(self, layers: int, adapters: bool = False) -> None:
        super().__init__()
        import transformers

        config = transformers.LlamaConfig(**SIZES, num_hidden_layers=layers, attn_implementation="eager")
        model = transformers.LlamaModel(config).bfloat16().eval()
        if adapters:
            import peft

            wanted = peft.LoraConfig(target_modules="all-linear", r=8, init_lora_weights=False)
            model = peft.get_peft_model(model, wanted)
        self.model = model

    def forward(self, x: torch.Tensor) -> Any:
        return self.model(input_ids=x, use_cache=False).last_hidden_state


@contextlib.contextmanager
def passed(run: Callable[[Any, fx.Graph], None]) -> Iterator[Callable[..., Any]]:
    """A backend under which `run` calls every pass of ours on its graph; what they give is run on the CPU."""
    from functorch.compile import make_boxed_func
    from torch._inductor import compile_fx
    from torch._inductor import config as inductor_config

    behind = passes.FusionPass("post_grad", tuple(f for f in fusions.ALL if f.stage == "post_grad"))

    def inner(gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        moved, _ = cuda_codegen.on_cuda(gm, example_inputs)
        with cuda_codegen.pretended(cuda_codegen.DEVICES[ARCH]):
            behind(moved.graph)
        return make_boxed_func(gm.forward)

    call = passes.FusionPass.__call__
    with contextlib.ExitStack() as stack:
        for check in ON_A_GPU:
            stack.enter_context(mock.patch(f"inductor_fusions.{check}", lambda t: None))
        stack.enter_context(
            mock.patch.object(
                passes.FusionPass, "__call__", lambda self, graph: run(lambda g: call(self, g), graph)
            )
        )
        stack.enter_context(inductor_config.patch(force_disable_caches=True))
        stack.enter_context(inductor_fusions.config.patch(enabled=True, policy="always"))
        stack.enter_context(reporting.isolated(keep=False))
        torch._dynamo.reset()
        try:
            yield lambda gm, inputs: compile_fx.compile_fx(gm, inputs, inner_compile=inner)
        finally:
            torch._dynamo.reset()


def compile_case(case: str, layers: int, run: Callable[[Any, fx.Graph], None]) -> None:
    """Compile one case, with `run` around each pass of ours."""
    adapters, train = CASES[case]
    torch.manual_seed(0)
    model = Llama(layers, adapters)
    with passed(run) as backend, torch.set_grad_enabled(train):
        out = torch.compile(model, backend=backend, dynamic=False)(torch.randint(3, 128, (2, 48)))
        if train:
            out.float().pow(2).mean().backward()


def measure(case: str, layers: int) -> list[Json]:
    """One row for each graph of a case: its nodes, sites, and the seconds in all and by fusion.

    Those that Python's garbage collection takes of them are given as well: they grow with the whole process.
    """
    rows: list[Json] = []
    collecting = {"since": 0.0, "seconds": 0.0}

    def collection(phase: str, info: Any) -> None:
        now = time.thread_time()
        if phase == "stop":
            collecting["seconds"] += now - collecting["since"]
        collecting["since"] = now

    apply = passes.apply
    by_fusion: dict[str, float] = {}

    def timed(fusion: Any, *args: Any, **options: Any) -> Any:
        start = time.thread_time()
        found = apply(fusion, *args, **options)
        by_fusion[fusion.name] = by_fusion.get(fusion.name, 0.0) + time.thread_time() - start
        fused[0] += sum(site.verdict == "fused" for site in found)
        return found

    fused = [0]

    def run(call: Any, graph: fx.Graph) -> None:
        by_fusion.clear()
        fused[0] = 0
        collecting["seconds"] = 0.0
        nodes = len(graph.nodes)
        start = time.thread_time()
        call(graph)
        seconds = time.thread_time() - start
        rows.append(
            {
                "case": case, "layers": layers, "graph": len(rows), "nodes": nodes, "sites": fused[0],
                "seconds": round(seconds, 4), "collecting": round(collecting["seconds"], 4),
                "fusions": {name: round(each, 4) for name, each in sorted(by_fusion.items())},
            }
        )  # fmt: skip

    gc.callbacks.append(collection)
    try:
        with mock.patch.object(passes, "apply", timed):
            compile_case(case, layers, run)
    finally:
        gc.callbacks.remove(collection)
    return rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.pass_time", description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--case", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--print", action="store_true", help="write no file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    measure(options.case[0], 1)  # what is imported and built at the first use
    rows = []
    for case in options.case:
        for layers in options.layers:
            for row in measure(case, layers):
                rows.append(row)
                print(row, flush=True)
    if not options.print:
        write(TARGET, "bench.pass_time", rows)


if __name__ == "__main__":
    main()
