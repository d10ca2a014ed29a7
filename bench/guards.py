"""What Dynamo's guards take of a call: a Llama, alone and with PEFT's adapters on every linear.

    python -m bench.guards                # to bench/results/guards_cpu.json
    python -m bench.guards --print

The graph gives what it gave the first time, so that a call takes what the host does around it: guards, and
the code that Dynamo wrote. `guards` are as torch has them by default, or filtered by a function of
torch.compiler; `unguarded` is the same call under `skip_guard_eval_unsafe`. `count` says how many guards
there are, with the package and without: it adds none.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import fx, nn

import inductor_fusions
from bench.common import Json, interleave
from bench.provenance import write

TARGET = Path(__file__).parent / "results" / "guards_cpu.json"
LAYERS = 16
#: Blocks of calls, whose median counts, and the seconds of one.
ROUNDS, BLOCK = 41, 5e-3
SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
Filter = Callable[[Sequence[Any]], Sequence[bool]]
#: Functions of torch.compiler, from none to the one that keeps fewest guards.
FILTERS = (
    "", "skip_guard_on_inbuilt_nn_modules_unsafe", "skip_guard_on_all_nn_modules_unsafe",
    "keep_tensor_guards_unsafe",
)  # fmt: skip


def llama(adapters: bool, layers: int = LAYERS) -> nn.Module:
    """A Llama of small widths for inference; with adapters of rank 8 on every linear."""
    torch.manual_seed(0)
    settings = transformers.LlamaConfig(**SIZES, num_hidden_layers=layers)
    model: nn.Module = transformers.LlamaForCausalLM(settings)
    if adapters:
        import peft

        wanted = peft.LoraConfig(target_modules="all-linear", r=8, init_lora_weights=False)
        model = peft.get_peft_model(model, wanted)
    return model.eval()


def counting(kept: Filter | None, seen: list[int]) -> Filter:
    """A filter that writes down how many guards it keeps."""

    def keep(entries: Sequence[Any]) -> Sequence[bool]:
        found = [True] * len(entries) if kept is None else kept(entries)
        seen.append(sum(found))
        return found

    return keep


def constant(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A backend that runs a graph once, and gives the same again."""
    found = gm(*inputs)
    return lambda *_: found


def guard_count(model: nn.Module, inputs: Json, enabled: bool) -> int:
    """How many guards a compile has, with the package or with its passes taken out of Inductor's hooks."""
    seen: list[int] = []
    torch._dynamo.reset()
    inductor_fusions.clear()
    if not enabled:
        inductor_fusions.disable()
    try:
        with torch.no_grad():
            torch.compile(model, options={"guard_filter_fn": counting(None, seen)})(**inputs)
    finally:
        inductor_fusions.enable()
    torch._dynamo.reset()
    return sum(seen)


def measure(adapters: bool, name: str, rounds: int = ROUNDS, layers: int = LAYERS) -> Json:
    """One row: a model under one filter of guards."""
    model = llama(adapters, layers)
    inputs = {"input_ids": torch.randint(3, 128, (1, 1)), "use_cache": False}
    seen: list[int] = []
    kept = counting(getattr(torch.compiler, name) if name else None, seen)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=constant, options={"guard_filter_fn": kept})

    def call() -> Any:
        return compiled(**inputs)

    with torch.no_grad():
        call()
        guarded = interleave({"call": call}, "cpu", rounds, BLOCK)["call"]
        with torch.compiler.set_stance("default", skip_guard_eval_unsafe=True):
            unguarded = interleave({"call": call}, "cpu", rounds, BLOCK)["call"]
    torch._dynamo.reset()
    return {
        "model": "Llama with adapters" if adapters else "Llama", "layers": layers, "filter": name,
        "kept": sum(seen), "guarded_us": round(guarded.median * 1e6, 1),
        "unguarded_us": round(unguarded.median * 1e6, 1),
        "spread": {"guarded": round(guarded.spread, 3), "unguarded": round(unguarded.spread, 3)},
    }  # fmt: skip


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.guards", description=__doc__)
    parser.add_argument("--print", action="store_true", help="write no file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for adapters in (False, True):
        for name in FILTERS:
            rows.append(measure(adapters, name))
            print(rows[-1], flush=True)
        inputs = {"input_ids": torch.randint(3, 128, (1, 1)), "use_cache": False}
        small = llama(adapters, 2)
        count = {key: guard_count(small, inputs, key == "fused") for key in ("stock", "fused")}
        rows[-len(FILTERS)]["count"] = count
        print(count, flush=True)
    if not options.print:
        write(TARGET, "bench.guards", rows)


if __name__ == "__main__":
    main()
