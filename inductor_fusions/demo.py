"""The demonstration: four whole models, stock and fused `torch.compile` side by side.

Every model has a real configuration (`configs/models`) and random weights. Stock and fused are compiled
from the same module in the same process; their steps are timed in turns, and the outputs and gradients of
both are compared with a float64 run of an eager copy, over a slice of the batch.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from . import _inductor, config, reporting, tables

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

#: An error may be this many times that of stock, plus eps of the dtype.
ERROR_FACTOR = 1.5
#: The float64 run of a causal model takes this many tokens: they do not depend on later ones.
REFERENCE_TOKENS = 1024
#: Blocks of each that are timed.
FEWEST_ROUNDS, MOST_ROUNDS = 5, 25
#: Free memory from which on a GPU gets the models in full size.
FULL_SIZE_BYTES = 60 * 2**30

# Dynamo shares compiled code between equal backends, and backends are equal if their options are. So
# stock's differ: they empty the hooks that the fusions are installed in, beside the toggle.
_STOCK_OPTIONS: dict[str, Any] = dict.fromkeys(_inductor.HOOKS.values())


# -- the four models ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One model under one load.

    Attributes:
        title: how the table names it.
        model: file in configs/models.
        architecture: class in transformers.
        attn: "eager" or "sdpa".
        batch, seq: size of the input.
        sites: the number of attentions in a configuration.
        overrides: values of the configuration that differ from the file's.
        padded: whether the input comes with a padding mask.
        train: whether a step is forward and backward.
        causal: whether a token depends on earlier ones alone.
    """

    title: str
    model: str
    architecture: str
    attn: str
    batch: int
    seq: int
    sites: Callable[[Any], int]
    overrides: Mapping[str, Any] = field(default_factory=dict)
    padded: bool = False
    train: bool = False
    causal: bool = False


def _one_a_layer(config: Any) -> int:
    return int(config.num_hidden_layers)


def _encoder_and_decoder(config: Any) -> int:
    """One in each layer of the encoder; in each of the decoder, one on itself and one on the encoder."""
    return int(config.num_layers + 2 * config.num_decoder_layers)


_BERT = Case(
    "BERT-base, eager, padded", "bert-base", "BertModel", "eager", 32, 512, _one_a_layer, padded=True
)
_LLAMA = Case("Llama, sdpa, no mask", "llama-1b", "LlamaModel", "sdpa", 1, 8192, _one_a_layer, causal=True)
_T5 = Case("T5-base, eager", "t5-base-encoder", "T5Model", "eager", 16, 512, _encoder_and_decoder)

# Llama-3.2-1B with everything divided by four, but the head dim and the number of layers.
_LLAMA_QUARTER = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 32064,
    "num_hidden_layers": 2,
}
_TINY_VOCABULARY = {"vocab_size": 1000, "bos_token_id": 1, "eos_token_id": 2}
_TINY_T5 = {"d_model": 64, "d_kv": 32, "d_ff": 128, "num_heads": 2, "num_layers": 1, "num_decoder_layers": 1}
_TINY = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 2}


def cases(size: str) -> list[Case]:
    """The four models in one of three sizes.

    Args:
        size: "full" for a large GPU; "small": fewer layers and tokens, for a few CPU cores; "tiny", to try.
    """
    if size == "full":
        return [_BERT, _LLAMA, replace(_LLAMA, title="Llama, training step", train=True), _T5]
    if size == "small":
        bert = replace(_BERT, batch=2, seq=512, overrides={"num_hidden_layers": 3})
        llama = replace(_LLAMA, seq=2048, overrides={**_LLAMA_QUARTER, **_ids_below(32064)})
        t5 = replace(_T5, batch=1, seq=512, overrides={"num_layers": 2, "num_decoder_layers": 2})
        train = replace(llama, title="Llama, training step", seq=1024, train=True)
    else:
        bert = replace(_BERT, batch=2, seq=64, overrides={**_TINY, "vocab_size": 1000})
        tiny_llama = {**_TINY, "num_key_value_heads": 1, "head_dim": 32, **_TINY_VOCABULARY}
        llama = replace(_LLAMA, seq=64, overrides=tiny_llama)
        t5 = replace(_T5, batch=2, seq=48, overrides={**_TINY_T5, "vocab_size": 1000})
        train = replace(llama, title="Llama, training step", train=True)
    return [bert, llama, train, t5]


