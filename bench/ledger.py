"""What torch.compile makes of each model, counted without a GPU: the ledger `bench/ledger.json`.

A row stands for a model of `configs/models` with its layers, heads and widths cut down, plain or with PEFT's
adapters on every linear, or for a model of recommendation; in inference or in training, in one dtype,
compiled by one version of torch for one device. It holds

    sites     fused sites by fusion
    kernels   kernels that Inductor wrote and launches
    extern    calls of other libraries, by name: matrix products, attention
    bytes     read and written by all of them, as Inductor counts them

`INDUCTOR_FUSIONS_POLICY=always`: what is proved is fused, whatever a table of measurements says, so that a
row changes with the code and with torch alone. CUDA is a device that does not exist (`bench.cuda_codegen`):
attention is decided as on a CPU, because that is settled before the graph is moved there, and attention
calls are counted under one name, since which kernel SDPA takes is not known without a GPU. Fusions before
autograd that have kernels for CUDA alone are decided as if there were some for the CPU (`ON_A_GPU`).

A row is worse where a fusion has fewer sites, or where there are more kernels, extern calls or bytes.
Rewriting the file accepts that, and the diff is what is reviewed.

    python -m bench.ledger                  # rewrite the rows of this torch: make ledger
    python -m bench.ledger --missing        # only add those of new models
    python -m bench.ledger --check          # exit 1, with the rows named, where one is worse
    python -m bench.ledger --check --quick  # one dtype, the models of QUICK: what the tests run
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx

import inductor_fusions
from bench import cuda_codegen, dot_interaction, model_cases, models_lora, outer_product
from bench.common import Json, Progress, one_line
from bench.pool import run_tasks
from inductor_fusions import reporting

PATH = Path(__file__).with_name("ledger.json")
ARCH = 90
DEVICES = ("cuda", "cpu")
DTYPES = ("bfloat16", "float32")
HEADS = 4
#: Versions that decide what a row holds. Their rows are compared only where all of them are the same.
PACKAGES = ("torch", "transformers", "triton")
#: Cases of the quick check.
QUICK = (
    "bert-base eager padded", "llama-1b sdpa", "gpt2 eager", "llama-1b lora float32", "dlrm outer product",
    "dlrm dot products",
)  # fmt: skip
#: Models of recommendation, by how they combine their features.
RECOMMENDATION: dict[str, type[outer_product.DLRM | dot_interaction.DLRM]] = {
    "outer product": outer_product.DLRM,
    "dot products": dot_interaction.DLRM,
}

#: Names of a configuration for the number of heads, of shared heads, and for what is a multiple of the heads.
_HEADS = (
    "num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "decoder_attention_heads",
)  # fmt: skip
_SHARED = ("num_key_value_heads",)
_WIDTHS = (
    "hidden_size intermediate_size n_embd n_inner d_model d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim "
    "word_embed_proj_dim"
).split()


#: What leaves a site to stock on a CPU, in fusions before autograd.
ON_A_GPU = (
    "fusions.outer_product_linear.check_kernel", "fusions.dot_interaction.check_kernel",
    "fusions.lora.inputs.WidenedInput.guard",
)  # fmt: skip

# Cases -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One model to compile.

    Attributes:
        model: as in the names of its rows.
        train: forward and backward.
        dtype: of the model.
        make: builds it, with the keyword arguments that it is called with.
    """

    model: str
    train: bool
    dtype: str
    make: Callable[[], tuple[torch.nn.Module, Json]]

    @property
    def name(self) -> str:
        """As in the names of its rows."""
        return f"{self.model} {self.mode} {self.dtype}"

    @property
    def mode(self) -> str:
        """ "inference" or "training"."""
        return "training" if self.train else "inference"

    def header(self, device: str) -> Json:
        """What names a row."""
        names = {"model": self.model, "mode": self.mode, "dtype": self.dtype}
        return {**names, "device": device, "torch": series()}


def entries(quick: bool = False) -> list[Entry]:
    """Each kind of model and attention that is measured: inference in each dtype, training in the first.

    Then models with adapters, and those of recommendation.
    """
    found = _of_models(quick)
    for adapters in DTYPES:
        for load, seq, modes in (("", 128, (False, True)), (" decode", 1, (False,))):
            for train in modes:
                case = models_lora.Case("ledger", 1, seq, train=train, adapters=adapters)
                name = f"llama-1b lora {adapters}{load}"
                found.append(Entry(name, train, DTYPES[0], partial(_adapted, case)))
    for interaction in RECOMMENDATION:
        for train in (False, True):
            made = partial(_recommendation, interaction)
            found.append(Entry(f"dlrm {interaction}", train, DTYPES[0], made))
    return [each for each in found if not quick or each.model in QUICK]


