"""`generate` of transformers as users call it, which compiles by itself: tokens a second, stock and fused.

    model.generate(ids, cache_implementation="static", do_sample=False, max_new_tokens=256)

Llama-1B, alone and with PEFT's adapters on every linear, and 8 layers with the widths of Llama-8B; random
weights in bfloat16, no end token. `p1024 b16` are 16 prompts of 1,024 tokens. Stock (INDUCTOR_FUSIONS=0) and
fused are two processes with caches of their own, which compile side by side and then generate in turns.

`tokens_s` counts new tokens over the whole call, with the prompt, which transformers does not compile;
`token_ms` is the median time between two tokens, in calls of their own with a streamer. If greedy tokens
differ, the first difference of a sequence is a tie if, in float32, neither token is further below the best
one than twice the largest error of the bfloat16 logits of the uncompiled model.

    python -m bench.generate --out bench/results/generate_h100.json --budget 500
    python -m bench.generate --quick --device cpu --only '1b p8 b1$' --out /tmp/try.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any
from unittest import mock

import torch

import inductor_fusions
from bench import model_cases, steps, tuning
from bench.common import Json, own_settings, summarize, synchronize
from bench.pool import FileLock

ROOT = Path(__file__).resolve().parents[1]
#: What each process has in its environment.
VARIANTS = {"stock": "0", "fused": "1"}
NEW_TOKENS = 256
#: Calls before any is timed: the first one compiles and records CUDA graphs.
WARM = 2


@dataclass(frozen=True)
class Case:
    """One model and its prompts.

    Attributes:
        model: file in `configs/models`.
        prompt: tokens of each prompt.
        batch: prompts.
        lora: with adapters of rank 16 on every linear.
    """

    model: str
    prompt: int
    batch: int
    lora: bool = False

    @property
    def key(self) -> str:
        """Its name."""
        return f"{self.model}{' lora' if self.lora else ''} p{self.prompt} b{self.batch}"


def grid() -> list[Case]:
    """What is measured, the most important first."""
    ends = ((128, 1), (1024, 16), (1024, 1), (128, 16))
    models = (("llama-8b-8l", False), ("llama-1b", True), ("llama-1b", False))
    return [Case(model, *end, lora) for end in ends for model, lora in models]


# One of the two processes ------------------------------------------------------------------------------


class Clock:
    """A streamer that writes down when tokens come."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: torch.Tensor) -> None:
        """The prompt, then new tokens, on the CPU."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """There are no more."""


class Server:
    """A model that generates when it is asked to."""

    def __init__(self, case: Case, device: str, quick: bool) -> None:
        self.device = device
        adapters = model_cases.Adapters() if case.lora else None
        load = model_cases.Case(case.key, case.model, "sdpa", case.batch, case.prompt, adapters=adapters)
        with mock.patch.dict(model_cases.QUICK, steps.NARROW):
            values = model_cases.model_config(load, quick)[1]
            self.model: Any = model_cases.build(load, "sdpa", device, quick, auto="AutoModelForCausalLM")
        settings = self.model.generation_config
        settings.eos_token_id, settings.pad_token_id = None, 0
        ids = model_cases.make_inputs(load, values, device)["input_ids"]
        self.asked = {
            "input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False,
            "max_new_tokens": 8 if quick else NEW_TOKENS, "cache_implementation": "static",
        }  # fmt: skip
        if device == "cpu":  # there, transformers compiles only where it is told to
            from transformers import CompileConfig

            self.asked["compile_config"] = CompileConfig()
            self.asked["compile_config"]._compile_all_devices = True

    def run(self, clock: bool = False) -> Json:
        """Generate: seconds; with a clock also those to the first token and between two."""
        watch = Clock()
        synchronize(self.device)
        start = time.perf_counter()
        self.found = self.model.generate(**self.asked, **({"streamer": watch} if clock else {}))
        synchronize(self.device)
        found = {"s": time.perf_counter() - start}
        if clock:
            gaps = [b - a for a, b in pairwise(watch.times[1:])]
            found |= {"first_s": watch.times[1] - start, "token_s": median(gaps)}
        return found

    def said(self) -> Json:
        """The new tokens of each sequence, what was fused, and how many graphs were compiled."""
        from torch._dynamo.utils import counters

        prompt = self.asked["input_ids"].shape[1]
        sites = inductor_fusions.report().sites
        return {
            "tokens": self.found[:, prompt:].tolist(), "graphs": counters["stats"]["unique_graphs"],
            "fused": [f"{site.fusion}: {site.kernel}" for site in sites if site.verdict == "fused"],
        }  # fmt: skip

    def ties(self, questions: list[tuple[int, list[int], list[int]]]) -> Json:
        """Whether tokens are within rounding of the best one; afterwards the model is float32.

        Args:
            questions: the index of a sequence, its new tokens so far, and the tokens that could come next.
        """
        prompts = [self.asked["input_ids"][i].tolist() + tokens for i, tokens, _ in questions]

        def logits() -> list[torch.Tensor]:
            with torch.no_grad():
                given = [torch.tensor([prompt], device=self.device) for prompt in prompts]
                return [self.model(ids, logits_to_keep=1).logits[0, -1].float() for ids in given]

        rounded = logits()
        self.model.float()
        found = []
        for low, exact, (_, _, tokens) in zip(rounded, logits(), questions, strict=True):
            error = (low - exact).abs().max()
            found.append(bool(exact.max() - exact[tokens].min() <= 2 * error))
        return {"ties": found}


def serve(case: Case, device: str, quick: bool) -> None:
    """Answer requests of stdin on stdout, one JSON a line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    server = Server(case, device, quick)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(getattr(server, request.pop("do"))(**request)), file=answers, flush=True)


