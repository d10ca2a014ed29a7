"""Measure attention of one token to a cache that is only partly full, against SDPA, and a whole step.

    gqa d128 b16 4096/1024 boolean     32 heads of queries, 8 of keys, width 128; 16 samples; 1,024 of 4,096
                                       keys are seen
    gqa d128 b8 8192/padded boolean    samples of 512 to 4,096 keys, padded on the left to 4,096 of 8,192
    step b16 4096/1024                 Llama-8B widths, 8 layers, a static cache, mode="reduce-overhead"
    step llama-1b b1 4096/1024         another model of configs/models

Each attention is timed on the device alone, with the L2 cache emptied in front of each call, as other layers
leave it. SDPA runs with keys that are repeated for their groups, as Hugging Face writes it, and with
`enable_gqa`, by its own choice and by each of its backends. Ours runs with several tiles; what finds the
tiles that a mask shows (`tiles`) is timed apart, since layers share it. `full` has the same for a mask that
shows all keys; `gain` says what a table has of both. `limit_us` is the time in which the keys and values
that are seen, once each, come from memory.

    python -m bench.decode_attention --out bench/results/decode_attention_h100.json --only ^[gm] --budget 150
    python -m bench.decode_attention --out bench/results/decode_attention_h100.json --only ^step --budget 500
    python -m bench.decode_attention --out bench/results/decode_attention_h100.json \
        --table nvidia_h100_80gb_hbm3
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._inductor.config
from torch.nn.attention import SDPBackend, sdpa_kernel

import inductor_fusions
from bench import device_table, model_cases, steps, tuning
from bench.attention.spellings import repeat_kv
from bench.common import (
    Json,
    apart,
    both_clocks,
    compiled_only,
    error_limit,
    fresh_cache,
    interleave,
    relative_error,
)
from inductor_fusions import config
from inductor_fusions.decisions import hardware
from inductor_fusions.fusions.attention.decode import op, plan
from inductor_fusions.fusions.attention.decode.plan import Config

#: Heads of queries and of keys, and their width.
HEADS = {"gqa d128": (32, 8, 128), "gqa d64": (32, 8, 64), "mha d128": (32, 32, 128)}
#: Of whole steps; the first is the one that is not named.
MODELS = ("llama-8b-8l", "llama-1b", "qwen3-8l", "gemma2-8l")
#: Batch, length of the cache, keys in use; 0 for samples of 512 to 4,096 keys, padded on the left.
CACHES = (
    (1, 4096, 1024), (16, 4096, 1024), (32, 4096, 1024), (8, 8192, 0), (32, 32768, 2048), (1, 32768, 2048),
    (16, 32768, 2048), (1, 8192, 4096), (16, 8192, 4096), (32, 8192, 4096),
)  # fmt: skip
#: Keys of a tile, thread blocks of a multiprocessor, warps, stages.
CONFIGS = tuple(
    Config(*each)
    for each in (
        (64, 4, 4, 2), (64, 2, 4, 2), (64, 8, 4, 2), (64, 4, 4, 3), (64, 2, 4, 3), (64, 4, 4, 1),
        (128, 2, 4, 2), (128, 4, 4, 2), (128, 2, 8, 2), (32, 4, 2, 3), (32, 8, 2, 2), (32, 4, 4, 3),
    )
)  # fmt: skip
#: What finds the tiles that are seen is done once for the layers of a model, of which few have less.
LAYERS = 8
#: Of SDPA, for a cache that is full.
LEAST = 0.97
#: Samples whose result is computed in float64.
CHECKED = 2
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}


@dataclass(frozen=True)
class Row:
    """One measurement; `kind` of `HEADS`, or "step", which may name a model."""

    kind: str
    batch: int
    keys: int
    used: int
    mask: str

    @property
    def key(self) -> str:
        """Its name."""
        return f"{self.kind} b{self.batch} {self.keys}/{self.used or 'padded'} {self.mask}".strip()


def grid(quick: bool) -> list[Row]:
    """What is measured, the most important first."""
    if quick:
        small = (2, 200, 70)
        return [
            Row("gqa d64", *small, "boolean"),
            Row("gqa d64", *small, "additive"),
            Row("step", *small, ""),
        ]
    order = [("gqa d128", "boolean"), ("gqa d128", "additive"), ("gqa d64", "boolean"),
             ("mha d128", "boolean"), ("gqa d64", "additive"), ("mha d128", "additive")]  # fmt: skip
    found = [Row(heads, *cache, mask) for heads, mask in order for cache in CACHES]
    steps = [Row("step", *cache, "") for cache in (*CACHES[:2], CACHES[4], CACHES[3])]
    models = [Row(f"step {name}", *CACHES[0], "") for name in MODELS[1:]]
    return [*found, *steps, *models]


def shown(row: Row, device: str) -> torch.Tensor:
    """Which keys are seen, (batch, 1, 1, keys)."""
    j = torch.arange(row.keys, device=device)
    if row.used:
        return (j < row.used).expand(row.batch, 1, 1, -1).contiguous()
    last = min(4096, row.keys)
    lengths = torch.linspace(last // 8, last, row.batch, device=device).long()
    return ((j < last) & (j >= last - lengths[:, None]))[:, None, None]


def as_mask(row: Row, seen: torch.Tensor) -> torch.Tensor:
    """The mask, as Hugging Face makes it."""
    if row.mask == "boolean":
        return seen
    low = torch.finfo(torch.bfloat16).min
    return torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, low).bfloat16()


def sdpa_calls(q: Any, k: Any, v: Any, mask: Any, device: str) -> dict[str, Callable[[], torch.Tensor]]:
    """SDPA in every form that runs."""
    sdpa, groups = torch.nn.functional.scaled_dot_product_attention, q.shape[1] // k.shape[1]

    def call(backend: Any) -> torch.Tensor:
        with sdpa_kernel(backend) if backend is not None else nullcontext():
            return sdpa(q, k, v, mask, enable_gqa=groups > 1)

    wanted: dict[str, Callable[[], torch.Tensor]] = {"sdpa": lambda: call(None)}
    if groups > 1:
        wanted["repeated"] = lambda: sdpa(q, repeat_kv(k, groups), repeat_kv(v, groups), mask)
    for name, backend in BACKENDS.items() if device == "cuda" else ():
        wanted[name] = lambda backend=backend: call(backend)
    found = {}
    for name, each in wanted.items():
        with suppress(RuntimeError):  # no kernel, or no memory
            each()
            found[name] = each
    return found


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The first samples in float64."""
    n, groups = CHECKED, q.shape[1] // k.shape[1]
    mask = mask[:n] if mask.dtype == torch.bool else mask[:n].double()
    outputs = []
    for h in range(k.shape[1]):  # one head of keys at a time
        wide = [
            x[:n].double() for x in (q[:, h * groups : (h + 1) * groups], k[:, h : h + 1], v[:, h : h + 1])
        ]
        scores = wide[0] @ wide[1].mT * q.shape[3] ** -0.5
        is_boolean = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, float("-inf")) if is_boolean else scores + mask
        outputs.append(scores.softmax(-1) @ wide[2])
    return torch.cat(outputs, 1)