def _of_models(quick: bool) -> list[Entry]:
    found: dict[str, Entry] = {}
    for case in model_cases.CASES:
        words = [case.model, case.attn]
        words += ["padded"] * case.padded + ["packed"] * (case.documents > 0)
        words += ["cache"] * case.use_cache + ["dropout"] * (case.dropout > 0)
        load = " ".join(words)
        trains = (True,) if case.dropout > 0 else (False,) if case.use_cache else (False, True)
        for train in trains:
            for dtype in DTYPES[:1] if quick or train else DTYPES:
                small = replace(
                    model_cases.quick_case(case), name=load, train=train, dtype=dtype, mode="default"
                )
                entry = Entry(load, train, dtype, partial(_model, small))
                found.setdefault(entry.name, entry)
    return list(found.values())


def _model(case: model_cases.Case) -> tuple[torch.nn.Module, Json]:
    model = model_cases.build(case, case.attn, "cpu", quick=True)
    return model, model_cases.make_inputs(case, narrow(case, True)[1], "cpu")


def _adapted(case: models_lora.Case) -> tuple[torch.nn.Module, Json]:
    base = models_lora.base(case)
    model = models_lora.build(case, "cpu", quick=True)
    return model, model_cases.make_inputs(base, narrow(base, True)[1], "cpu")


def _recommendation(interaction: str) -> tuple[torch.nn.Module, Json]:
    torch.manual_seed(0)
    model = RECOMMENDATION[interaction](entries=10).bfloat16()
    sparse = torch.randint(0, 10, (256, len(model.tables)))
    return model, {"dense": torch.randn(256, 13).bfloat16(), "sparse": sparse}


def narrow(case: model_cases.Case, quick: bool) -> tuple[str, Json]:
    """The configuration of a case, in the sizes of its quick form, with few heads of the same head dim."""
    architecture, values = _full_config(case, True)
    heads = next((values[n] for n in _HEADS if isinstance(values.get(n), int)), HEADS)
    if "depths" in values:  # one stage, with and without shifted windows
        values |= {"depths": [2], "num_heads": [HEADS], "embed_dim": 32 * HEADS}
    if "num_local_experts" in values:
        values |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    if heads > HEADS:
        for name in _HEADS:
            if isinstance(values.get(name), int):
                values[name] = HEADS
        for name in _WIDTHS:
            if isinstance(values.get(name), int):  # kernels of half precision ask for multiples
                values[name] = -(-values[name] * HEADS // heads // 64) * 64
        for name in _SHARED:
            if isinstance(values.get(name), int):
                values[name] = max(1, values[name] * HEADS // heads)
    return architecture, values


_full_config = model_cases.model_config


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
    torch._dynamo.reset()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(model_cases, "model_config", narrow))
        for check in ON_A_GPU:
            stack.enter_context(mock.patch(f"inductor_fusions.{check}", lambda t: None))
        stack.enter_context(inductor_config.patch(settings))
        stack.enter_context(inductor_fusions.config.patch(enabled=True, policy="always"))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        model, inputs = entry.make()
        backend = partial(compile_fx.compile_fx, inner_compile=partial(_count, found))
        before = stack.enter_context(reporting.isolated(keep=False))
        with torch.set_grad_enabled(entry.train):
            out = torch.compile(model, backend=backend, dynamic=False)(**inputs)
            hidden = out if isinstance(out, torch.Tensor) else out.last_hidden_state
            if entry.train:
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


# The file ----------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """What decides the rows of a series of torch besides this package."""
    return {name: metadata.version(name).partition("+")[0] for name in PACKAGES}


def series() -> str:
    """The torch of this process: "2.13"."""
    return ".".join(str(torch.__version__).split(".")[:2])


def measure(entry: Entry) -> list[Json]:
    """The rows of a model: one for each device."""
    found = compiled(entry)
    return [{**entry.header(device), **each.row()} for device, each in found.items()]


def key(row: Mapping[str, Any]) -> str:
    """The name of a row."""
    return " ".join(str(row[name]) for name in ("model", "mode", "dtype", "device", "torch"))


def read(path: Path = PATH) -> tuple[dict[str, dict[str, str]], dict[str, Json]]:
    """The versions of each series of torch, and the rows by key."""
    if not path.exists():
        return {}, {}
    data = json.loads(path.read_text("utf-8"))
    return data["versions"], {key(row): row for row in data["rows"]}


def save(path: Path, known: Mapping[str, Mapping[str, str]], rows: Iterable[Json]) -> None:
    """Write the file, a row a line, so that diffs can be read."""
    head = json.dumps({"schema": 1, "versions": dict(sorted(known.items()))}, indent=1)
    lines = ",\n".join("  " + json.dumps(row) for row in sorted(rows, key=key))
    path.write_text(head[:-2] + ',\n "rows": [\n' + lines + "\n ]\n}\n", "utf-8")


# Comparing ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """What a row of the ledger lost and gained."""

    row: str
    worse: tuple[str, ...] = ()
    better: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.row}: " + "; ".join([*self.worse, *(f"{text} (a gain)" for text in self.better)])


