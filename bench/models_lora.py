"""Whole models with adapters: stock `torch.compile`, the same with inductor_fusions, and the frozen model.

Llama-1B and other models with PEFT's adapters, random weights, in one process and in interleaved steps:

    stock   inductor_fusions switched off
    fused   inductor_fusions switched on, under its policy in force
    frozen  the model without adapters, with inductor_fusions switched on: what adapters would cost nothing
            beside. In training its backward gives the gradient of the embedded tokens.

On a GPU times are taken once more on the device alone: adapters are many small kernels, which the host may
not launch as fast as they run. In inference, also without Dynamo's guards (`torch.compiler.set_stance` with
skip_guard_eval_unsafe): those of PEFT's modules take the host hundreds of microseconds a call.

A training step is a forward and a backward, without the optimizer. Without dropout, the output and the
gradient of each adapter are compared with a float64 copy, eager and uncompiled, on the first tokens of the
first sample; the check runs the very code that is timed.

    python -m bench.models_lora --out bench/results/lora_models_h200.json --budget 560
    INDUCTOR_FUSIONS_POLICY=always python -m bench.models_lora --out /tmp/try.json --only decode
    python -m bench.models_lora --quick --device cpu --out /tmp/try.json
"""

from __future__ import annotations

import argparse
import copy
import re
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench import model_cases, tuning
from bench.common import (
    Json,
    collect,
    device_milliseconds,
    error_limit,
    free,
    interleave,
    is_fatal,
    one_line,
    own_settings,
    peak_bytes,
    relative_error,
)
from bench.models.measure import site_counts, static_bytes
from bench.models.variants import Variant
from bench.pool import FileLock

#: Seconds of a block of training steps. They follow each other, as in a loop that does not wait for each.
TRAINING_BLOCK = 0.2
#: Tokens of the first sample that are compared with float64; a causal model's do not depend on the rest.
COMPARED = 256


@dataclass(frozen=True)
class Case:
    """One model under one load.

    Attributes:
        name: of the case.
        batch, seq: of the tokens.
        train: forward and backward.
        mode: of `torch.compile`.
        adapters: dtype of the adapters; PEFT makes them float32 by default.
        dropout: in front of each adapter.
        rank: of each adapter.
        targets: names of the linears that have one; "default" are those of PEFT for the model.
        model, attn: its configuration and implementation of attention.
    """

    name: str
    batch: int
    seq: int
    train: bool = False
    mode: str = "default"
    adapters: str = "float32"
    dropout: float = 0.0
    rank: int = 16
    targets: str = "all-linear"
    model: str = "llama-1b"
    attn: str = "sdpa"

    @property
    def key(self) -> str:
        """Its name."""
        return self.name


def named(name: str, **others: Any) -> Case:
    """The case that a name says: `bN` samples, `sN` tokens, rank `rN`, `bf16` adapters."""
    words = name.split()
    size = {word[0]: int(word[1:]) for word in words if re.fullmatch(r"[bsr]\d+", word)}
    told: Json = {
        "batch": size.get("b", 1), "seq": size.get("s", 1), "train": "train" in words,
        "mode": "reduce-overhead" if "reduce-overhead" in words else "default",
        "adapters": "bfloat16" if "bf16" in words else "float32",
        "dropout": 0.1 if "dropout" in words else 0.0, "rank": size.get("r", 16),
    }  # fmt: skip
    return Case(name, **(told | others))


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
    named("widths llama-3b bf16 r16 decode b1", mode="reduce-overhead", model="llama-3b-2l"),
    named("widths qwen3-4b r8 decode b4", mode="reduce-overhead", model="qwen3-4b-2l"),
]


def base(case: Case) -> model_cases.Case:
    """The same load on the model without adapters."""
    return model_cases.Case(
        case.name, case.model, case.attn, case.batch, case.seq, train=case.train, mode=case.mode
    )


def build(case: Case, device: str, quick: bool) -> torch.nn.Module:
    """The model with adapters."""
    return adapted(model_cases.build(base(case), case.attn, device, quick), case)