def attention(row: Row, device: str, quick: bool) -> Json:
    """One attention: each form of SDPA, ours with each of its tiles, and the limit."""
    heads, kv_heads, dim = HEADS[row.kind]
    torch.manual_seed(0)
    made = partial(torch.randn, device=device, dtype=torch.bfloat16)
    q = made(row.batch, heads, 1, dim)
    k, v = (made(row.batch, kv_heads, row.keys, dim) for _ in "kv")
    seen = shown(row, device)
    shape = plan.Shape(row.batch, heads, kv_heads, 1, row.keys, dim, q.dtype, row.mask)
    found: Json = {"key": row.key, **asdict(row), **shape.row}
    mask = as_mask(row, seen)
    right = exact(q, k, v, mask)
    whole = as_mask(row, torch.ones_like(seen))
    configs = [each for each in CONFIGS if each.fits(dim)][: 2 if quick else None]
    tried = [_tried(q, k, v, each, shape, configs, device, quick) for each in (mask, whole)]
    # One kernel reads the cache however full it is: the tiles that lose least of both.
    best = min(configs, key=lambda each: sum(times[str(each)] / min(times.values()) for times in tried))
    found |= {"config": asdict(best), **_times(q, k, v, mask, shape, best, device, quick)}
    found["tried_us"] = tried[0]
    ours, _ = _ours(q, k, v, mask, shape, best, device)
    found["error"] = {name: relative_error(call()[:CHECKED], right) for name, call in
                      {**sdpa_calls(q, k, v, mask, device), "decode": ours}.items()}  # fmt: skip
    least = min(error for name, error in found["error"].items() if name != "decode")
    found["correct"] = found["error"]["decode"] <= error_limit(least, q.dtype)
    found["full"] = {**_times(q, k, v, whole, shape, best, device, quick), "tried_us": tried[1]}
    found["seen"] = round(float(seen.sum()) / seen.numel(), 4)
    bandwidth = hardware(torch.device(device))
    for each, visible in ((found, int(seen.sum())), (found["full"], row.batch * row.keys)):
        size = 2 * visible * kv_heads * dim * 2 + mask.numel() * mask.itemsize
        each["limit_us"] = round(size / bandwidth.bandwidth / 1e3, 2) if bandwidth else None
    return found


