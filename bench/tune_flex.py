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

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from bench import tuning
from bench.common import (
    DTYPES,
    Json,
    apart,
    collect,
    error_limit,
    fresh_cache,
    interleave,
    is_fatal,
    one_line,
    peak_bytes,
    skipping,
)
from bench.flex_cases import Row, attention, cpu_rows, cuda_rows, inputs_of, reference, run
from bench.pool import FileLock
from inductor_fusions.worker.attention import visible

ROW_OF_BIASES = ("causal+pad", "alibi causal", "alibi causal+pad")
"""Masks that are causal, beside a bias that all queries share."""


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
    """Whether `fusions.attention.flex_backward` is worth a try: wide heads, and a mask that is no data."""
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
        fn = torch.compile(apart(attention(row), name.replace(" ", "_")), dynamic=False)
        with skipping(result["skipped"], name):
            kernels = _compile(row, fn, inputs, cotangent, how)
            if isinstance(kernels, str):
                result["skipped"][name] = kernels
            else:
                result["kernels"][name], compiled[name] = kernels, fn
    result["compile_s"] = round(time.monotonic() - start, 2)
    with lock:
        worst = reference(row, inputs, cotangent)
        for name, fn in compiled.items():
            with skipping(result["skipped"], name):
                result["error"][name] = worst(run(row, fn, inputs, cotangent))
                call = partial(run, row, fn, inputs, cotangent)
                peak = peak_bytes(call, device)
                if peak is not None:
                    result["peak_mib"][name] = round(peak / 2**20, 1)
                calls[name] = call
        limit = error_limit(result["error"].get("unfused"), DTYPES[row.dtype])
        for name in [n for n in calls if n != "unfused" and not result["error"][n] <= limit]:
            result["wrong"][name] = f"error {result['error'][name]:.2e}, allowed {limit:.2e}"
        _time(calls, device, result, tried, quick)
    calls.clear()
    del compiled
    collect(device)
    return result


def _compile(
    row: Row, fn: Callable[..., torch.Tensor], inputs: list[torch.Tensor], cotangent: torch.Tensor, how: Json
) -> list[str] | str:
    """Compile under settings; the kernels that were chosen, or why there is none."""
    from inductor_fusions import config, decisions, reporting

    options = how.get("options", {})

    def chosen(**_: Any) -> Options:
        return {name: value for name, value in options.items() if name != "gemm_backward"}

    with (
        fresh_cache(),
        config.patch(how["settings"]),
        reporting.isolated() as seen,
        mock.patch.object(decisions, "flex_options", chosen),
        mock.patch.object(decisions, "flex_backward", lambda **_: options.get("gemm_backward", 0)),
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
            return [*found, {"key": each.key, "failed": one_line(error)}], not is_fatal(error)
        options = {**options, **result["options"]}
        found.append({"key": each.key, **asdict(each), **result})
    return found, True


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
