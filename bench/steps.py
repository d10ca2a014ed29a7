"""Whole training steps as transformers' Trainer takes them with `bf16` and `torch_compile`.

    llama-1b full b2 s4096            every weight is trained
    llama-1b lora b2 s4096            PEFT's adapters of rank 16 on every linear, float32, on frozen weights
    ... loss alone                    the compiled function returns the loss without the logits

A step is a forward with labels under bfloat16 autocast and a backward, both compiled; then the gradients are
clipped to norm 1 and AdamW (`fused=True`) steps, neither of them compiled. Weights are random: bfloat16 for
Llama and Qwen, float32 for BERT (masked tokens) and ViT (classes), whose adapters have frozen weights in
bfloat16. As in Trainer, the compiled model returns its logits in float32 beside the loss.

    stock      inductor_fusions switched off
    fused      switched on, under its policy in force
    detached   the same with returned_logits=detached, which says that no one differentiates the logits
    autotuned  stock under max-autotune-no-cudagraphs, which compiles for minutes

They run in one process, in interleaved blocks. Each first takes some steps from the same weights: its losses,
and the norm of its first gradient, must agree with stock's.

    python -m bench.steps --out bench/results/steps_h100.json --budget 500
    python -m bench.steps --out bench/results/steps_h100.json --only 'llama-1b full' --again \\
        --variants stock,fused,detached,autotuned
    python -m bench.steps --quick --device cpu --only bert --out /tmp/try.json
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from bench import model_cases, tuning
from bench.common import (
    Json,
    compiled_only,
    device_milliseconds,
    interleave,
    is_fatal,
    one_line,
    own_settings,
    peak_bytes,
)
from bench.models.measure import free, site_counts, static_bytes
from bench.models.variants import Variant, collect
from bench.pool import FileLock
from inductor_fusions import config
from inductor_fusions.checking.budget import worst

#: As in `bench.models.variants`: each variant names one Inductor option, at the value that it has anyway.
MARKERS = {
    "stock": "verbose_progress",
    "fused": "comment_origin",
    "detached": "debug_fusion",
    "autotuned": "debug_index_asserts",
}
#: Dense bfloat16 FLOP/s of tensor cores by NVIDIA's data sheets, by a part of the device's name.
PEAK = {
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12,
    "A100": 312e12, "A10G": 70e12, "L40S": 362e12,
}  # fmt: skip
#: Steps from the same weights whose losses are compared.
COMPARED = 4
#: How far the first loss, those after some steps, and the norm of the first gradient may be from stock's,
#: relative to it; with dropout, whose masks may be others.
LIMITS = {False: (2e-3, 1e-2, 2e-2), True: (2e-2, 5e-2, 1e-1)}
#: Widths of a model with --quick.
NARROW = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
#: Classes of transformers, by the kind of model.
HEADS = {"bert": "AutoModelForMaskedLM", "vit": "AutoModelForImageClassification"}


@dataclass(frozen=True)
class Case:
    """One model, and how it is trained.

    Attributes:
        model: file in `configs/models`.
        batch, seq: samples, and tokens of each; 0 for images.
        lora: adapters are trained, in place of the weights.
        alone: the loss leaves the compiled function without the logits.
        padded, dropout: as in `bench.model_cases`.
    """

    model: str
    batch: int
    seq: int = 0
    lora: bool = False
    alone: bool = False
    padded: bool = False
    dropout: float = 0.0

    @property
    def key(self) -> str:
        """Its name."""
        kind = ("lora" if self.lora else "full") + " loss alone" * self.alone + " padded" * self.padded
        return f"{self.model} {kind} b{self.batch}" + (f" s{self.seq}" if self.seq else "")

    def base(self, quick: bool) -> model_cases.Case:
        """The load of the model without its head."""
        causal = self.model.startswith(("llama", "qwen"))
        dtype = "bfloat16" if causal or self.lora else "float32"
        found = model_cases.Case(
            self.key, self.model, "sdpa", self.batch, self.seq, True, self.padded,
            dropout=self.dropout, dtype=dtype, adapters=model_cases.Adapters() if self.lora else None,
        )  # fmt: skip
        return model_cases.quick_case(found) if quick else found


def grid() -> list[Case]:
    """What is measured, the most important first."""
    llama, qwen = ("llama-1b", 2, 4096), ("qwen2.5-1.5b", 2, 2048)
    bert, vit = ("bert-base", 32, 512, False, False, True, 0.1), ("vit-large", 64)
    return [
        Case(*llama),
        Case(*llama, lora=True, alone=True),
        Case(*bert),
        Case(*vit),
        Case(*qwen),
        Case(*llama, lora=True),
        Case(*llama, alone=True),
        Case(*qwen, lora=True, alone=True),
        Case("bert-base", 32, 512, lora=True, padded=True, dropout=0.1),
        Case(*vit, lora=True),
        Case(*qwen, lora=True),
        Case(*qwen, alone=True),
    ]


# What is trained ---------------------------------------------------------------------------------------


class Trained(torch.nn.Module):
    """A model as Trainer compiles it: under autocast, with its logits in float32; or its loss alone."""

    def __init__(self, model: torch.nn.Module, alone: bool, device: str) -> None:
        super().__init__()
        self.model, self.alone, self.device = model, alone, device

    def forward(self, **batch: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """A batch with labels -> the loss, and the logits."""
        with torch.autocast(self.device, torch.bfloat16):
            out = self.model(**batch)
        return (out.loss,) if self.alone else (out.loss, out.logits.float())


def build(case: Case, device: str, quick: bool) -> tuple[Trained, dict[str, Any]]:
    """The model with its head, and a batch."""
    base = case.base(quick)
    with mock.patch.dict(model_cases.QUICK, NARROW):
        values = model_cases.model_config(base, quick)[1]
        auto = HEADS.get(values["model_type"], "AutoModelForCausalLM")
        model = model_cases.build(base, base.attn, device, quick, auto=auto)
    batch = model_cases.make_inputs(base, values, device)
    if not base.seq:
        model.config.problem_type = "single_label_classification"  # else the first call sets it: a recompile
        batch["labels"] = torch.arange(base.batch, device=device) % values.get("num_labels", 2)
        return Trained(model, case.alone, device), batch
    batch["labels"] = batch["input_ids"].clone()
    if "attention_mask" in batch:
        batch["labels"][batch["attention_mask"] == 0] = -100
    if values["model_type"] == "bert":  # one token of seven is to be found
        hidden = torch.arange(base.seq, device=device) % 7 == 3
        batch["labels"][:, ~hidden] = -100
        batch["input_ids"][:, hidden] = 2
    else:
        batch["use_cache"] = False
    return Trained(model, case.alone, device), batch


def flops(module: torch.nn.Module, batch: dict[str, Any]) -> float:
    """FLOPs of a step: for each token 6 a weight of a product, 4 where it is frozen; and those of attention.

    A causal attention counts half of its scores. What is computed a second time does not count.
    """
    settings: Any = module.get_submodule("model").config
    ids = batch.get("input_ids")
    size = settings.image_size // settings.patch_size if ids is None else 0
    samples, length = (len(batch["labels"]), size * size + 1) if ids is None else ids.shape
    products = (torch.nn.Linear, torch.nn.Conv2d)
    weights = {id(m.weight): m.weight for m in module.modules() if isinstance(m, products)}
    each = sum((6 if weight.requires_grad else 4) * weight.numel() for weight in weights.values())
    heads = settings.num_attention_heads
    width = heads * (getattr(settings, "head_dim", None) or settings.hidden_size // heads)
    seen = 0.5 if settings.model_type in model_cases.CAUSAL or settings.model_type == "qwen2" else 1.0
    attention = 12.0 * settings.num_hidden_layers * samples * length * length * width * seen
    return float(each) * samples * length + attention


def peak_flops(name: str) -> float | None:
    """Dense bfloat16 FLOP/s of a device; None where it is not known."""
    return next((peak for part, peak in PEAK.items() if part in name), None)


@dataclass
class Step(Variant):
    """One way to compile a case; the variants share model and optimizer.

    Attributes:
        optimizer: of what is trained.
        last: the loss of the last step, and the norm of its gradient.
    """

    optimizer: Any = None
    last: tuple[torch.Tensor, ...] = ()

    @property
    def fuses(self) -> bool:
        """Whether it is compiled with inductor_fusions switched on."""
        return self.name in ("fused", "detached")

    @contextlib.contextmanager
    def switched(self) -> Iterator[None]:
        """As of every variant, with the setting of this one."""
        logits = config.returned_logits if self.name != "detached" else "detached"
        with config.patch(returned_logits=logits), super().switched():
            yield

    @property
    def trained(self) -> list[torch.Tensor]:
        """The parameters that the optimizer changes."""
        found: list[torch.Tensor] = self.optimizer.param_groups[0]["params"]
        return found

    def step(self) -> None:
        """One step of training."""
        loss = self.compiled(**self.inputs)[0]
        loss.backward()
        self.last = loss.detach(), torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def make_steps(case: Case, device: str, quick: bool, names: Sequence[str]) -> dict[str, Step]:
    """The variants, none of which is compiled yet."""
    from torch._inductor import config as inductor
    from torch._inductor import list_mode_options

    module, batch = build(case, device, quick)
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    found = {}
    for name in names:
        mode = "max-autotune-no-cudagraphs" if name == "autotuned" else "default"
        options = {**list_mode_options(mode), MARKERS[name]: getattr(inductor, MARKERS[name])}
        compiled: Any = torch.compile(module, options=options)
        found[name] = Step(name, module, compiled, case.base(quick), batch, optimizer=optimizer)
    return found


# Measuring ---------------------------------------------------------------------------------------------


def learn(step: Step, start: list[torch.Tensor], device: str) -> Json:
    """Compile, and take some steps from the same weights: seconds of the first one, losses, and its norm."""
    step.optimizer.state.clear()
    with torch.no_grad():
        for parameter, value in zip(step.trained, start, strict=True):
            parameter.copy_(value)
    torch.manual_seed(3)
    seconds, found = step.first_step(device), [step.last]
    with compiled_only():
        for _ in range(COMPARED - 1):
            step.step()
            found.append(step.last)
    return {
        "compile_s": round(seconds, 2),
        "loss": [round(float(loss), 5) for loss, _ in found],
        "norm": round(float(found[0][1]), 5),
    }


def agrees(ours: Json, stock: Json, dropout: bool) -> tuple[bool, list[float]]:
    """Whether losses and norm agree with stock's, and how far each kind is from it."""
    apart = [abs(a - b) / abs(b) for a, b in zip(ours["loss"], stock["loss"], strict=True)]
    found = [apart[0], worst(apart), abs(ours["norm"] - stock["norm"]) / stock["norm"]]
    within = all(value <= limit for value, limit in zip(found, LIMITS[dropout], strict=True))
    return within, [round(value, 6) for value in found]