def _ours(q: Any, k: Any, v: Any, mask: Any, shape: plan.Shape, chosen: Config, device: str) -> Any:
    """The attention alone, and what finds the tiles that are seen."""
    known = hardware(torch.device(device))
    splits = chosen.splits(shape, known.multiprocessors if known else plan.PROCESSORS)
    given = [chosen.block_n, splits, chosen.num_warps, chosen.num_stages]

    def tiles() -> tuple[Any, torch.Tensor]:
        lowest = None if mask.dtype == torch.bool else _lowest(mask)
        return lowest, op.DECODE_TILES(mask, lowest, shape.kv_heads, chosen.block_n)

    lowest, listed = tiles()
    scale = shape.head_dim**-0.5
    return partial(op.DECODE_ATTENTION, q, k, v, mask, lowest, listed, scale, False, 1, given), tiles


@torch.compile(dynamic=True)
def _lowest(mask: torch.Tensor) -> torch.Tensor:
    """As it is in a compiled graph: one kernel."""
    found: torch.Tensor = op.lowest_of(mask, mask.dtype)
    return found


ROUNDS = {True: (2, 1e-3), False: (3, 2e-3)}


def _tried(
    q: Any, k: Any, v: Any, mask: Any, shape: plan.Shape, configs: list[Config], device: str, quick: bool
) -> dict[str, float]:
    """Microseconds of ours with each of its tiles."""
    calls = {str(each): _ours(q, k, v, mask, shape, each, device)[0] for each in configs}
    times = interleave(calls, device, *ROUNDS[quick], 20, True, True)
    return {name: round(1e6 * t.median, 2) for name, t in times.items()}


def _times(
    q: Any, k: Any, v: Any, mask: Any, shape: plan.Shape, chosen: Config, device: str, quick: bool
) -> Json:
    """Microseconds of SDPA in each form and of ours."""
    ours, tiles = _ours(q, k, v, mask, shape, chosen, device)
    rounds, block = ROUNDS[quick]
    calls: dict[str, Callable[[], object]] = dict(sdpa_calls(q, k, v, mask, device))
    calls |= {"decode": ours, "tiles": tiles}
    times = interleave(calls, device, rounds if quick else 7, 2 * block, 30, True, True)
    return {
        "device_us": {name: round(1e6 * t.median, 2) for name, t in times.items()},
        "spread": {name: round(t.spread, 4) for name, t in times.items()},
    }


def gain(row: Json) -> float:
    """What is gained over the best SDPA while a cache fills; 0 if the result is wrong.

    How full a cache is shows at run time alone, so a row has one gain: the time of SDPA over ours, each the
    mean of a cache that fills evenly, by a line through both measurements. Where a full cache is slower than
    `LEAST` of SDPA, the gain is that of the full cache.
    """
    if not row["correct"]:
        return 0.0
    theirs, ours = [], []
    for times in (row["device_us"], row["full"]["device_us"]):
        theirs.append(min(time for name, time in times.items() if name not in ("decode", "tiles")))
        ours.append(times["decode"] + times["tiles"] / LAYERS)
    least = theirs[1] / ours[1]
    if least < LEAST:
        return round(least, 3)
    half = (0.5 - row["seen"]) / (1 - row["seen"])
    mean = [part + half * (full - part) for part, full in (theirs, ours)]
    return round(mean[0] / mean[1], 3)


# A whole step ------------------------------------------------------------------------------------