class Process:
    """A server in a process of its own, with empty caches."""

    def __init__(self, name: str, case: Case, device: str, quick: bool) -> None:
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.log = Path(self.folder.name) / "log"
        own = {"INDUCTOR_FUSIONS": VARIANTS[name]}
        own |= {f"{each}_CACHE_DIR": f"{self.folder.name}/{each}" for each in ("TORCHINDUCTOR", "TRITON")}
        command = [sys.executable, "-m", "bench.generate", "--out", os.devnull, "--device", device]
        command += ["--serve", json.dumps(asdict(case)), *["--quick"] * quick]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                cwd=ROOT, env={**os.environ, **own},
            )  # fmt: skip

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.communicate()
        self.folder.cleanup()

    def ask(self, do: str, **request: Any) -> None:
        """Send a request. Where the process is dead, its answer says why."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self.process.stdin.flush()

    def answer(self) -> Json:
        """Wait for the answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError((self.log.read_text().strip().splitlines() or ["the process died"])[-1])
        found: Json = json.loads(line)
        return found

    def __call__(self, do: str, **request: Any) -> Json:
        """Ask, and wait."""
        self.ask(do, **request)
        return self.answer()


# Both -----------------------------------------------------------------------------------------------


def leading(one: list[int], other: list[int]) -> int:
    """How many tokens are equal before the first difference."""
    pairs = enumerate(zip(one, other, strict=True))
    return next((i for i, (a, b) in pairs if a != b), len(one))


def compare(found: dict[str, Process], said: dict[str, Json]) -> Json:
    """Leading equal tokens of each sequence, and whether the first differences are ties."""
    both = list(zip(said["stock"]["tokens"], said["fused"]["tokens"], strict=True))
    equal = [leading(*pair) for pair in both]
    apart = [(i, n) for i, n in enumerate(equal) if n < len(both[i][0])]
    questions = [(i, both[i][0][:n], [tokens[n] for tokens in both[i]]) for i, n in apart]
    ties = found["stock"]("ties", questions=questions)["ties"] if questions else []
    return {"equal": equal, "differ": len(apart), "ties": sum(ties), "correct": all(ties)}


def measure(case: Case, device: str, quick: bool, rounds: int, lock: FileLock | None = None) -> Json:
    """Compile beside others that share the lock, then alone generate in turns, and compare."""
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    watched: dict[str, list[Json]] = {name: [] for name in VARIANTS}
    with ExitStack() as stack:
        found = {name: stack.enter_context(Process(name, case, device, quick)) for name in VARIANTS}
        with lock.shared() if lock else nullcontext():
            for process in found.values():
                for _ in range(WARM):
                    process.ask("run")
            firsts, *_ = [{name: each.answer()["s"] for name, each in found.items()} for _ in range(WARM)]
        with lock or nullcontext():
            for i in range(rounds):
                for name in (*VARIANTS,)[:: 1 if i % 2 else -1]:
                    seconds[name].append(found[name]("run")["s"])
                    if i % 2 == 0:
                        watched[name].append(found[name]("run", clock=True))
            said = {name: process("said") for name, process in found.items()}
            agreement = compare(found, said)

    def milliseconds(what: str) -> Json:
        return {name: round(median(run[what] for run in runs) * 1e3, 3) for name, runs in watched.items()}

    times = {name: summarize(values) for name, values in seconds.items()}
    count = case.batch * len(said["stock"]["tokens"][0])
    return {
        "tokens_s": {name: round(count / t.median, 1) for name, t in times.items()},
        "spread": {name: round(t.spread, 4) for name, t in times.items()},
        "first_ms": milliseconds("first_s"), "token_ms": milliseconds("token_s"),
        "gain": round(times["stock"].median / times["fused"].median, 4), **agreement,
        "sites": {each: said["fused"]["fused"].count(each) for each in sorted(set(said["fused"]["fused"]))},
        "graphs": {name: each["graphs"] for name, each in said.items()},
        "first_call_s": {name: round(value, 2) for name, value in firsts.items()},
    }  # fmt: skip


def measure_case(case: Case, options: argparse.Namespace, lock: FileLock) -> Json:
    """Measure one case. Other processes compile beside it, and wait while it is timed."""
    return measure(case, options.device, options.quick, options.rounds, lock)


def describe(row: Json) -> str:
    """A case's outcome in one line."""
    return (
        f"tokens/s {row['tokens_s']}, {row['gain']}x, ms a token {row['token_ms']}, equal {row['equal']}, "
        f"{row['ties']} of {row['differ']} differences are ties, fused {sum(row['sites'].values())}"
    )


def main() -> None:
    """The command line."""
    parser = tuning.parser("bench.generate", __doc__)
    parser.add_argument("--rounds", type=int, default=5, help="calls of each variant, in turns")
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(Case(**options.serve), options.device, options.quick)
        return
    shorter = [replace(case, prompt=min(case.prompt, 8), batch=min(case.batch, 2)) for case in grid()]
    tuning.run(
        "bench.generate", options, list(dict.fromkeys(shorter)) if options.quick else grid(), measure_case,
        describe, tuning.processes(options, most=3), 20.0 if options.quick else 50.0,
        {"settings": own_settings()},
    )  # fmt: skip


if __name__ == "__main__":
    main()