def compare(old: Json | None, new: Json) -> Change:
    """What became of a row; one that the ledger lacks is worse, so that it is written down."""
    name = key(new)
    if old is None:
        return Change(name, worse=("not in the ledger",))
    worse, better = [], []
    for fusion in sorted({*old["sites"], *new["sites"]}):
        before, after = old["sites"].get(fusion, 0), new["sites"].get(fusion, 0)
        if before != after:
            (worse if after < before else better).append(f"{fusion}: {before} -> {after} sites fused")
    for what, count in (("kernels", _kernels), ("extern calls", _extern), ("bytes", _bytes)):
        before, after = count(old), count(new)
        if before != after:
            (worse if after > before else better).append(f"{what}: {before:,} -> {after:,}")
    return Change(name, tuple(worse), tuple(better))


def _kernels(row: Json) -> int:
    return int(row["kernels"])


def _extern(row: Json) -> int:
    return sum(row["extern"].values())


def _bytes(row: Json) -> int:
    return int(row["bytes"])


def unlike(known: Mapping[str, Mapping[str, str]]) -> str:
    """Why the rows of this torch cannot be compared here; empty if they can."""
    recorded, here = known.get(series()), versions()
    if recorded is None:
        return f"the ledger has no rows of torch {series()}"
    other = [
        f"{name} {here[name]}, not {recorded.get(name)}"
        for name in PACKAGES
        if here[name] != recorded.get(name)
    ]
    return f"other versions than the ledger's: {', '.join(other)}" if other else ""


# The command -------------------------------------------------------------------------------------------


def set_up(threads: int = 1) -> None:
    """Settings of a process that measures."""
    torch.set_num_threads(threads)
    logging.getLogger("torch").setLevel(logging.ERROR)
    logging.getLogger("inductor_fusions").setLevel(logging.ERROR)


def work(entry: Entry, lock: Path) -> tuple[list[Json] | str, bool]:
    """In a worker: the rows of a model, or why there are none."""
    set_up()
    try:
        return measure(entry), True
    except Exception as error:
        return one_line(error, 300), True


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.ledger", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--file", type=Path, default=PATH, help="the ledger; default: bench/ledger.json")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a row is worse")
    parser.add_argument("--quick", action="store_true", help=f"one dtype of {', '.join(QUICK)}")
    parser.add_argument("--only", type=re.compile, help="only models whose name matches this expression")
    parser.add_argument("--missing", action="store_true", help="only rows that the ledger lacks")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--list", action="store_true", help="name the models and stop")
    options = parser.parse_args()
    known, rows = read(options.file)
    todo = [each for each in entries(options.quick) if not options.only or options.only.search(each.name)]
    if options.missing:
        todo = [each for each in todo if any(key(each.header(device)) not in rows for device in DEVICES)]
    if options.list:
        print(*(each.name for each in todo), sep="\n")
        return
    different = unlike(known)
    if different and options.check:
        raise SystemExit(f"{different}: run python -m bench.ledger with this torch first")
    whole = not (options.quick or options.only or options.missing)
    if different and not whole and series() in known:
        raise SystemExit(f"{different}: rewrite all rows of torch {series()}")
    if whole and not options.check:  # rows of models that are gone go
        there = {key(each.header(device)) for each in todo for device in DEVICES}
        rows = {name: row for name, row in rows.items() if row["torch"] != series() or name in there}

    def keep() -> None:
        if not options.check:
            save(options.file, {**known, series(): versions()}, rows.values())

    changes, failed = run(todo, rows, options.jobs, keep)
    for change in changes:
        if change.worse or change.better:
            print(("worse: " if change.worse else "gained: ") + str(change))
    worse = sum(bool(change.worse) for change in changes)
    gained = sum(bool(change.better) and not change.worse for change in changes)
    print(f"{len(changes)} rows of torch {series()}: {worse} worse, {gained} gained")
    for name, why in failed.items():
        print(f"failed: {name}: {why}")
    if options.check and gained and not worse:
        print("make ledger writes the gains down, so that they cannot be lost unseen")
    sys.exit(1 if failed or (worse and options.check) else 0)


def run(
    todo: Sequence[Entry], rows: dict[str, Json], jobs: int, keep: Callable[[], None]
) -> tuple[list[Change], dict[str, str]]:
    """Measure models and put their rows in place of the old ones.

    Args:
        todo: the models.
        rows: of the ledger, by key; they are changed.
        jobs: processes.
        keep: called after each model.

    Returns:
        What became of each row, and why models failed.
    """
    changes: list[Change] = []
    failed: dict[str, str] = {}
    with Progress(len(todo)) as progress:
        for entry, answer in run_tasks(work, todo, jobs, lambda: True, lambda: float("inf")):
            if not isinstance(answer, list):
                failed[entry.name] = answer or "the process died"
                progress.step(f"{entry.name}: {failed[entry.name]}")
                continue
            for row in answer:
                changes.append(compare(rows.get(key(row)), row))
                rows[key(row)] = row
            keep()
            progress.step(entry.name)
    return sorted(changes, key=lambda change: change.row), failed


if __name__ == "__main__":
    main()