class Step:
    """One step of decoding with a static cache, which stays as full as it is.

    Args:
        row: batch, length of the cache, and how much of it is in use.
        small: a small model, to try the script.
    """

    def __init__(self, row: Row, device: str, small: bool) -> None:
        import transformers

        name = row.kind.removeprefix("step").strip() or MODELS[0]
        case = model_cases.Case(row.key, name, "sdpa", row.batch, row.keys)
        with mock.patch.dict(model_cases.QUICK, steps.NARROW):
            self.model: Any = model_cases.build(case, "sdpa", device, small, auto="AutoModelForCausalLM")
        settings = self.model.config
        self.cache = transformers.StaticCache(config=settings, max_cache_len=row.keys)
        shape = (row.batch, settings.num_key_value_heads, row.keys, settings.head_dim)
        for layer in self.cache.layers:
            layer.lazy_initialization(
                *(torch.empty(shape, device=device, dtype=torch.bfloat16) for _ in "kv")
            )
            layer.keys.normal_()
            layer.values.normal_()
        self.used = row.used or min(4096, row.keys)
        self.mask = shown(row, device)
        self.ids = torch.randint(0, settings.vocab_size, (row.batch, 1), device=device)
        self.positions = torch.full((row.batch, 1), self.used - 1, device=device)

    def run(self, ids: Any, mask: Any, positions: Any, cache: Any) -> Any:
        """Logits of the next token."""
        return self.model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits

    def back(self) -> None:
        """The token goes where the last one went."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.used - 1)


#: Small kernels that do not depend on each other become one.
COMBO = {"combo_kernels": True}
#: What compiles a step: the config of the package, and that of Inductor.
VARIANTS: dict[str, tuple[Json, Json]] = {
    "stock": ({"enabled": False}, {}),
    "sdpa": ({"attention_kernel": "sdpa"}, {}),
    "decode": ({"attention_kernel": "decode"}, {}),
    "norms apart": ({"attention_kernel": "decode", "norm_linear": False}, {}),
    "stock combo": ({"enabled": False}, COMBO),
    "combo": ({"attention_kernel": "decode"}, COMBO),
}


def step(row: Row, device: str, quick: bool) -> Json:
    """A whole step, with each of `VARIANTS`."""
    made = Step(row, device, quick)
    calls: dict[str, Callable[[], Any]] = {}
    logits, sites = {}, {}
    torch._dynamo.reset()
    with torch.no_grad():
        for name, (settings, inductor) in VARIANTS.items():
            inductor_fusions.clear()
            compiled = torch.compile(apart(made.run, name), mode="reduce-overhead")
            with config.patch(**settings), torch._inductor.config.patch(inductor), fresh_cache():
                for _ in range(3):
                    made.back()
                    logits[name] = compiled(made.ids, made.mask, made.positions, made.cache).clone()
            found = inductor_fusions.report().sites
            sites[name] = sum(site.verdict == "fused" and "decode" in site.kernel for site in found)

            def call(compiled: Any = compiled) -> Any:
                made.back()
                return compiled(made.ids, made.mask, made.positions, made.cache)

            calls[name] = call
        with compiled_only():
            times = both_clocks(calls, device, 3 if quick else 9, 0.001 if quick else 0.02)
    head = torch.cat([each[:, -1].float() for each in logits.values()])
    apart_by = {name: relative_error(each, logits["stock"]) for name, each in logits.items()}
    return {"key": row.key, **asdict(row), **times, "fused": sites, "apart": apart_by,
            "finite": bool(head.isfinite().all())}  # fmt: skip


# ---------------------------------------------------------------------------------------------------


def measure(row: Row, device: str, quick: bool) -> Json:
    """One row of the results."""
    if device == "cuda":
        torch.cuda.empty_cache()
    return step(row, device, quick) if row.kind.startswith("step") else attention(row, device, quick)


def describe(found: Json) -> str:
    """A result in a few words."""
    if found["kind"].startswith("step"):
        return (
            f"{found['times_us']}, {found.get('device_us')}, fused {found['fused']}, apart {found['apart']}"
        )
    return (
        f"{found['device_us']}, limit {found['limit_us']}, full {found['full']['device_us']}, "
        f"gain {gain(found)}, {found['config']}"
    )


def table(path: Path, rows: list[Json]) -> None:
    """Write the attentions into the table of a device, in place of those that it has."""
    names = plan.Shape(1, 1, 1, 1, 1, 1, torch.bfloat16, "").row
    found: dict[tuple[Any, ...], Json] = {}
    for row in rows:
        if row["kind"].startswith("step"):
            continue
        new = {**{name: row[name] for name in names}, "gain": gain(row), "config": row["config"]}
        key = tuple(row[name] for name in names)
        # Of one shape, the part of the cache in which least is gained.
        if key not in found or new["gain"] < found[key]["gain"]:
            found[key] = new
    device_table.put(path, "decode_attention", found.values())


def main() -> None:
    """The command line."""
    tuning.script("bench.decode_attention", __doc__, grid, measure, describe, table)


if __name__ == "__main__":
    main()
