"""Measure flex attention against stock and SDPA, for masks that are predicates and functions of the scores.

Each case is an attention written out as models write it, from q, k, v laid out [batch, length, heads,
head_dim]. It is compiled three times: by stock `torch.compile`, and with the attention fusion held to each
of its kernels (`INDUCTOR_FUSIONS_ATTENTION_KERNEL`), so that what is measured is what the fusion emits:

    unfused   stock
    sdpa      SDPA with the mask as a dense tensor (a sink as one more key); absent for a function of scores
    flex      flex attention, with its block mask computed in every call
    row_bias  cuDNN's causal kernel with one row of biases for all queries; where the mask is that

The tiles of flex attention (its `kernel_options`) are searched for each shape first: those of the forward in
inference, those of the backward in training. `options` of a row are the fastest, with which `flex` is
measured; `tiles_us` has what each of the others took.

Cases: the classes of `inductor_fusions/fusions/attention/structure.py`.

    causal+window    a sliding window
    causal+pad       a quarter of the keys is padding, at the end of each sample
    causal+document  sixteen documents
    tanh causal      a softcap; also with a window, and alone
    sink causal      a sink for each head; also with a window
    alibi causal     a bias of each head that is linear in the key, of the dtype of q; also with padding

A row has the form of those of `bench.tune_attention`, and goes into the table of a device with them:

    python -m bench.tune_flex --out bench/results/flex_h200.json --budget 500
    python -m bench.device_table bench/results/{attention,flex}_h200.json --name nvidia_h200
"""

from __future__ import annotations

import contextlib
import gc
import time
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from bench import tuning
from bench.common import (
    DTYPES,
    Json,
    error_limit,
    fresh_cache,
    interleave,
    is_fatal,
    one_line,
    peak_bytes,
    relative_error,
)
from bench.pool import FileLock

ROW_OF_BIASES = ("causal+pad", "alibi causal", "alibi causal+pad")
"""Masks that are causal, beside a bias that all queries share."""

REFERENCE_BYTES = 2**30
"""In training the float64 reference covers as many heads as keep the scores of a sample under this."""


