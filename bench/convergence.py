"""Train models of about 100 million parameters, stock and with the fusions, and compare their loss curves.

A GPT-2 with dropout (eager attention), a Llama (SDPA, padded batches), a BERT with dropout (eager attention,
padded batches, masked tokens) and PEFT's adapters with dropout on a Llama that was trained before, on sources
and documents of the installed packages. Weights are float32 under bfloat16 autocast, as transformers' Trainer
has them with `bf16=True`, the frozen ones under the adapters bfloat16; AdamW, gradients clipped to norm 1, a
linear schedule with warm-up.

Each model is trained from the same weights by `stock` (the fusions switched off) and `fused` with the same
order of the data and the same seed for dropout, and by stock with two other seeds for both. The fused curve
may be as far from that of stock as those of stock are from each other: `bench.curves` has the criterion.

    python -m bench.convergence --out bench/results/convergence_h100.json --jobs 8 --budget 540
    python -m bench.convergence --out /tmp/try.json --device cpu --quick --steps 20

Each run is a process of its own, with a compile cache of its own but for stock's seeds, which share one. They
use the device together: times say what steps took, not how fast they are alone.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench import training_text, tuning
from bench.common import Json, is_fatal, one_line, synchronize
from bench.curves import CRITERION, judge
from bench.models.measure import site_counts
from bench.pool import FileLock


@dataclass(frozen=True)
class Subject:
    """A model, and what it learns.

    Attributes:
        architecture: "gpt2", "llama" or "bert".
        attention: the model's `attn_implementation`.
        padded: batches are padded on the right.
        text: a kind of `training_text`.
        rate: the learning rate after warm-up.
        adapters: PEFT's adapters are trained instead of the weights, which were trained before.
    """

    architecture: str
    attention: str
    padded: bool
    text: str = "sources"
    rate: float = 5e-4
    adapters: bool = False


SUBJECTS = {
    "gpt2": Subject("gpt2", "eager", False),
    "llama": Subject("llama", "sdpa", True),
    "bert": Subject("bert", "eager", True, rate=2e-4),
    "llama with adapters": Subject("llama", "sdpa", True, text="documents", adapters=True),
}


@dataclass(frozen=True)
class Load:
    """How models are trained.

    Attributes:
        device: "cpu" or "cuda".
        quick: two narrow layers.
        steps: of the optimizer.
        before: steps of the Llama that adapters are put on.
        batch, length: of the tokens of a step.
        vocabulary: number of tokens.
        policy: of inductor_fusions.
    """

    device: str
    quick: bool
    steps: int
    before: int
    batch: int
    length: int
    vocabulary: int
    policy: str


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        model: of `SUBJECTS`.
        variant: "stock" or "fused".
        seed: of the order of the data, masked tokens and dropout.
    """

    model: str
    variant: str
    seed: int

    @property
    def key(self) -> str:
        """Its name."""
        return f"{self.model} {self.variant} {self.seed}"


#: What is run of each model, first things first.
VARIANTS = (("stock", 0), ("fused", 0), ("stock", 1), ("stock", 2))


def runs() -> list[Run]:
    """All that can run here; adapters, which wait for their model, come first."""
    names = [n for n, s in SUBJECTS.items() if not s.adapters or importlib.util.find_spec("peft")]
    return [Run(name, *variant) for variant in VARIANTS for name in reversed(names)]


# Models --------------------------------------------------------------------------------------------------