def adapted(model: torch.nn.Module, case: Case) -> torch.nn.Module:
    """A model with the adapters of a case, none of which is zero."""
    import peft

    targets: Any = {"all-linear": "all-linear", "default": None}.get(case.targets, case.targets.split(","))
    config = peft.LoraConfig(
        r=case.rank, lora_alpha=2 * case.rank, lora_dropout=case.dropout, target_modules=targets,
        init_lora_weights=False,
    )  # fmt: skip
    found: torch.nn.Module = peft.get_peft_model(
        model, config, autocast_adapter_dtype=case.adapters == "float32"
    )
    return found.train(case.train)


@dataclass
class WithAdapters(Variant):
    """One way to run a case: "stock", "fused" or "frozen".

    Attributes:
        leaf: what is differentiated where no parameter is: the embedded tokens.
    """

    leaf: torch.Tensor | None = None

    @property
    def fuses(self) -> bool:
        """Whether it is compiled with inductor_fusions switched on."""
        return self.name != "stock"

    def forget(self) -> None:
        """Drop the gradients."""
        super().forget()
        if self.leaf is not None:
            self.leaf.grad = None


#: As in `bench.models.variants`: each variant names one Inductor option of its own, at the value that it has
#: anyway.
MARKERS = {"stock": "verbose_progress", "fused": "comment_origin", "frozen": "debug_fusion"}


def make_variants(case: Case, device: str, quick: bool) -> dict[str, WithAdapters]:
    """The variants; stock and fused share their weights."""
    from torch._inductor import config, list_mode_options

    values = model_cases.model_config(base(case), quick)[1]
    inputs = model_cases.make_inputs(base(case), values, device)
    trained = build(case, device, quick)
    plain = model_cases.build(base(case), case.attn, device, quick).requires_grad_(False)
    found = {}
    for name in MARKERS:
        own, leaf, given = trained, None, dict(inputs)
        if name == "frozen":
            own = plain
            if case.train:
                embedded = plain.get_input_embeddings()(given.pop("input_ids"))
                leaf = given["inputs_embeds"] = embedded.detach().requires_grad_()
        options = {**list_mode_options(case.mode), MARKERS[name]: getattr(config, MARKERS[name])}
        compiled: Any = torch.compile(own, options=options, dynamic=False)
        found[name] = WithAdapters(name, own, compiled, case, given, leaf=leaf)
    return found


# Correctness -------------------------------------------------------------------------------------------


def check(case: Case, variants: dict[str, WithAdapters], row: Json) -> None:
    """Compare outputs and gradients of the adapters with float64."""
    twin = copy.deepcopy(variants["stock"].model).double()
    inputs = dict(variants["stock"].inputs)
    inputs["input_ids"] = inputs["input_ids"][:1, :COMPARED]
    with torch.set_grad_enabled(case.train):
        exact = twin(**inputs).last_hidden_state
    samples, tokens = exact.shape[:2]
    generator = torch.Generator(exact.device).manual_seed(2)
    cotangent = torch.randn(exact.shape, generator=generator, device=exact.device, dtype=torch.float64)
    cotangent = cotangent.bfloat16().double()
    gradients: dict[str, torch.Tensor] = {}
    if case.train:
        exact.backward(cotangent)
        gradients = {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}
    del twin
    for name in ("stock", "fused"):
        variant = variants[name]
        variant.forget()
        full = variant.output()
        errors = {"out": relative_error(full[:samples, :tokens], exact)}
        if case.train:
            gradient = torch.zeros_like(full)
            gradient[:samples, :tokens] = cotangent.to(full.dtype)
            full.backward(gradient)
            parameters = dict(variant.model.named_parameters())
            found = torch.cat([parameters[n].grad.double().flatten() for n in gradients])
            errors["grad"] = relative_error(found, torch.cat([g.flatten() for g in gradients.values()]))
        variant.forget()
        row["error"][name] = errors
    row["correct"] = all(
        row["error"]["fused"][n] <= error_limit(row["error"]["stock"][n], torch.bfloat16)
        for n in row["error"]["fused"]
    )


# Measuring ---------------------------------------------------------------------------------------------