def _ids_below(vocabulary: int) -> dict[str, int]:
    return {"bos_token_id": vocabulary - 2, "eos_token_id": vocabulary - 1}


def build(case: Case, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """The model with random weights, and with every dropout at 0."""
    import transformers

    file = tables.folder() / "models" / f"{case.model}.json"
    values: dict[str, Any] = {**json.loads(file.read_text("utf-8")), **case.overrides}
    values |= {name: 0.0 for name, value in values.items() if "drop" in name and isinstance(value, float)}
    del values["architectures"]
    model_config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(0)
    with torch.device(device):
        made = getattr(transformers, case.architecture)._from_config(
            model_config, attn_implementation=case.attn, dtype=dtype
        )
    model: torch.nn.Module = made.train(case.train)
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases start at 0 and norms at 1, where a mistake in one would not show.
            if parameter.dim() == 1:
                parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def make_inputs(case: Case, vocabulary: int, device: torch.device) -> dict[str, Any]:
    """Keyword arguments of the model's forward."""
    generator = torch.Generator(device).manual_seed(1)

    def tokens(length: int) -> torch.Tensor:
        shape = (case.batch, length)
        return torch.randint(3, vocabulary, shape, generator=generator, device=device)

    inputs: dict[str, Any] = {"input_ids": tokens(case.seq)}
    if case.architecture == "T5Model":
        inputs["decoder_input_ids"] = tokens(case.seq)
    if case.padded:
        lengths = torch.linspace(case.seq // 2, case.seq, case.batch, device=device).long()
        inputs["attention_mask"] = (torch.arange(case.seq, device=device) < lengths[:, None]).long()
    if case.architecture != "BertModel":
        inputs["use_cache"] = False
    return inputs


# -- errors ---------------------------------------------------------------------------------------


class _KeepFloat64(TorchFunctionMode):
    """Leaves out the casts of a float64 tensor to float32 that models spell out, in norms and softmax."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            kwargs = {k: torch.float64 if a is torch.float32 else a for k, a in kwargs.items()}
        return func(*args, **kwargs)


@dataclass
class Reference:
    """Output of the first sample, and each parameter's gradient, in float64."""

    output: torch.Tensor
    gradients: dict[str, torch.Tensor]

    def errors(self, output: torch.Tensor, gradients: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Relative error of an output, and in training of the worst gradient."""
        samples, tokens = self.output.shape[:2]
        found = {"output": relative_error(output[:samples, :tokens], self.output)}
        if self.gradients:
            each = [relative_error(gradients[name], g) for name, g in self.gradients.items() if g.any()]
            found["gradient"] = max(each, key=lambda e: (e != e, e))  # NaN is the worst
        return found


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """||value - reference|| / ||reference||, in float64."""
    return float((value.double() - reference).norm() / reference.norm())


def within_budget(fused: Mapping[str, float], stock: Mapping[str, float], dtype: torch.dtype) -> bool:
    """Whether each error is at most 1.5 times that of stock, plus eps of the dtype."""
    eps = torch.finfo(dtype).eps
    return all(fused[name] <= ERROR_FACTOR * stock[name] + eps for name in stock)


def run_reference(case: Case, model: torch.nn.Module, inputs: dict[str, Any], cotangent: Any) -> Reference:
    """Run an eager copy of the model in float64 on the first sample."""
    twin: Any = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    for parameter in twin.parameters():  # buffers stay: rotary frequencies are float32 by definition
        parameter.data = parameter.data.double()
    tokens = reference_tokens(case)
    inputs = {k: x[:1, :tokens] if isinstance(x, torch.Tensor) else x for k, x in inputs.items()}
    with torch.set_grad_enabled(case.train), _KeepFloat64():
        output = twin(**inputs).last_hidden_state
    if case.train:
        output.backward(cotangent[:1, :tokens].double())
    gradients = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}
    return Reference(output.detach(), gradients)


def reference_tokens(case: Case) -> int:
    """How many tokens of the first sample the float64 run takes."""
    return min(case.seq, REFERENCE_TOKENS) if case.causal else case.seq


# -- one case -------------------------------------------------------------------------------------


@dataclass
class Row:
    """What came of one model; the fields of the JSON report.

    Attributes:
        sites: attentions in the model, by its configuration.
        fused: of those, the fused ones, by `inductor_fusions.report()`.
        left: of those, the ones that no fused kernel is measured to be faster for on this device.
        errors, stock_errors: relative errors against float64: "output", and in training "gradient",
            the worst parameter's.
        verdict: "ok" and what was left to stock, or what is wrong.
        missed: why the others were not fused: reason -> number of sites.
    """

    model: str
    layers: int
    batch: int
    seq: int
    train: bool
    sites: int
    fused: int = 0
    left: int = 0
    stock_ms: float = 0.0
    fused_ms: float = 0.0
    ratio: float = 0.0
    errors: dict[str, float] = field(default_factory=dict)
    stock_errors: dict[str, float] = field(default_factory=dict)
    stock_compile_s: float = 0.0
    fused_compile_s: float = 0.0
    kernels: list[str] = field(default_factory=list)
    missed: dict[str, int] = field(default_factory=dict)
    verdict: str = "ok"

    @property
    def ok(self) -> bool:
        """Whether every site that should fuse did, and the errors are within their budget."""
        return self.verdict.partition(",")[0] == "ok"


#: Phases of a case, as the progress bar counts them.
PHASES = ("building", "compiling stock", "compiling fused", "running in float64", "timing")


class Runner:
    """Measures one case.

    Args:
        case: which.
        device: where.
        dtype: of weights and activations.
        seconds: how long to time.
        say: called with the name of each phase as it begins.
    """

    def __init__(
        self,
        case: Case,
        device: torch.device,
        dtype: torch.dtype,
        seconds: float,
        say: Callable[[str], None],
    ) -> None:
        self.case, self.device, self.dtype, self.seconds, self.say = case, device, dtype, seconds, say
        say(PHASES[0])
        self.model = build(case, device, dtype)
        found: Any = self.model.config
        self.config = found
        self.inputs = make_inputs(case, self.config.vocab_size, device)
        self.cotangent = self._cotangent() if case.train else None
        layers = self.config.num_hidden_layers
        self.row = Row(case.title, layers, case.batch, case.seq, case.train, case.sites(self.config))

    def run(self) -> Row:
        """Compile both, compare and time them."""
        row = self.row
        toggles: Any = config  # install_config_module() gives it methods that mypy does not see
        stock: Any = torch.compile(self.model, dynamic=False, options=_STOCK_OPTIONS)
        fused: Any = torch.compile(self.model, dynamic=False)
        with _inductor.fresh_compile():
            self.say(PHASES[1])
            with toggles.patch(enabled=False):
                row.stock_compile_s, stock_output, stock_gradients = self._first(stock)
            self.say(PHASES[2])
            reporting.clear()
            row.fused_compile_s, output, gradients = self._first(fused)
            self._count_sites()
            self.say(PHASES[3])
            reference = run_reference(self.case, self.model, self.inputs, self.cotangent)
            row.stock_errors = reference.errors(stock_output, stock_gradients)
            row.errors = reference.errors(output, gradients)
            del reference, stock_output, stock_gradients, output, gradients
            self.say(PHASES[4])
            times = interleave(
                [lambda: self.step(stock), lambda: self.step(fused)], self.device, self.seconds
            )
            row.stock_ms, row.fused_ms = (1e3 * t for t in times)
            row.ratio = row.stock_ms / row.fused_ms
        if row.fused + row.left < row.sites:
            row.verdict = f"{row.sites - row.fused - row.left} not fused"
        elif not within_budget(row.errors, row.stock_errors, self.dtype):
            row.verdict = "error over budget"
        elif row.left:
            row.verdict = f"ok, {row.left} left to stock"
        return row

    def step(self, compiled: Callable[..., Any]) -> torch.Tensor:
        """One inference, or one training step without an optimizer; the last hidden state."""
        if self.case.train:
            self.model.zero_grad(set_to_none=True)
        with torch.set_grad_enabled(self.case.train):
            output: torch.Tensor = compiled(**self.inputs).last_hidden_state
        if self.case.train:
            output.backward(self.cotangent)
        return output.detach()

    def _first(self, compiled: Callable[..., Any]) -> tuple[float, torch.Tensor, dict[str, torch.Tensor]]:
        """Compile and run one step: seconds, output and gradients."""
        start = time.perf_counter()
        output = self.step(compiled)
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        synchronize(self.device)
        self.model.zero_grad(set_to_none=True)
        return time.perf_counter() - start, output, gradients

    def _cotangent(self) -> torch.Tensor:
        """A random gradient of the output, zero beyond the slice that the float64 run takes."""
        shape = (self.case.batch, self.case.seq, self.config.hidden_size)
        generator = torch.Generator(self.device).manual_seed(2)
        values = torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)
        values[1:] = 0
        values[:, reference_tokens(self.case) :] = 0
        return values

    def _count_sites(self) -> None:
        found = [site for site in reporting.report() if site.fusion == "attention"]
        fused = [site for site in found if site.verdict == "fused"]
        # The hint says that it is the policy, and so a measurement, that keeps a site from being fused.
        left = [s for s in found if s.verdict == "left to stock" and "INDUCTOR_FUSIONS_POLICY" in s.hint]
        self.row.fused, self.row.left = len(fused), len(left)
        self.row.kernels = sorted({site.kernel for site in fused})
        self.row.missed = dict(Counter(site.reason for site in found if site.verdict != "fused"))


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleave(steps: Sequence[Callable[[], object]], device: torch.device, seconds: float) -> list[float]:
    """Median seconds of each step: one block of each in turn, so that what slows the machine hits all."""

    def block(step: Callable[[], object], count: int) -> float:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(count):
            step()
        synchronize(device)
        return (time.perf_counter() - start) / count

    count = max(1, min(10, round(0.02 / min(block(step, 1) for step in steps))))
    samples: list[list[float]] = [[] for _ in steps]
    order = list(range(len(steps)))
    start = time.perf_counter()
    for rounds in range(MOST_ROUNDS):
        if rounds >= FEWEST_ROUNDS and time.perf_counter() - start > seconds:
            break
        for i in order:
            samples[i].append(block(steps[i], count))
        order.reverse()
    return [statistics.median(values) for values in samples]


# -- all of them ----------------------------------------------------------------------------------


@dataclass
class Result:
    """The rows of a run, and where it ran."""

    device: str
    dtype: str
    seconds: float
    rows: list[Row]

    @property
    def ok(self) -> bool:
        """Whether every row is."""
        return all(row.ok for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: {"schema": 1, "ok": ..., "rows": [...]} with device and versions."""
        versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
        for package in ("triton", "transformers", "inductor_fusions"):
            with contextlib.suppress(metadata.PackageNotFoundError):
                versions[package] = metadata.version(package)
        return {"schema": 1, "ok": self.ok, "versions": versions, **asdict(self)}


def run(device: torch.device, quick: bool = False, only: str = "", console: Console | None = None) -> Result:
    """Run the demonstration.

    Args:
        device: where. A large GPU takes the models in full size and bfloat16.
        quick: tiny models, to see whether it works.
        only: only the models whose title contains this.
        console: where the progress bar and a line for each model go.
    """
    start = time.perf_counter()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    large = device.type == "cuda" and torch.cuda.mem_get_info(device)[0] >= FULL_SIZE_BYTES
    chosen = cases("tiny" if quick else "full" if large else "small")
    chosen = [case for case in chosen if only.lower() in case.title.lower()]
    rows = []
    with _quiet(), _progress(console) as bar:
        task = bar.add_task("", total=len(chosen) * len(PHASES))
        for i, case in enumerate(chosen):

            def say(phase: str, i: int = i, title: str = case.title) -> None:
                done = i * len(PHASES) + PHASES.index(phase)
                bar.update(task, completed=done, description=f"{title}: {phase}")

            row = _one(case, device, dtype, 0.5 if quick else 6.0, say)
            rows.append(row)
            if console is not None:
                bar.console.print(f"{row.model}: {_in_a_line(row)}", markup=False, highlight=False)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        bar.update(task, completed=len(chosen) * len(PHASES), description="done")
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    seconds = round(time.perf_counter() - start, 1)
    return Result(name, str(dtype).removeprefix("torch."), seconds, rows)


def _one(
    case: Case, device: torch.device, dtype: torch.dtype, seconds: float, say: Callable[[str], None]
) -> Row:
    """The row of a case, also where it fails."""
    runner: Runner | None = None
    try:
        runner = Runner(case, device, dtype, seconds, say)
        return runner.run()
    except Exception as error:
        row = runner.row if runner is not None else Row(case.title, 0, case.batch, case.seq, case.train, 0)
        row.verdict = f"failed: {type(error).__name__}: {' '.join(str(error).split())}"[:300]
        return row


def _in_a_line(row: Row) -> str:
    if row.verdict.startswith("failed"):
        return row.verdict
    return f"{row.fused} of {row.sites} fused, {row.stock_ms:.1f} ms -> {row.fused_ms:.1f} ms, {row.verdict}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of torch and transformers that say nothing here."""
    import warnings

    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.")
        try:
            yield
        finally:
            logging.set_verbosity(before)


def _progress(console: Console | None) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    hidden = console is None or not console.is_terminal
    return Progress(*columns, console=console, transient=True, disable=hidden)


def show(result: Result, console: Console) -> None:
    """Print the table, and why a site was missed."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    caption = (
        f"{result.device}, {result.dtype}, torch {torch.__version__}; medians of interleaved steps; error: "
        f"against float64, at most {ERROR_FACTOR} times stock's; {result.seconds:.0f} s in all"
    )
    table = Table(title="torch.compile, stock and fused", caption=caption, box=SIMPLE_HEAD, padding=0)
    table.add_column("model", overflow="fold")
    for name in ("attention\nsites", "fused", "stock\nms", "fused\nms", "ratio", "error", "stock's\nerror"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict")
    for row in result.rows:
        model = f"{row.model}\n[dim]{row.layers} layers, b{row.batch} s{row.seq}"
        if row.verdict.startswith("failed"):
            table.add_row(model, str(row.sites), *["-"] * 6, "[red]failed")
            continue
        errors = [f"{max(found.values()):.1e}" for found in (row.errors, row.stock_errors)]
        times = [f"{row.stock_ms:.1f}", f"{row.fused_ms:.1f}", f"{row.ratio:.2f}x"]
        verdict = f"[green]{row.verdict}" if row.ok else f"[red]{row.verdict}"
        table.add_row(model, str(row.sites), str(row.fused), *times, *errors, verdict)
    console.print(table)
    for row in result.rows:
        if row.verdict.startswith("failed"):
            console.print(f"{row.model}: {row.verdict}", markup=False)
        for reason, count in row.missed.items():
            console.print(f"{row.model}: {count} left as they are: {reason}", markup=False)