def build(subject: Subject, load: Load) -> torch.nn.Module:
    """The model without adapters, in float32, with the same random weights at each call."""
    import transformers

    special = {"pad_token_id": training_text.PAD, "eos_token_id": training_text.END, "bos_token_id": None}
    shared = {"vocab_size": load.vocabulary, **special}
    small: Json = {}
    if subject.architecture == "gpt2":
        if load.quick:
            small = {"n_embd": 64, "n_layer": 2, "n_head": 2}
        config: Any = transformers.GPT2Config(**shared, **small)
    elif subject.architecture == "bert":
        if load.quick:
            small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = transformers.BertConfig(**shared, **small)
    else:
        sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12}
        sizes |= {"num_attention_heads": 12, "num_key_value_heads": 4}
        if load.quick:
            sizes |= {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
            sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(**shared, **sizes, max_position_embeddings=1024)
    causal = subject.architecture != "bert"
    config.use_cache = False
    kind = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForMaskedLM
    torch.manual_seed(0)
    with torch.device(load.device):
        model: Any = kind.from_config(config, attn_implementation=subject.attention)
    if causal:
        model.loss_type = "ForCausalLM"  # GPT-2's name does not tell it, and the warning breaks its graph
    trained: torch.nn.Module = model.train()
    return trained


def with_adapters(model: torch.nn.Module) -> torch.nn.Module:
    """The model in bfloat16 and frozen, with float32 adapters on its linears: PEFT's defaults."""
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear")
    made: torch.nn.Module = peft.get_peft_model(model.bfloat16(), config)
    return made.train()


def model_of(subject: Subject, load: Load, folder: Path) -> torch.nn.Module:
    """The model that is trained, with adapters or without.

    Args:
        subject, load: which.
        folder: of the data. The Llama that adapters are put on is trained there by whoever asks first.
    """
    model = build(subject, load)
    if not subject.adapters:
        return model
    path = folder / "llama.pt"
    with FileLock(folder / "llama.lock"):
        if not path.exists():
            train(model, SUBJECTS["llama"], load, folder, False, 100, load.before, "llama, for adapters")
            torch.save(model.state_dict(), path)
    model.load_state_dict(torch.load(path, map_location=load.device))
    return with_adapters(model)


# Training ------------------------------------------------------------------------------------------------


def data_of(subject: Subject, load: Load, folder: Path, seed: int, steps: int) -> dict[str, torch.Tensor]:
    """The batches of a training, on the device."""
    path, masked = folder / f"{subject.text}.npy", subject.architecture == "bert"
    data = training_text.batches(path, steps, load.batch, seed, load.vocabulary, subject.padded, masked)
    return {key: value.to(load.device) for key, value in data.items()}


def optimizing(parameters: list[torch.nn.Parameter], rate: float, steps: int) -> tuple[Any, Any]:
    """An optimizer, and its schedule: linear, with warm-up."""
    optimizer = torch.optim.AdamW(parameters, rate, weight_decay=0.01, fused=True)
    warm = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (steps - step) / (steps - warm + 1))
    )
    return optimizer, schedule


