"""Whole models with adapters: stock `torch.compile`, the same with inductor_fusions, and the frozen model.

Llama-1B and other models with PEFT's adapters and random weights, measured as by `bench.models`:

    stock   inductor_fusions switched off
    fused   inductor_fusions switched on, under its policy in force
    frozen  the model without adapters, with inductor_fusions switched on: what adapters would cost nothing
            beside. In training its backward gives the gradient of the embedded tokens.

In inference times are taken once more without Dynamo's guards (`torch.compiler.set_stance` with
skip_guard_eval_unsafe): those of PEFT's modules take the host hundreds of microseconds a call.

    python -m bench.models_lora --out bench/results/lora_models_h200.json --budget 560
    INDUCTOR_FUSIONS_POLICY=always python -m bench.models_lora --out /tmp/try.json --only decode
    python -m bench.models_lora --quick --device cpu --out /tmp/try.json
"""

from __future__ import annotations

import re
from typing import Any

from bench import model_cases
from bench.model_cases import Adapters, Case
from bench.models.__main__ import command


def named(name: str, model: str = "llama-1b", targets: str = "all-linear", **others: Any) -> Case:
    """The case that a name says: as in `model_cases.named`, and rank `rN`, `bf16` adapters."""
    words = name.split()
    adapters = Adapters(
        next((int(word[1:]) for word in words if re.fullmatch(r"r\d+", word)), 16),
        "bfloat16" if "bf16" in words else "float32",
        0.1 if "dropout" in words else 0.0,
        targets,
    )
    return model_cases.named(name, **{"model": model, "attn": "sdpa", "adapters": adapters, **others})


CASES = [
    named("decode b1 s1 reduce-overhead"),
    named("train b2 s2048"),
    named("train bf16 adapters b2 s2048"),
    named("train bf16 adapters dropout b2 s2048"),
    named("decode bf16 adapters b1 s1 reduce-overhead"),
    named("decode b16 s1 reduce-overhead"),
    named("prefill b2 s2048"),
    named("train dropout b2 s2048"),
    named("train q and v alone b2 s2048", targets="q_proj,v_proj"),
    named("train r64 b2 s2048"),
]

#: Two layers of models whose widths no table has, with PEFT's default rank and others.
WIDTHS = [
    named("widths qwen2.5-7b r16 train", batch=3, seq=1365, model="qwen2.5-7b-2l"),
    named("widths qwen3-0.6b r8 train", batch=3, seq=1365, model="qwen3-0.6b-2l"),
    named("widths llama-3b r32 train", batch=2, seq=2047, model="llama-3b-2l"),
    named("widths qwen2.5-1.5b bf16 r8 train", batch=3, seq=1365, model="qwen2.5-1.5b-2l"),
    named("widths mistral-nemo bf16 r64 train", seq=2048, model="mistral-nemo-2l"),
    named(
        "widths qwen2.5-0.5b r8 default train", batch=4, seq=1024, targets="default", model="qwen2.5-0.5b-2l"
    ),
    named("widths qwen3-4b r16 train", seq=3001, model="qwen3-4b-2l"),
    named("widths olmo2-7b bf16 r16 train", batch=2, seq=1024, model="olmo2-7b-2l"),
    named("widths phi3-mini r8 train", batch=2, seq=2048, model="phi3-mini-2l"),
    named("widths smollm-360m r64 train", batch=8, seq=512, model="smollm-360m-2l"),
    named("widths starcoder2-3b r16 train", batch=2, seq=1500, model="starcoder2-3b-2l"),
    named("widths gemma2-2b bf16 r32 train", batch=2, seq=1024, model="gemma2-2l", attn="eager"),
    named("widths qwen2.5-7b r8 prefill", seq=777, model="qwen2.5-7b-2l"),
    named("widths llama-3b bf16 r16 decode b1", seq=1, mode="reduce-overhead", model="llama-3b-2l"),
    named("widths qwen3-4b r8 decode b4", seq=1, mode="reduce-overhead", model="qwen3-4b-2l"),
]


if __name__ == "__main__":
    command("bench.models_lora", __doc__, (*CASES, *WIDTHS))