def measure(
    case: Case, device: str, quick: bool, rounds: int, names: Sequence[str], lock: FileLock | None = None
) -> Json:
    """Compile and compare beside others that share the lock, then alone time, the variants of a case."""
    row: Json = {"failed_variants": {}, "learned": {}, "apart": {}, "peak_gib": {}, "sites": {}}
    with lock.shared() if lock else nullcontext():
        steps = make_steps(case, device, quick, names)
        first = next(iter(steps.values()))
        start = [p.detach().clone() for p in first.trained]
        for name, step in list(steps.items()):
            try:
                row["learned"][name] = learn(step, start, device)
            except Exception as error:
                if is_fatal(error) or isinstance(error, torch.OutOfMemoryError):
                    raise  # beside other processes there may be too little memory: the row is not kept
                row["failed_variants"][name] = one_line(error, 300)
                steps.pop(name).optimizer.zero_grad()
            collect(device)
            if step.fuses:
                row["sites"][name] = site_counts(step.sites)
        start.clear()
        row["flops"] = flops(first.model, first.inputs)
    learned = row["learned"]
    row["correct"] = None
    if "stock" in learned:
        said = {n: agrees(learned[n], learned["stock"], case.dropout > 0) for n in learned if n != "stock"}
        row["apart"] = {name: apart for name, (_, apart) in said.items()}
        row["correct"] = all(within for within, _ in said.values()) if said else None
    with lock or nullcontext(), compiled_only():
        for name, step in steps.items():
            step.step()
            collect(device)
            states = [t for s in first.optimizer.state.values() for t in s.values()]
            fixed = static_bytes(first.model, {**first.inputs, **{str(i): t for i, t in enumerate(states)}})
            if (peak := peak_bytes(step.step, device)) is not None:
                row["peak_gib"][name] = round((peak + fixed) / 2**30, 3)
        calls = {name: step.step for name, step in steps.items()}
        times = interleave(calls, device, rounds, 0.2 if device == "cuda" else 1e-2, max_calls=20)
        if device == "cuda":
            row["device_ms"] = device_milliseconds(calls, device, rounds // 2)
    tokens = first.inputs["input_ids"].numel() if case.seq else len(first.inputs["labels"])
    peak_rate = peak_flops(torch.cuda.get_device_name()) if device == "cuda" else None
    row["unit"] = "tokens" if case.seq else "images"
    row["median_ms"] = {name: round(t.median * 1e3, 3) for name, t in times.items()}
    row["spread"] = {name: round(t.spread, 4) for name, t in times.items()}
    row["rate"] = {name: round(tokens / t.median, 1) for name, t in times.items()}
    if peak_rate:
        row["peak_share"] = {n: round(row["flops"] / t.median / peak_rate, 4) for n, t in times.items()}
    return row


def measure_case(case: Case, options: argparse.Namespace, lock: FileLock) -> Json:
    """Measure one case. Other processes compile beside it, and wait while it is timed."""
    torch._dynamo.config.recompile_limit = 64
    try:
        row = measure(case, options.device, options.quick, options.rounds, options.variants, lock)
    finally:
        free(options.device)
    return {**row, "compile_s": round(sum(each["compile_s"] for each in row["learned"].values()), 1)}


def describe(row: Json) -> str:
    """A case's outcome in one line."""
    text = ", ".join(
        f"{name} {ms:.1f} ms, {row['rate'][name]:.0f} {row['unit']}/s, {row['peak_gib'].get(name)} GiB"
        for name, ms in row["median_ms"].items()
    )
    text += f", apart {row['apart']}, fused {[s.get('fused', 0) for s in row['sites'].values()]}"
    text += "" if row["correct"] is not False else f", WRONG {row['learned']}"
    return text + "".join(f", {name} failed: {why}" for name, why in row["failed_variants"].items())


def main() -> None:
    """The command line."""
    parser = tuning.parser("bench.steps", __doc__)
    parser.add_argument("--rounds", type=int, default=12, help="interleaved blocks of each variant")
    parser.add_argument(
        "--variants", type=lambda text: tuple(text.split(",")), default=("stock", "fused"),
        help=f"of {', '.join(MARKERS)}, with commas",
    )  # fmt: skip
    options = parser.parse_args()
    tuning.run(
        "bench.steps", options, grid(), measure_case, describe, tuning.processes(options, most=3),
        20.0 if options.quick else 60.0, {"settings": own_settings()},
    )  # fmt: skip


if __name__ == "__main__":
    main()