@dataclass(frozen=True)
class Row:
    """One attention to measure; `window` is the number of keys that a query sees, 0 for all."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    dtype: str
    mask: str
    train: bool
    window: int = 0

    @property
    def key(self) -> str:
        """How `--only` and the progress name it."""
        kind = self.mask + (f" w{self.window}" if self.window else "")
        return (
            f"{self.dtype} {kind} "
            f"b{self.batch} h{self.heads}/{self.kv_heads} s{self.q_len} d{self.head_dim} "
            f"{'train' if self.train else 'infer'}"
        )


def row(
    batch: int, heads: int, kv_heads: int, length: int, dim: int, mask: str, window: int = 0
) -> list[Row]:
    """One shape in inference and in training."""
    return [
        Row(batch, heads, kv_heads, length, length, dim, "bfloat16", mask, train, window)
        for train in (False, True)
    ]


def cuda_rows() -> list[Row]:
    """The grid for a GPU, the most important rows first."""
    rows: list[Row] = []
    rows += row(2, 16, 8, 4096, 256, "tanh causal")  # Gemma-2
    rows += row(2, 64, 8, 4096, 64, "sink causal+window", 128)  # gpt-oss
    rows += row(2, 64, 8, 4096, 64, "sink causal")
    rows += row(1, 32, 8, 8192, 128, "causal+window", 1024)  # Mistral
    rows += row(4, 32, 8, 2048, 64, "causal+pad")  # Llama-1B
    rows += row(2, 32, 8, 8192, 64, "causal+pad")
    rows += row(1, 32, 8, 8192, 64, "causal+document")
    rows += row(4, 32, 8, 2048, 128, "causal+pad")
    rows += row(2, 16, 8, 4096, 256, "tanh causal+window", 2048)
    rows += row(1, 32, 8, 8192, 128, "causal+document")
    rows += row(2, 16, 8, 4096, 256, "causal+window", 1024)  # Gemma-3
    rows += row(4, 16, 8, 1024, 256, "tanh causal")
    rows += row(2, 64, 8, 1024, 64, "sink causal+window", 128)
    rows += row(2, 64, 8, 1024, 64, "sink causal")
    rows += row(2, 32, 16, 4096, 128, "tanh causal")
    rows += row(4, 32, 8, 2048, 128, "causal+window", 512)
    rows += row(4, 32, 8, 512, 64, "causal+pad")
    rows += row(4, 32, 8, 512, 128, "causal+pad")
    rows += row(4, 32, 8, 512, 128, "causal+document")
    rows += row(8, 16, 16, 512, 64, "tanh")
    rows += row(8, 16, 16, 1024, 64, "alibi causal+pad")  # BLOOM
    rows += row(8, 16, 16, 1024, 64, "alibi causal")
    rows += row(2, 32, 32, 2048, 128, "alibi causal+pad")
    rows += row(2, 32, 32, 2048, 128, "alibi causal")
    rows += row(1, 32, 8, 32768, 128, "causal+window", 1024)
    return rows


def cpu_rows() -> list[Row]:
    """The same axes, in sizes that take a second or two."""
    rows = [
        *row(1, 8, 4, 512, 64, "tanh causal"),
        *row(1, 8, 4, 256, 64, "tanh"),
        *row(1, 8, 8, 1024, 64, "tanh causal"),
        *row(1, 8, 8, 256, 64, "alibi causal+pad"),
    ]
    rows += [*row(1, 8, 4, 512, 64, "sink causal"), *row(1, 8, 4, 1024, 64, "causal+window", 128)]
    return [Row(**{**asdict(r), "dtype": d}) for r in rows for d in ("float32", "bfloat16") if not r.train]


# One attention ----------------------------------------------------------------------------------------


def visible(row: Row, data: torch.Tensor) -> torch.Tensor | None:
    """Which keys are seen, (batch or 1, 1, q_len, kv_len); `data` holds padding or document numbers."""
    i = torch.arange(row.q_len, device=data.device)[:, None]
    j = torch.arange(row.kv_len, device=data.device)[None, :]
    seen = None
    if "causal" in row.mask:
        seen = (j <= i)[None, None]
    if "window" in row.mask:
        seen = seen & (j > i - row.window)  # type: ignore[operator]
    if "pad" in row.mask:
        seen = seen & (data != 0)[:, None, None, :]  # type: ignore[operator]
    if "document" in row.mask:
        seen = seen & (data[:, None, :, None] == data[:, None, None, :])  # type: ignore[operator]
    return seen


def alibi(row: Row, data: torch.Tensor) -> torch.Tensor:
    """The bias of each head and key, (batch or 1, heads, 1, kv_len), rounded as models keep it."""
    base = torch.tensor(2.0**-0.5, device=data.device)
    slopes = torch.pow(base, torch.arange(1, row.heads + 1, device=data.device))
    places = torch.arange(row.kv_len, device=data.device)
    if "pad" in row.mask:
        places = ((data.cumsum(-1) - 1) * data)[:, None, None]
    return (slopes[:, None, None] * places).to(DTYPES[row.dtype])


def attention(row: Row) -> Callable[..., torch.Tensor]:
    """The attention of a row, (q, k, v, data, sinks) -> [batch, length, heads * head_dim]."""
    scale, groups = row.head_dim**-0.5, row.heads // row.kv_heads

    def fn(q, k, v, data, sinks):  # type: ignore[no-untyped-def]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        seen = visible(row, data)
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        scores = (q @ k.transpose(2, 3)) * scale
        if "tanh" in row.mask:
            scores = torch.tanh(scores / 50.0) * 50.0
        if "alibi" in row.mask:
            scores = scores + alibi(row, data).to(q.dtype)
        if seen is not None:
            lowest = max(torch.finfo(q.dtype).min, torch.finfo(torch.float32).min)
            scores = scores + torch.where(seen, 0.0, lowest).to(q.dtype)
        if "sink" in row.mask:
            column = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
            scores = torch.cat([scores, column], -1)
            scores = scores - scores.max(-1, keepdim=True).values
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        weights = weights[..., :-1] if "sink" in row.mask else weights
        return (weights @ v).transpose(1, 2).flatten(2)

    return fn


def inputs_of(row: Row, device: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The arguments of a row's attention, and a cotangent."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(DTYPES[row.dtype])

    q = normal(row.batch, row.q_len, row.heads, row.head_dim)
    k, v = (normal(row.batch, row.kv_len, row.kv_heads, row.head_dim) for _ in range(2))
    sinks = normal(row.heads)
    positions = torch.arange(row.kv_len, device=device).expand(row.batch, -1)
    data = positions * 16 // row.kv_len
    if "pad" in row.mask:
        lengths = torch.linspace(row.kv_len / 2, row.kv_len, row.batch, device=device).long()
        data = (positions < lengths[:, None]).long()
    if row.train:
        for leaf in (q, k, v, sinks):
            leaf.requires_grad_()
    return [q, k, v, data.contiguous(), sinks], normal(row.batch, row.q_len, row.heads * row.head_dim)


def run(
    row: Row, fn: Callable[..., torch.Tensor], inputs: list[torch.Tensor], cotangent: torch.Tensor
) -> list[torch.Tensor]:
    """The output, and the gradients in training."""
    out = fn(*inputs)
    leaves = [x for x in inputs if x.requires_grad]
    if not row.train:
        return [out]
    grads = torch.autograd.grad(out, leaves, cotangent, allow_unused=True)
    return [out.detach(), *(g for g in grads if g is not None)]


Found = list[torch.Tensor]


def reference(row: Row, inputs: Found, cotangent: torch.Tensor) -> Callable[[Found], float]:
    """Worst relative error against float64, of the first sample and the heads that share the first keys.

    A sink's gradient sums over the batch, so it is left to the tests.
    """
    groups = row.heads // row.kv_heads
    if row.train:  # gradients of keys need every query
        groups = max(1, min(groups, REFERENCE_BYTES // (8 * row.kv_len * row.q_len)))
    small = Row(**{**asdict(row), "batch": 1, "heads": groups, "kv_heads": 1})
    q, k, v, data, sinks = (x.detach() for x in inputs)
    wide = [
        q[:1, :, :groups].double(),
        k[:1, :, :1].double(),
        v[:1, :, :1].double(),
        data[:1],
        sinks[:groups].double(),
    ]
    if row.train:
        for leaf in (wide[0], wide[1], wide[2]):
            leaf.requires_grad_()
    dim = row.head_dim
    exact = run(small, _in_double(small), wide, cotangent[:1, :, : groups * dim].double())
    whole = groups == row.heads // row.kv_heads

    def worst(found: Found) -> float:
        pairs = [(found[0][:1, :, : groups * dim], exact[0])]
        if row.train:
            pairs.append((found[1][:1, :, :groups], exact[1]))
        if row.train and whole:
            pairs += [(found[i][:1, :, :1], exact[i]) for i in (2, 3)]
        return max(relative_error(x, y) for x, y in pairs)

    return worst


def _in_double(row: Row) -> Callable[..., torch.Tensor]:
    written_out = attention(row)

    def fn(*inputs: torch.Tensor) -> torch.Tensor:
        with _float64_softmax():
            return written_out(*inputs)

    return fn


@contextlib.contextmanager
def _float64_softmax() -> Iterator[None]:
    """The reference has no cast to float32."""
    softmax = F.softmax
    F.softmax = lambda x, dim, dtype=None: softmax(x, dim)  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        F.softmax = softmax


# Tiles --------------------------------------------------------------------------------------------------

Options = dict[str, Any]

#: By head dim: rows and columns of a tile, warps, stages. Inductor's own come on top.
FORWARD_TILES: dict[int, list[tuple[int, ...]]] = {
    64: [(128, 64, 4, 3), (64, 64, 4, 3)],
    128: [(64, 64, 4, 3), (128, 128, 8, 3)],
    256: [(128, 64, 8, 2)],
}
#: Rows and columns of the tiles for keys and values, columns and rows of those for queries, warps, stages.
BACKWARD_TILES: dict[int, list[tuple[int, ...]]] = {
    64: [(64, 64, 64, 64, 4, 2)],
    128: [(32, 64, 64, 32, 4, 3), (64, 64, 64, 64, 4, 2)],
    256: [(64, 64, 64, 64, 8, 2)],
}


#: Queries of a chunk, where the backward is made of products of the library.
CHUNKS = (1024, 2048)


def _may_chunk(row: Row) -> bool:
    """Whether `fusions.flex_backward` is worth a try: wide heads, and a mask that is no data."""
    return row.head_dim >= 256 and not {"pad", "document"} & set(row.mask.replace("+", " ").split())


def visible_share(row: Row, data: torch.Tensor) -> float:
    """The share of tiles, of a sixteenth of the lengths, of which something is visible."""
    seen = visible(row, data)
    if seen is None:
        return 1.0
    parts = F.adaptive_max_pool2d(seen[:1].float(), 16)
    return round(float(parts.mean()), 4)


def tiles(row: Row) -> list[Options]:
    """Kernel options to try: sizes of the tile, warps and stages.

    On the forward in inference; on the backward in training, whose forward takes what inference found.
    """
    names: tuple[str, ...]
    if row.train:
        names = ("M1", "N1", "M2", "N2", "num_warps", "num_stages")
        sizes = BACKWARD_TILES.get(row.head_dim, [])
        chunks = [{"gemm_backward": n} for n in CHUNKS if _may_chunk(row) and n <= row.q_len]
        return chunks + [
            {f"bwd_{'BLOCK_' * (len(n) == 2)}{n}": x for n, x in zip(names, t, strict=True)} for t in sizes
        ]
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
    sizes = FORWARD_TILES.get(row.head_dim, [])
    return [{f"fwd_{n}": x for n, x in zip(names, t, strict=True)} for t in sizes]


# Measuring ----------------------------------------------------------------------------------------------


def candidates(row: Row, device: str, found: Options) -> dict[str, Json]:
    """Settings of the package, and options of flex attention, under which a row is compiled."""
    named: dict[str, Json] = {"unfused": {"settings": {"enabled": False}}}
    if "tanh" not in row.mask:
        named["sdpa"] = {"settings": {"policy": "always", "attention_kernel": "sdpa"}}
    flex: Json = {"policy": "always", "attention_kernel": "flex"}
    named["flex"] = {"settings": flex, "options": found}
    if device == "cuda" and row.mask in ROW_OF_BIASES:
        named["row_bias"] = {"settings": {"policy": "always", "attention_kernel": "row_bias"}}
    if device == "cuda":
        for options in tiles(row):
            sizes = "x".join(str(x) for x in options.values())
            named[f"flex {sizes}"] = {"settings": flex, "options": {**found, **options}}
    return named


def measure(row: Row, device: str, quick: bool, lock: AbstractContextManager[Any], found: Options) -> Json:
    """Compile, check and time every candidate of a row; `found` are options that are settled."""
    result: Json = {
        name: {} for name in ("times_us", "spread", "peak_mib", "error", "kernels", "wrong", "skipped")
    }
    inputs, cotangent = inputs_of(row, device)
    result["visible"] = visible_share(row, inputs[3])
    calls: dict[str, Callable[[], object]] = {}
    start = time.monotonic()
    torch._dynamo.reset()
    tried = candidates(row, device, found)
    compiled: dict[str, Callable[..., torch.Tensor]] = {}
    for name, how in tried.items():
        fn = torch.compile(_named(attention(row), name.replace(" ", "_")), dynamic=False)
        try:
            kernels = _compile(row, fn, inputs, cotangent, how)
        except Exception as error:
            if is_fatal(error):
                raise RuntimeError(f"{name}: {error}") from error
            result["skipped"][name] = _why(error)
            continue
        if isinstance(kernels, str):
            result["skipped"][name] = kernels
            continue
        result["kernels"][name], compiled[name] = kernels, fn
    result["compile_s"] = round(time.monotonic() - start, 2)
    with lock:
        worst = reference(row, inputs, cotangent)
        for name, fn in compiled.items():
            try:
                result["error"][name] = worst(run(row, fn, inputs, cotangent))
                call = _call(row, fn, inputs, cotangent)
                peak = peak_bytes(call, device)
                if peak is not None:
                    result["peak_mib"][name] = round(peak / 2**20, 1)
                calls[name] = call
            except Exception as error:
                if is_fatal(error):
                    raise RuntimeError(f"{name}: {error}") from error
                result["skipped"][name] = _why(error)
        limit = error_limit(result["error"].get("unfused"), DTYPES[row.dtype])
        for name in [n for n in calls if n != "unfused" and not result["error"][n] <= limit]:
            result["wrong"][name] = f"error {result['error'][name]:.2e}, allowed {limit:.2e}"
        _time(calls, device, result, tried, quick)
    calls.clear()
    del compiled
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return result


def _compile(
    row: Row,
    fn: Callable[..., torch.Tensor],
    inputs: list[torch.Tensor],
    cotangent: torch.Tensor,
    how: Json,
) -> list[str] | str:
    """Compile under settings; the kernels that were chosen, or why there is none."""
    from inductor_fusions import config, reporting, tables

    options = how.get("options", {})

    def chosen(**_: Any) -> Options:
        return {name: value for name, value in options.items() if name != "gemm_backward"}

    with (
        fresh_cache(),
        config.patch(how["settings"]),
        reporting.isolated() as seen,
        mock.patch.object(tables, "flex_options", chosen),
        mock.patch.object(tables, "flex_backward", lambda **_: options.get("gemm_backward", 0)),
    ):
        run(row, fn, inputs, cotangent)
    wanted = how["settings"].get("attention_kernel")
    kernels = [site.kernel for site in seen if site.verdict == "fused"]
    if wanted and not any(kernel.startswith(wanted) for kernel in kernels):
        return "; ".join(site.reason for site in seen) or "no candidate was seen"
    return kernels or ["stock"]


def _time(
    calls: dict[str, Callable[[], object]], device: str, result: Json, tried: dict[str, Json], quick: bool
) -> None:
    """Find the fastest tiles in a first look, then time stock, SDPA and flex attention with these."""
    rounds, block = (3, 1e-3) if quick else (12, 4e-3 if device == "cuda" else 3e-2)
    tiled = [n for n in calls if n.startswith("flex") and n not in result["wrong"]]
    look = interleave({n: calls[n] for n in tiled}, device, 3, block) if len(tiled) > 1 else {}
    result["tiles_us"] = {n: round(t.median * 1e6, 2) for n, t in look.items()}
    best = min(look, key=lambda n: look[n].median, default="flex")
    result["options"] = dict(tried[best].get("options", {}))
    result["gemm_backward"] = result["options"].pop("gemm_backward", 0)
    for name in [n for n in calls if n.startswith("flex")]:
        if name != best:
            calls.pop(name)
    if best != "flex" and best in calls:
        calls["flex"] = calls.pop(best)
        for values in (result["error"], result["peak_mib"], result["kernels"]):
            if best in values:
                values["flex"] = values[best]
    for values in (result["error"], result["peak_mib"], result["kernels"], result["wrong"]):
        for name in [n for n in values if n.startswith("flex ")]:
            del values[name]
    for name, timing in interleave(calls, device, rounds, block).items() if calls else ():
        result["times_us"][name] = round(timing.median * 1e6, 2)
        result["spread"][name] = round(timing.spread, 4)


def _why(error: Exception) -> str:
    return "out of memory" if isinstance(error, torch.OutOfMemoryError) else one_line(error)


def work(task: tuple[list[Row], str, bool], lock: Path) -> tuple[list[Json], bool]:
    """In a worker: the rows of one shape, inference before training."""
    rows, device, quick = task
    if device == "cuda":
        import torch._inductor.config as inductor

        inductor.compile_threads = 1  # the workers are parallel as it is
    found: list[Json] = []
    options: Options = {}
    for each in rows:
        try:
            result = measure(each, device, quick, FileLock(lock), options)
        except Exception as error:
            return [*found, {"key": each.key, "failed": _why(error)}], not is_fatal(error)
        options = {**options, **result["options"]}
        found.append({"key": each.key, **asdict(each), **result})
    return found, True


def _named(fn: Callable[..., torch.Tensor], name: str) -> Callable[..., torch.Tensor]:
    """A copy with code of its own: Dynamo keeps what it compiled by code object."""
    assert isinstance(fn, types.FunctionType)
    code = fn.__code__.replace(co_name=name)
    return types.FunctionType(code, fn.__globals__, name, fn.__defaults__, fn.__closure__)


def _call(
    row: Row, fn: Callable[..., torch.Tensor], inputs: list[torch.Tensor], cotangent: torch.Tensor
) -> Callable[[], object]:
    return lambda: run(row, fn, inputs, cotangent)


def describe(result: Json) -> str:
    """A row's outcome in a few words."""
    times = result["times_us"]
    text = " ".join(f"{name} {value:.0f}" for name, value in sorted(times.items(), key=lambda x: x[1]))
    for what in ("wrong", "skipped"):
        text += "".join(f" {what}: {name} ({why})" for name, why in result[what].items())
    return text


def main() -> None:
    """The command line."""
    options = tuning.parser("bench.tune_flex", __doc__).parse_args()
    rows = tuning.select(cuda_rows() if options.device == "cuda" else cpu_rows(), options)
    shapes: dict[str, list[Row]] = {}
    for each in rows:
        shapes.setdefault(each.key.rsplit(" ", 1)[0], []).append(each)
    _, failed = tuning.measure(
        "bench.tune_flex",
        options,
        list(shapes.values()),
        work,
        lambda group: (list(group), options.device, options.quick),
        describe,
        jobs=tuning.processes(options, 5 / 8),
        seconds=10.0,
    )
    tuning.end(failed)


if __name__ == "__main__":
    main()
