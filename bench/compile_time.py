"""What the package adds to a compile, on a machine without a GPU: whole models, stock beside fused, in turns.

    python -m bench.compile_time --only "bert-base eager b32|llama-3b r32" --rounds 3

A model has its real widths and every candidate is let through. Its graphs seem to be on a GPU once autograd
has made them. A row has, for stock and fused, the seconds of the processor that the compiling thread takes
(Dynamo, autograd, passes, lowering, the writing of code) with their spread, without the first round, which
imports modules; the kernels written; with `--code`, the seconds of all processors for the machine code of
kernels that differ, and of the longest one. Nothing is run. Times depend on what else the machine does:
compare ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import re
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import fx, nn

import inductor_fusions
from bench import model_cases, models_lora
from bench.common import Json, switched
from devtools import cuda_codegen
from devtools.ledger.compiling import ON_A_GPU, set_up

ARCH = 90
CASES = (*model_cases.CASES, *model_cases.WIDTHS, *models_lora.CASES, *models_lora.WIDTHS)


class _Written(BaseException):
    """All code is written; what would run it is not there."""


def _stop(*values: Any) -> Any:
    raise _Written


class Compile:
    """One compile of a model: what it took of the thread, and the kernels."""

    def __init__(self, model: nn.Module, inputs: Json, train: bool) -> None:
        from torch._functorch import config as functorch_config
        from torch._inductor import compile_fx
        from torch._inductor import config as inductor_config

        self.kernels: list[cuda_codegen.Kernel] = []
        self._beside = 0.0
        settings = {"force_disable_caches": True, "compile_threads": 1, "benchmark_epilogue_fusion": False}
        torch._dynamo.reset()
        gc.collect()
        with contextlib.ExitStack() as stack:
            for check in ON_A_GPU:
                stack.enter_context(mock.patch(f"inductor_fusions.{check}", lambda t: None))
            stack.enter_context(inductor_config.patch(settings))
            stack.enter_context(inductor_fusions.config.patch(policy="always"))
            stack.enter_context(functorch_config.patch(force_non_lazy_backward_lowering=train))
            stack.enter_context(torch.set_grad_enabled(train))
            backend = partial(compile_fx.compile_fx, inner_compile=self._write)
            start = time.thread_time()
            with contextlib.suppress(_Written):
                torch.compile(model, backend=backend, dynamic=False)(**inputs)
            self.seconds = time.thread_time() - start - self._beside
        torch._dynamo.reset()

    def _write(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        from functorch.compile import make_boxed_func

        start = time.thread_time()
        moved, inputs = cuda_codegen.on_cuda(gm, example_inputs)
        with cuda_codegen.pretended(cuda_codegen.DEVICES[ARCH]):
            self._beside += time.thread_time() - start
            written = cuda_codegen.write(moved, inputs, **options)
        self.kernels += written.kernels
        return make_boxed_func(_stop)


def machine_code(kernels: Sequence[cuda_codegen.Kernel]) -> list[float]:
    """Seconds of all processors for the machine code of each kernel that differs from the others."""
    alike = {re.sub(r"\btriton_\w+", "kernel", each.source): each.source for each in kernels}
    found = []
    for source in alike.values():
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict("os.environ", TRITON_CACHE_DIR=folder):
            start = _processors()
            cuda_codegen.compile_kernel(source, ARCH)
            found.append(_processors() - start)
    return found


def _processors() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


@contextlib.contextmanager
def _uninitialised() -> Iterator[None]:
    """Weights of models are not drawn: nothing is computed with them."""
    with contextlib.ExitStack() as stack:
        for name in [name for name in vars(nn.init) if name.endswith("_") and not name.startswith("_")]:
            stack.enter_context(mock.patch.object(nn.init, name, lambda t, *given, **options: t))
        yield


def measure(case: model_cases.Case, layers: int | None, rounds: int, code: bool) -> Json:
    """The row of a case; `layers` of its model, or all."""
    full = model_cases.model_config

    def config(case: model_cases.Case, quick: bool) -> tuple[str, Json]:
        architecture, values = full(case, quick)
        depths = "num_hidden_layers n_layer num_layers encoder_layers decoder_layers num_decoder_layers"
        cut = {name: layers for name in depths.split() if layers is not None and name in values}
        return architecture, {**values, **cut}

    with mock.patch.object(model_cases, "model_config", config), _uninitialised():
        model = model_cases.build(case, case.attn, "cpu", quick=False)
        inputs = model_cases.make_inputs(case, config(case, False)[1], "cpu")
    row: Json = {"case": case.name, "layers": layers}
    done: dict[bool, list[Compile]] = {False: [], True: []}
    for i in range(rounds + 1):
        for fused in (False, True) if i % 2 else (True, False):
            with switched(fused):
                done[fused].append(Compile(model, inputs, case.train))
    for fused, compiles in done.items():
        seconds = [each.seconds for each in compiles[1:]]
        own: Json = {"seconds": round(statistics.median(seconds), 3)}
        own["spread"] = round((max(seconds) - min(seconds)) / statistics.median(seconds), 3)
        own["kernels"] = len(compiles[0].kernels)
        if code:
            each = machine_code(compiles[0].kernels)
            own |= {"machine_code": round(sum(each), 2), "longest": round(max(each, default=0.0), 2)}
        row["fused" if fused else "stock"] = own
    row["ratio"] = round(row["fused"]["seconds"] / row["stock"]["seconds"], 3)
    return row


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.compile_time", description=__doc__)
    parser.add_argument("--only", type=re.compile, required=True, help="cases whose name matches")
    parser.add_argument("--layers", type=int, help="cut models down to so many layers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--code", action="store_true", help="make the machine code of kernels too")
    options = parser.parse_args()
    set_up()
    for case in CASES:
        if options.only.search(case.name):
            print(json.dumps(measure(case, options.layers, options.rounds, options.code)), flush=True)


if __name__ == "__main__":
    main()