def measure(case: Case, device: str, quick: bool, rounds: int, lock: FileLock | None = None) -> Json:
    """Compile beside others that share the lock, then alone check and time, every variant of a case."""
    row: Json = {"failed_variants": {}, "compile_s_of": {}, "error": {}, "correct": None, "peak_gib": {}}
    with lock.shared() if lock else nullcontext():
        variants = make_variants(case, device, quick)
        for name, variant in list(variants.items()):
            try:
                row["compile_s_of"][name] = round(variant.first_step(device), 2)
            except Exception as error:
                if is_fatal(error):
                    raise
                row["failed_variants"][name] = one_line(error, 300)
                del variants[name]
            collect(device)
    if "fused" in variants:
        row["sites"] = site_counts(variants["fused"].sites)
    with lock or nullcontext():
        if case.dropout == 0 and {"stock", "fused"} <= variants.keys():
            check(case, variants, row)
        collect(device)
        for name, variant in variants.items():
            for _ in range(3):
                variant.step()
            variant.forget()
            collect(device)
            fixed = static_bytes(variant.model, variant.inputs)
            peak = peak_bytes(variant.step, device)
            variant.forget()
            if peak is not None:
                row["peak_gib"][name] = round((peak + fixed) / 2**30, 4)
        steps = {n: v.step for n, v in variants.items()}
        block = TRAINING_BLOCK if case.train and device == "cuda" else 1e-2
        times = interleave(steps, device, rounds, block, max_calls=20)
        if device == "cuda":
            row["device_ms"] = device_milliseconds(steps, device, rounds // 2)
        if not case.train:
            # PEFT's modules have many guards, and a decoder that waits for the host waits for them.
            with torch.compiler.set_stance("default", skip_guard_eval_unsafe=True):
                unguarded = interleave(steps, device, rounds, block, max_calls=20)
            row["unguarded_ms"] = {n: round(t.median * 1e3, 4) for n, t in unguarded.items()}
    row["median_ms"] = {name: round(t.median * 1e3, 4) for name, t in times.items()}
    row["spread"] = {name: round(t.spread, 4) for name, t in times.items()}
    pairs = [("stock", "fused"), ("fused", "frozen"), ("stock", "frozen")]
    row["ratio"] = {
        f"{a}/{b}": round(times[a].median / times[b].median, 4) for a, b in pairs if {a, b} <= times.keys()
    }
    return row


def describe(row: Json) -> str:
    """A case's outcome in one line."""
    text = " ".join(f"{name} {ms:.3f} ms" for name, ms in row["median_ms"].items())
    text += "".join(f", {name} {value:.3f}" for name, value in row["ratio"].items())
    text += "".join(f", {name} {gib:.2f} GiB" for name, gib in row["peak_gib"].items())
    if row["correct"] is False:
        text += f", WRONG {row['error']}"
    text += "".join(f", {name} failed: {reason}" for name, reason in row["failed_variants"].items())
    fused = {k: n for k, n in row.get("sites", {}).get("what", {}).items() if k.startswith("lora")}
    return text + "".join(f"\n      {n} x {what}" for what, n in fused.items())


def measure_case(case: Case, options: argparse.Namespace, lock: FileLock) -> Json:
    """Measure one case. Other processes compile beside it, and wait while it is timed."""
    torch._dynamo.config.recompile_limit = 64
    start = time.monotonic()
    try:
        row = measure(case, options.device, options.quick, options.rounds, lock)
    finally:
        free(options.device)
    seconds = round(time.monotonic() - start, 1)
    return {**row, "seconds": seconds, "compile_s": round(sum(row["compile_s_of"].values()), 1)}


def main() -> None:
    """The command line."""
    parser = tuning.parser("bench.models_lora", __doc__)
    parser.add_argument("--rounds", type=int, default=24, help="interleaved blocks of each variant")
    options = parser.parse_args()
    cases = [replace(case, seq=min(case.seq, 96)) if options.quick else case for case in (*CASES, *WIDTHS)]
    jobs = tuning.processes(options, most=5)
    tuning.run(
        "bench.models_lora", options, cases, measure_case, describe, jobs,
        20.0 if options.quick else 90.0, {"settings": own_settings(), "jobs": jobs},
    )  # fmt: skip


if __name__ == "__main__":
    main()