class Clock:
    """Times of the steps of a training, which now and then waits for its device.

    Attributes:
        compile_s: seconds of the first step.
        times: seconds of a step, mean of each block of steps behind the first.
    """

    def __init__(self, device: str, steps: int, name: str) -> None:
        self.device, self.steps, self.name = device, steps, name
        self.block = max(1, min(50, steps // 4))
        self.compile_s, self.times = 0.0, list[float]()
        self._start = time.perf_counter()

    def tick(self, step: int, loss: torch.Tensor) -> None:
        """A step is done; every fourth block is told."""
        if step % self.block:
            return
        synchronize(self.device)
        seconds = time.perf_counter() - self._start
        if step == 0:
            self.compile_s = seconds
        else:
            self.times.append(seconds / self.block)
            if step % (4 * self.block) == 0:
                told = f"step {step} of {self.steps}, loss {float(loss):.3f}, {self.times[-1] * 1e3:.1f} ms"
                print(f"  {self.name}: {told}", file=sys.stderr, flush=True)
        self._start = time.perf_counter()


def train(
    model: torch.nn.Module,
    subject: Subject,
    load: Load,
    folder: Path,
    fused: bool,
    seed: int,
    steps: int,
    name: str,
) -> Json:
    """Train a model in place.

    Args:
        model: what is trained, where it requires gradients.
        subject, load: how, and on what.
        seed: of the order of the data, and of dropout.
        name: what progress is told of.

    Returns:
        "loss" of each step, "grad_norm" of every tenth (before it is clipped), "step_ms", "compile_s" (the
        first step), and "sites" of the fusions.
    """
    import inductor_fusions
    from inductor_fusions import config

    data = data_of(subject, load, folder, seed, steps)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer, schedule = optimizing(parameters, subject.rate, steps)
    losses, norms = torch.zeros(2, steps, device=load.device)
    torch._dynamo.reset()
    inductor_fusions.clear()

    def loss_of(**given: torch.Tensor) -> torch.Tensor:
        # Trainer has autocast inside of what it compiles.
        with torch.autocast(load.device, torch.bfloat16):
            loss: torch.Tensor = model(**given).loss
        return loss

    compiled: Any = torch.compile(loss_of, dynamic=False)
    torch.manual_seed(seed)
    clock = Clock(load.device, steps, name)
    with config.patch(enabled=fused, policy=load.policy):
        for step in range(steps):
            loss = compiled(**{key: value[step] for key, value in data.items()})
            loss.backward()
            norms[step] = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses[step] = loss.detach()
            clock.tick(step, losses[step])
    return {
        "loss": [round(value, 4) for value in losses.tolist()],
        "grad_norm": [round(value, 3) for value in norms[::10].tolist()],
        "step_ms": round(statistics.median(clock.times) * 1e3, 2),
        "compile_s": round(clock.compile_s, 1),
        "sites": site_counts(list(inductor_fusions.report())),
    }


def work(task: tuple[Run, Load, str, bool], lock: Path) -> tuple[Json, bool]:
    """One run; the process goes on only where it has no other runs beside it."""
    run, load, folder, here = task
    start = time.monotonic()
    cache = Path(folder) / "caches" / f"{run.model} {run.variant}".replace(" ", "_")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    subject = SUBJECTS[run.model]
    try:
        model = model_of(subject, load, Path(folder))
        count = sum(p.numel() for p in model.parameters())
        fused = run.variant == "fused"
        row = train(model, subject, load, Path(folder), fused, run.seed, load.steps, run.key)
    except Exception as error:
        return {"key": run.key, "failed": one_line(error, 400)}, here and not is_fatal(error)
    row["measure_s"] = round(time.monotonic() - start - row["compile_s"], 1)
    return {"key": run.key, **asdict(run), "parameters": count, **row}, here


def describe(row: Json) -> str:
    """A run's outcome in one line."""
    last = row["loss"][-max(1, len(row["loss"]) // 20) :]
    text = f"loss {row['loss'][0]:.3f} to {statistics.fmean(last):.3f}, {row['step_ms']:.1f} ms a step"
    text += f", compiled in {row['compile_s']:.0f} s, {row['measure_s']:.0f} s more"
    if row["variant"] == "fused":
        text += "".join(f"\n      {n} x {what}" for what, n in row["sites"]["what"].items())
    return text


def print_verdicts(rows: Sequence[Json], window: int) -> None:
    """What the criterion says."""
    for found in judge(rows, window):
        said = "within" if found["within"] else "NOT within"
        print(f"{found['model']}: fused and stock {found['fused']:.4f}, {said} {found['stock']:.4f} of stock")


def main() -> None:
    """The command line."""
    parser = tuning.parser("bench.convergence", __doc__)
    parser.add_argument("--steps", type=int, default=1000, help="of each run (%(default)s)")
    parser.add_argument("--policy", default="always", help="of inductor_fusions (%(default)s)")
    options = parser.parse_args()
    chosen = tuning.select(runs(), options)
    batch, length, vocabulary = (2, 32, 512) if options.quick else (8, 256, 16384)
    load = Load(
        options.device, options.quick, options.steps, max(1, options.steps * 3 // 10), batch, length,
        vocabulary, options.policy,
    )  # fmt: skip
    window = max(1, options.steps // 20)
    jobs = tuning.processes(options, most=8)
    with tempfile.TemporaryDirectory() as folder:
        print("tokens of the text", file=sys.stderr, flush=True)
        most = 300_000 if options.quick else 12_000_000
        told = training_text.prepare(Path(folder), vocabulary, length, most)
        settings = {k: v for k, v in asdict(load).items() if k not in ("device", "quick")} | told
        results, failed = tuning.measure(
            "bench.convergence",
            options,
            [[run] for run in chosen],
            work,
            lambda group: (group[0], load, folder, jobs == 1),
            describe,
            jobs,
            20.0 if options.quick else 90.0,
            header={"settings": settings, "jobs": jobs, "window": window, "criterion": CRITERION},
        )
    print_verdicts(results.rows, window)
    tuning.end(failed)


if __name__ == "__main__":
    main()
