"""Attention: which measured problems are comparable, and how far their gains carry over.

Gains of nearby problems are corrected for thread blocks that leave multiprocessors idle.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any

from .schema import half, padded

#: Queries up to which an attention is compared only with others of few queries.
FEW_QUERIES = 16
#: Masks that vary over queries are read alike: each doubling stands for a dim more over which they vary.
BIASES = {"bias_batch": 1.0, "bias": 2.0, "bias_full": 4.0}
#: Queries, or keys in the backward, of a thread block of SDPA's kernels.
BLOCK = 128
#: Keys that a thread block reads in the time of a launch, about 6 us on an H100: with head dim 64 cuDNN's
#: takes 10 ns for each, that of efficient attention 40 ns, and 100 ns in float32
#: (`bench/results/attention_h100.json`).
LAUNCH_CUDNN, LAUNCH_EFFICIENT = 512, 64
#: Kernels of the unfused attention in training, and how often they read or write the scores.
UNFUSED, PASSES = 10, 10
#: Kernels that keep the gradient of fully masked rows: the mask and its rows (2), their queries, the centred
#: values, and the backward (3).
BESIDE = 7
#: Microseconds of a launch on the host, and bytes that an H100 reads or writes in one.
LAUNCH, PER_MICROSECOND = 8.0, 3e6
#: The share of a correction that is applied: half of it has the least error on rows that were left out.
SHOWN = 0.5


def same(row: Mapping[str, Any]) -> tuple[Hashable, ...]:
    """What two problems must agree in to be comparable."""
    # For wide heads SDPA's backward is flash attention in place of cuDNN.
    wide = row["train"] and row["head_dim"] > 128
    # Few queries leave most of a tile empty: with 16 keys, one takes efficient attention 8 times as long. Few
    # beside many keys have hardly more scores than k and v have elements. In the backward, tiles are of keys.
    tiled = min(row["q_len"], row["kv_len"] if row["train"] else row["q_len"])
    longest = max(row["q_len"], row["kv_len"])
    few = row["q_len"] <= FEW_QUERIES or (tiled <= BLOCK // 2 and longest >= 2 * BLOCK)
    mask = "bias" if row["mask"] in BIASES else row["mask"]
    return half(row["dtype"]), mask, row["train"], wide, few, row.get("tf32", False)


def sizes(row: Mapping[str, Any]) -> tuple[float, ...]:
    """Positive numbers whose ratios give the distance of two problems."""
    varies = BIASES.get(row.get("mask", ""), 1.0)
    # A tile of any kernel is as wide as a power of two: SDPA with head dim 160 costs what it costs with 256.
    return varies, row["q_len"], row["kv_len"], padded(row["head_dim"]), row["batch"] * row["heads"]


def doubt(row: Mapping[str, Any]) -> float:
    """Times vary if launches take as long as kernels, most of all in training, which has more launches."""
    scores = math.log2(row["batch"] * row["heads"] * row["q_len"] * row["kv_len"])
    return (0.06 if row["train"] else 0.02) * max(0.0, 24.0 - scores)


def idle_multiprocessors(row: Mapping[str, Any], kernel: str, processors: int) -> float:
    """What a kernel of SDPA loses by having fewer thread blocks than the device has multiprocessors.

    The forward has one for each 128 queries of a head, which reads all keys one tile after another. The
    backward has one for each 128 keys; those of one head take turns to add to the gradient of the same
    queries, so that no more run at once than there are tiles of queries. With few keys a kernel takes as long
    as its launch, however many multiprocessors are idle. The products with materialised scores have a thread
    block for each tile of scores.

    Args:
        row: a problem of attention.
        processors: multiprocessors of the device.

    Returns:
        The logarithm of a speedup, 0 at most; 0 for kernels that are not SDPA's.
    """
    if kernel not in ("sdpa", "efficient"):
        return 0.0
    queries, keys, train = row["q_len"], row["kv_len"], row["train"]
    is_cudnn = kernel == "sdpa" and row["dtype"] != "float32"
    # The keys of a single query are split between thread blocks; with a mask not always.
    if is_cudnn and queries == 1 and not train and row["mask"] in ("none", "causal"):
        return 0.0
    count = row["batch"] * row["heads"] * -(-min(queries, keys if train else queries) // BLOCK)
    launch = LAUNCH_CUDNN if is_cudnn else LAUNCH_EFFICIENT
    length = max(queries, keys) if train else keys
    return SHOWN * math.log((launch + length * min(1.0, count / processors)) / (launch + length))


def slowed(row: Mapping[str, Any], speedup: float, beside: int) -> float:
    """The speedup of a kernel in training if `BESIDE` other kernels read and write so many bytes beside it.

    The time of the unfused attention is a lower bound, so that the speedup is one as well.
    """
    scores = row["batch"] * row["heads"] * row["q_len"] * row["kv_len"]
    moved = PASSES * scores * (4 if row["dtype"] == "float32" else 2)
    unfused = max(UNFUSED * LAUNCH, moved / PER_MICROSECOND)
    found: float = unfused / (unfused / speedup + BESIDE * LAUNCH + beside / PER_MICROSECOND)
    return found
