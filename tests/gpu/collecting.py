"""A plugin of pytest that judges what tests check: `pytest -p tests.gpu.collecting`, by `tests.gpu.programs`.

The helpers that tests hand functions and inputs to (`testing.check`, `testing.capture` and those built on
them) judge the program on a device instead, as `judging` has it, and give back an object that agrees with
everything; asserts of the tests are left out when their files are read. So whatever a new test checks is a
program here, without being listed.

A program is named by its test and its number among those that the test checks. What a test's file makes by
factories of torch is on the device: a device is written into their calls.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
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

import pytest

from tests.gpu.reading import Anything, Finder

TASK = "PROGRAMS_TASK"  # environment variable: the file that says what this process does
ROOT = Path(__file__).resolve().parents[2]
#: What a test may do beside its programs, in seconds.
BESIDE = 12.0
#: Exit status of a process whose GPU is lost.
LOST = 77
#: Tests that check many programs are cut into as many parts.
PARTS = {"test_all_mutants": 48}
#: Of which a seed has every eighth.
EVERY = 8
#: Tests whose programs another one has too, or that have none and take long; those with an index out of
#: bounds, which stops the device in eager mode too; and one whose setting drops gradients.
WITHOUT = {
    "test_a_cell_that_is_none",
    "test_label_out_of_bounds",
    "test_label_out_of_bounds_of_log_probabilities",
    "test_returned_logits_without_gradients",
    "test_some_mutants",
    "test_numbers",
    "test_sharded",
    "test_other_strides_and_sizes",
}
#: Helpers that hand programs over; a file that calls none of them has no program.
HELPERS = "check(", "capture(", "unfused(", "through_flex(", "close_to_eager(", "assert_fusions(", "run("
#: Tests of the machinery itself, and those that patch the package or pretend to be on another machine.
WITHOUT_PROGRAMS = (
    "tests/bench/", "tests/caches/", "tests/cli/", "tests/docs/", "tests/harness/", "tests/package/",
    "tests/fuzz/test_", "tests/gpu/test_", "tests/models/test_survey", "tests/conftest",
    "tests/decisions/test_tables", "tests/report/test_explain", "tests/report/test_reporting",
    "tests/torch_features/test_distributed", "tests/torch_features/test_load",
)  # fmt: skip


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

        dtype, training = chosen(name, self.seed, self.device)
        self.write("begin", name=name, dtype=str(dtype).removeprefix("torch."), train=training and train)
        program = moving.Program(
            fn, tuple(args), dict(kwargs), options.get("dynamic"), options.get("reference")
        )
        default = torch.get_default_device()
        torch.set_default_device(None)
        started = time.monotonic()
        try:
            alone = self.only is not None
            verdict, moved = judging.judge(program, self.device, dtype, training and train, alone)
            if judging.broken() and not alone:
                text = f"nothing runs in its process any more: {verdict.problem[:300]}"
                self.write("lost", name=name, dtype=verdict.dtype, train=verdict.train, text=text)
                os._exit(LOST)
            if moved is not None and self.only is None:
                self.mix(moved, verdict.train)
        except Exception as error:
            if judging.fatal(error):
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
        """The package as it is."""
        for name, module in list(sys.modules.items()):
            if name.startswith(("inductor_fusions.fusions", "inductor_fusions.ops")):
                kinds = (types.FunctionType, type, frozenset, tuple, str, int, float)
                self.originals[module] = {k: v for k, v in vars(module).items() if isinstance(v, kinds)}

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


def chosen(name: str, seed: int, device: str) -> tuple[Any, bool]:
    """The dtype of a program for a seed, and whether it is trained: three seeds in a row have all dtypes,
    six all of both."""
    import torch

    place = zlib.crc32(name.encode()) + seed
    if device == "cpu":
        return torch.float32, place % 2 == 0
    dtypes = torch.bfloat16, torch.float16, torch.float32
    return dtypes[place % 3], place % 2 == 0


class Plugin:
    """Pytest's hooks."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        self.task = task
        self.recorder = Recorder(task)

    def pytest_configure(self, config: pytest.Config) -> None:
        """Install the recorder; what tests make of torch is on the device."""
        import torch

        torch.set_num_threads(1)
        if self.recorder.device != "cpu":
            torch.set_default_device(self.recorder.device)
        self.recorder.install()

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Files without programs."""
        if collection_path.suffix != ".py":
            return None
        if collection_path.is_relative_to(ROOT):
            if collection_path.relative_to(ROOT).as_posix().startswith(WITHOUT_PROGRAMS):
                return True
        text = collection_path.read_text()
        return None if any(helper in text for helper in HELPERS) else True

    def pytest_collect_file(self, file_path: Path, parent: Any) -> Any:
        """The drawn ones are in a file that has no name of tests."""
        if file_path.name != "drawn.py" or parent.session.isinitpath(file_path):
            return None
        return pytest.Module.from_parent(parent, path=file_path)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """This process's share, in parts where there is much, shuffled."""
        found = []
        for item in items:
            function = getattr(item, "function", None)
            if function is None or function.__name__ in WITHOUT:
                continue
            if "monkeypatch" in inspect.signature(function).parameters:
                continue
            # A file elsewhere has no name in there.
            name = f"{item.path}{item.nodeid}" if item.nodeid.startswith("::") else item.nodeid
            if any(f"[{other}" in name for other in ("cuda",)):
                continue
            parts = PARTS.get(function.__name__, 1)
            chosen_parts = range(self.recorder.seed % EVERY, parts, EVERY) if parts > 1 else (0,)
            for part in chosen_parts:
                found.append((f"{name} part {part}" if parts > 1 else name, item, part, parts))
        wanted, done = self.task.get("items"), set(self.task.get("done", ()))
        share, shares = self.task.get("share", 0), self.task.get("shares", 1)
        mine = [
            one for one in found
            if (one[0] in wanted if wanted is not None else zlib.crc32(one[0].encode()) % shares == share)
        ]  # fmt: skip
        left = [one for one in mine if f"{zlib.crc32(one[0].encode()):08x}" not in done]
        random.Random(f"{self.recorder.seed} {share}").shuffle(left)
        # Of three seeds in a row each begins with another third: little time has all programs once.
        left.sort(key=lambda one: (zlib.crc32(one[0].encode()[::-1]) - self.recorder.seed) % 3 != 0)
        self.recorder.write("collected", items=len(mine), left=len(left))
        items[:] = [self.renamed(*one) for one in left]

    def renamed(self, name: str, item: Any, part: int, parts: int) -> Any:
        """The test, or a test like it for a part of its programs."""
        if parts > 1:
            item = type(item).from_parent(
                item.parent, name=item.name, callspec=getattr(item, "callspec", None), callobj=item.obj,
                fixtureinfo=item._fixtureinfo, originalname=item.originalname,
            )  # fmt: skip
        item.programs_of = name, part, parts
        return item

    def pytest_collection_finish(self) -> None:
        """All is imported."""
        self.recorder.remember()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        """A row for each test."""
        recorder = self.recorder
        if time.time() > recorder.deadline:
            item.session.shouldstop = "the time is over"
            return (yield)
        recorder.item, recorder.part, recorder.parts = item.programs_of
        recorder.number, recorder.row = 0, {}
        recorder.seen.clear()
        found = yield
        if time.time() <= recorder.deadline:
            recorder.write("done", item=recorder.item, row=recorder.row)
        else:
            recorder.write("over", item=recorder.item)
        return found

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: Any) -> Iterator[None]:
        """Whatever a test says of the object that agrees with everything is no matter."""

        def stop(*_: Any) -> None:
            raise Stop

        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, BESIDE)
        try:
            return (yield)
        except Stop:
            self.recorder.count("cut", "other work")
        except pytest.skip.Exception:
            raise
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            self.recorder.count("cut", f"{type(error).__name__}: {str(error)[:60]}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return True


def _start() -> None:
    """In a process that has a task: before any of the tests' files is read."""
    path = os.environ.get(TASK)
    if path:
        task = json.loads(Path(path).read_text())
        sys.meta_path.insert(0, Finder(task["device"]))
        globals()["PLUGIN"] = Plugin(task)


_start()


def pytest_configure(config: pytest.Config) -> None:
    """Pytest's hook."""
    plugin = globals().get("PLUGIN")
    if plugin is not None:
        config.pluginmanager.register(plugin, "programs")  # whose own hook is called now
