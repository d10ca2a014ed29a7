"""Measure every candidate way to compute `softmax(scale * q @ k.T + mask) @ v`, over a grid of shapes.

The result is a JSON table from which the package decides which kernel to emit for an attention site, or
to leave the site to stock. Every candidate is compiled by stock `torch.compile` (this script never imports
`inductor_fusions`), starts from q, k, v laid out [batch, length, heads, head_dim], as projections leave
them, and ends in `.transpose(1, 2).contiguous()`:

    unfused     the attention written out as in Hugging Face's eager spelling; stock's patterns are off
    sdpa        F.scaled_dot_product_attention, with the backend that PyTorch picks
    flash, efficient, cudnn
                the same with one backend forced
    short       `inductor_fusions.ops.short_attention`, up to 128 queries and keys; its masks are those of
                unfused, not summed
    *_repeat    with heads != kv_heads only: the same on K and V repeated to all heads (the others take
                `enable_gqa`; unfused always repeats)

Masks:

    none        no mask
    causal      unfused: dense additive [1, 1, Q, K]; others: is_causal
    pad         additive [B, 1, 1, K], finfo.min on the padding; others: the same expanded, as a view
    bias        additive [1, H, Q, K]; bias_grad: the same, and it takes a gradient
    bias_batch  additive [B, 1, Q, K], causal and padding (OPT)
    bias_full   additive [B, H, Q, K] (DeBERTa); full_grad: the same, and it takes a gradient
    bool4d      boolean [B, 1, Q, K], causal and padding
    alibi       unfused: alibi [B * H, 1, K] in a baddbmm, then + [B, 1, Q, K] (BLOOM); others: their sum
                [B, H, Q, K], made outside, since all layers share it
    window      unfused: + bias [1, H, Q, K], then + mask [windows, 1, Q, K] (Swin); others: their sum
                over the batch, made inside, since the bias is each layer's own; window_grad: the same, and
                the bias takes a gradient

A row of the JSON holds the median time of each candidate in `times_us` and its interquartile range over
the median in `spread`; `device_us` is the time on the device alone (launches queued beforehand), where a
call is so short that launching it counts; `peak_mib` is memory beyond the inputs; `error` is the worst
relative error of output and gradients against float64, over a slice, and `errors` has the parts; `kernels`
names the attention ops in the compiled graph; `wrong` holds candidates whose error exceeds 1.5 times that
of `unfused` plus eps (they have no time, so that no one picks them); `skipped` says why others are absent.

Compilation dominates, so worker processes (`--jobs`) compile rows side by side while one at a time has the
device to itself for checking and timing.

    python -m bench.tune_attention --out bench/results/attention_h200.json --budget 560
    python -m bench.tune_attention --device cpu --out bench/results/attention_cpu.json
    python -m bench.tune_attention --quick --only 'pad.*d64 infer' --out /tmp/try.json
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable

import torch

from bench import tuning
from bench.attention.candidates import Candidate, RefusedError, candidate_names, compile_candidate
from bench.attention.inputs import SMALL_INPUTS, allocate, fill
from bench.attention.reference import check, reference
from bench.attention.rows import Row, cpu_rows, cuda_rows
from bench.common import DTYPES, Json, error_limit, free, in_turn, interleave, one_line, peak_bytes, skipping
from bench.pool import FileLock
from inductor_fusions.checking.budget import worst

GIB = 2**30
UNFUSED_LIMIT = 8 * GIB
"""`unfused` is skipped where its scores alone take more than this."""
SHORT_CALL_US = 1500.0
"""Where a call takes less, launching may be what takes the time, and `device_us` is measured as well."""


# Measuring ---------------------------------------------------------------------------------------------


def measure(row: Row, options: argparse.Namespace, lock: FileLock) -> Json:
    """Compile, check and time every candidate of a row."""
    device, quick = options.device, options.quick
    set_up(device)
    torch._dynamo.reset()
    result: Json = {name: {} for name in ("times_us", "device_us", "spread", "peak_mib", "error", "errors")}
    result |= {"kernels": {}, "wrong": {}, "skipped": {}}
    skipped = result["skipped"]
    inputs = allocate(row, device)
    sets = [inputs] if inputs.nbytes() > SMALL_INPUTS else [inputs, allocate(row, device)]
    start = time.monotonic()
    candidates: dict[str, Candidate] = {}
    for name in candidate_names(row, device):
        if name == "unfused" and row.score_bytes > UNFUSED_LIMIT:
            skipped[name] = f"the scores alone take {row.score_bytes / GIB:.1f} GiB"
            continue
        try:
            candidates[name] = compile_candidate(row, name, inputs)
            ops = candidates[name].backend.ops
            result["kernels"][name] = sorted(ops) or ["math"]
        except Exception as error:
            skipped[name] = str(error) if isinstance(error, RefusedError) else one_line(error)
    result["compile_s"] = round(time.monotonic() - start, 2)
    with lock:
        start = time.monotonic()
        for seed, one in enumerate(sets):
            fill(row, one, seed)
        expected, cut = reference(row, inputs)
        calls: dict[str, Callable[[], object]] = {}
        for name, candidate in candidates.items():
            with skipping(skipped, name):
                run = functools.partial(candidate.run, row, name, inputs)
                errors = check(row, run, expected, cut)
                peak = peak_bytes(run, device)
                result["error"][name] = worst(map(float, errors.values()))
                result["errors"][name] = errors
                if peak is not None:
                    result["peak_mib"][name] = round(peak / 2**20, 1)
                calls[name] = in_turn(functools.partial(candidate.run, row, name), sets)
        del expected
        limit = error_limit(result["error"].get("unfused"), DTYPES[row.dtype])
        for name in [n for n in calls if not result["error"][n] <= limit]:
            result["wrong"][name] = f"error {result['error'][name]:.2e}, allowed {limit:.2e}"
            if name != "unfused":
                del calls[name]
        rounds, block = (3, 1e-3) if quick else (12, 4e-3 if device == "cuda" else 3e-2)
        for name, timing in interleave(calls, device, rounds, block).items() if calls else ():
            result["times_us"][name] = round(timing.median * 1e6, 2)
            result["spread"][name] = round(timing.spread, 4)
        if device == "cuda" and min(result["times_us"].values(), default=1e9) < SHORT_CALL_US:
            times = interleave(calls, device, min(rounds, 10), 1e-3, max_calls=8, run_ahead=True)
            result["device_us"] = {name: round(timing.median * 1e6, 2) for name, timing in times.items()}
        result["measure_s"] = round(time.monotonic() - start, 2)
        del calls, candidates, sets, inputs
        free(device)
    return result


def set_up(device: str) -> None:
    """Settings of the process that measures."""
    import torch._dynamo.config
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    # AOTAutograd's cache does not know which SDPA backend is forced, and would mix the candidates up.
    functorch.enable_autograd_cache = False
    inductor.fx_graph_cache = False
    from inductor_fusions import _inductor, config

    config.enabled = False
    _inductor.without_attention_patterns()
    functorch.force_non_lazy_backward_lowering = True
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch._dynamo.config.recompile_limit = 32  # of one function, which each candidate compiles anew
    if device == "cuda":
        inductor.compile_threads = 1  # the workers are parallel as it is


# The command -------------------------------------------------------------------------------------------


def describe(result: Json) -> str:
    """A row's outcome in a few words."""
    times = result["times_us"]
    text = " ".join(f"{name} {value:.0f}" for name, value in sorted(times.items(), key=lambda x: x[1]))
    if result["wrong"]:
        text += " wrong: " + ", ".join(result["wrong"])
    return text + f" (compile {result['compile_s']:.1f} s, measure {result['measure_s']:.1f} s)"


def main() -> None:
    """The command line."""
    options = tuning.parser("bench.tune_attention", __doc__).parse_args()
    rows = cuda_rows() if options.device == "cuda" else cpu_rows()
    jobs = tuning.processes(options, most=8)
    tuning.run("bench.tune_attention", options, rows, measure, describe, jobs)


if __name__ == "__main__":
    main()
