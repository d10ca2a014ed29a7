"""What `collecting` puts in the place of the tests' helpers: it judges each program as a test checks it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
import types
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.gpu.reading import Anything

#: What a test may do beside its programs, in seconds.
BESIDE = 12.0
#: Exit status of a process whose GPU is lost.
LOST = 77


class Stop(BaseException):
    """Ends a test: nothing of what follows is a program, or there is no time."""


class Recorder:
    """Judges the programs of a test as the test checks them."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        self.device, self.seed = str(task["device"]), int(task["seed"])
        self.only, self.judging = task.get("only"), bool(task.get("judge", True))
        self.deadline = float(task.get("deadline", float("inf")))
        self.log = Path(task["log"])
        self.skipped = set(task.get("skip", ()))
        self.item, self.part, self.parts = "", 0, 1
        self.inside = False
        self.number = 0
        self.seen: list[tuple[Any, ...]] = []
        self.row: dict[str, Any] = {}
        self.kept: deque[tuple[Any, bool]] = deque(maxlen=24)
        self.random = random.Random(self.seed)
        self.originals: dict[types.ModuleType, dict[str, Any]] = {}

    # -- what tests call -----------------------------------------------------------------------------

    def check(self, fn: Any, inputs: Any, **options: Any) -> Anything:
        from inductor_fusions.checking.runs import split

        args, kwargs = split(inputs)
        return self.take(fn, args, kwargs, options.get("train", True), options)

    def capture(self, fn: Any, *args: Any, **options: Any) -> Anything:
        own = {"train", "dynamic", "policy", "backend", "cotangents"}
        kwargs = {name: value for name, value in options.items() if name not in own}
        return self.take(fn, args, kwargs, options.get("train", False), options)

    def fusions(self, fn: Any, args: Any = (), expected: Any = None, **options: Any) -> Anything:
        from inductor_fusions.checking.runs import split

        args, kwargs = split(args)
        return self.take(fn, args, kwargs, options.get("train", False), options)

    def close(self, fn: Any, args: Any = (), **options: Any) -> Anything:
        from inductor_fusions.checking.runs import split

        args, kwargs = split(args)
        kwargs = {**kwargs, **(options.get("keywords") or {})}
        return self.take(fn, args, kwargs, options.get("train", True), options)

    def run(self, fn: Any, args: Any, **options: Any) -> Anything:
        return self.take(fn, tuple(args), {}, options.get("train", False), options)

    def products(self, function: Any, inputs: Any, *_: Any, **__: Any) -> Anything:
        import torch

        train = any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)
        return self.take(function, tuple(inputs), {}, train, {})

    def verify(
        self, function: Any, inputs: Any, judge: Any, chosen: Callable[[int], bool] = lambda index: True
    ) -> int:
        """Mutants of this part alone: others are not even run."""
        part, parts = self.part, self.parts
        self.part, self.parts = 0, 1
        count: int = self.all_mutants(function, inputs, judge, lambda i: chosen(i) and i % parts == part)
        return count

    # -- judging -------------------------------------------------------------------------------------

    def take(self, fn: Any, args: Any, kwargs: Any, train: bool, options: Mapping[str, Any]) -> Anything:
        """One program: judged if it is this process's, once."""
        from torch.utils import _pytree as pytree

        from inductor_fusions import config

        leaves = pytree.tree_leaves((args, kwargs))
        identity = (fn, [id(x) for x in leaves], train, config.get_config_copy())
        if any(old[0] is fn and old[1:] == identity[1:] for old, _ in self.seen):
            return Anything()
        self.seen.append((identity, leaves))  # what is kept alive keeps its address
        number, self.number = self.number, self.number + 1
        if number % self.parts != self.part or (self.only is not None and number != self.only):
            return Anything()
        name = f"{self.item} {number}"
        if name in self.skipped:
            self.count("left", "it ended its process")
            return Anything()
        if time.time() > self.deadline:
            raise Stop
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.inside = True
        try:
            with self.unpatched():
                if self.judging:
                    self.judge(name, fn, args, kwargs, train, options)
                else:
                    self.count("judged", "no")
        finally:
            self.inside = False
            signal.setitimer(signal.ITIMER_REAL, BESIDE)
        return Anything()

    def judge(self, name: str, fn: Any, args: Any, kwargs: Any, train: bool, options: Any) -> None:
        """Compile, run, compare, and write down what came of it."""
        import torch

        from tests.gpu import judging, moving

        dtype, training, padded = chosen(name, self.seed, self.device)
        self.write("begin", name=name, dtype=str(dtype).removeprefix("torch."), train=training and train)
        program = moving.Program(
            fn, tuple(args), dict(kwargs), options.get("dynamic"), options.get("reference")
        )
        default = torch.get_default_device()
        torch.set_default_device(None)
        started = time.monotonic()
        try:
            alone = self.only is not None
            verdict, moved = judging.judge(program, self.device, dtype, training and train, alone, padded)
            if judging.broken() and not alone:
                text = f"nothing runs in its process any more: {verdict.problem[:300]}"
                self.write("lost", name=name, dtype=verdict.dtype, train=verdict.train, text=text)
                os._exit(LOST)
            if moved is not None and self.only is None:
                self.mix(moved, verdict.train)
        except Exception as error:
            if judging.is_fatal(error):
                text = f"{type(error).__name__}: {str(error).strip()[:300]}"
                self.write("lost", name=name, dtype=str(dtype)[6:], train=training and train, text=text)
                os._exit(LOST)
            self.count("left", f"{type(error).__name__} while it was judged: {str(error)[:120]}")
            return
        finally:
            if default.type != "cpu":
                torch.set_default_device(default)
        self.row["seconds"] = round(self.row.get("seconds", 0.0) + time.monotonic() - started, 2)
        if verdict.left:
            self.count("left", verdict.left)
            return
        mode = "training" if verdict.train else "inference"
        self.count("judged", f"{verdict.dtype} {mode}")
        self.row["fused"] = self.row.get("fused", 0) + bool(verdict.sites)
        for fusion, count in verdict.sites.items():
            self.count("sites", fusion, count)
        if verdict.draws:
            self.row["draws"] = self.row.get("draws", 0) + 1
        told = {"number": int(name.rpartition(" ")[2]), "dtype": verdict.dtype, "mode": mode}
        if verdict.stock_wrong:
            self.row.setdefault("stock_wrong", []).append({**told, "what": verdict.stock_wrong[:200]})
        if verdict.problem:
            self.row.setdefault("failures", []).append({**told, "what": verdict.problem[:600]})

    def mix(self, program: Any, train: bool) -> None:
        """Eager calls of programs that were here before, with incoming gradients of other layouts."""
        from tests.gpu import judging

        for other, trained in self.random.sample(list(self.kept), min(2, len(self.kept))):
            judging.mixed_in(other, trained, self.random.choice(judging.LAYOUTS))
        self.kept.append((program, train))

    def count(self, what: str, name: str, by: int = 1) -> None:
        counts = self.row.setdefault(what, {})
        counts[name] = counts.get(name, 0) + by

    def write(self, event: str, **values: Any) -> None:
        """A line of the log, which the parent reads while this process runs, or when it is dead."""
        with self.log.open("a") as file:
            file.write(json.dumps({"event": event, "at": time.time(), **values}) + "\n")

    # -- what tests patch ----------------------------------------------------------------------------

    def install(self) -> None:
        """Put this in the place of the helpers, before any test has imported them."""
        import torch.testing
        from torch._inductor import compile_fx

        from devtools import cuda_codegen
        from inductor_fusions import testing
        from tests.block_mm import support
        from tests.counterexamples import mutator
        from tests.fuzz import judge
        from tests.seed_systems import support as systems
        from tests.support import dynamo

        dynamo.spend_less()
        self.all_mutants, mutator.verify = mutator.verify, self.verify
        testing.check, testing.capture = self.check, self.capture
        testing.assert_fusions, testing.assert_close_to_eager = self.fusions, self.close
        testing.assert_counts = lambda *_, **__: None
        support.run = support.check = self.run
        judge.check_products = self.products
        for owner, name in ((compile_fx, "compile_fx"), (subprocess, "run")):
            setattr(owner, name, self.only_inside(getattr(owner, name)))
        torch.testing.assert_close = lambda *_, **__: None
        nothing = Anything()
        systems.launched = systems.written = cuda_codegen.generate = nothing

    def only_inside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What takes long, and where it is done beside the helpers is no program."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.inside:
                raise Stop
            return function(*args, **kwargs)

        return call

    def remember(self) -> None:
        """The package as it is, and what torch says of the device."""
        import torch

        for name, module in list(sys.modules.items()):
            if name.startswith(("inductor_fusions.fusions", "inductor_fusions.ops")):
                kinds = (types.FunctionType, type, frozenset, tuple, str, int, float)
                self.originals[module] = {k: v for k, v in vars(module).items() if isinstance(v, kinds)}
        told = {k: v for k, v in vars(torch.cuda).items() if isinstance(v, types.FunctionType)}
        self.originals[torch.cuda] = told

    @contextlib.contextmanager
    def unpatched(self) -> Iterator[None]:
        """Without what a test patches into the package to pretend that it is on a GPU."""
        undone = []
        for module, values in self.originals.items():
            for name, value in values.items():
                now = getattr(module, name, None)
                if now is not value:
                    undone.append((module, name, now))
                    setattr(module, name, value)
        try:
            yield
        finally:
            for module, name, now in undone:
                setattr(module, name, now)


def chosen(name: str, seed: int, device: str) -> tuple[Any, bool, bool]:
    """The dtype of a program for a seed, whether it is trained, and whether its products are padded: three
    seeds in a row have all dtypes, six all of dtype and mode, twelve all of the three."""
    import torch

    place = zlib.crc32(name.encode()) + seed
    padded = place // 6 % 2 == 0
    if device == "cpu":
        return torch.float32, place % 2 == 0, padded
    dtypes = torch.bfloat16, torch.float16, torch.float32
    return dtypes[place % 3], place % 2 == 0, padded
