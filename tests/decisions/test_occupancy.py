"""What becomes of attention whose few thread blocks leave multiprocessors idle."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from inductor_fusions.decisions import Query, decide

CUDA = torch.device("cuda")
H100 = "nvidia_h100_80gb_hbm3"


def test_attention_of_few_thread_blocks(shelf: Callable[..., None]) -> None:
    """One head on an H100: scores that are materialised have a thread block for each tile of them."""
    row = {"batch": 4, "head_dim": 64, "dtype": "bfloat16", "mask": "none", "kv_len": 1024, "q_len": 1024}
    known = [
        {**row, "heads": heads, "train": train, "gain": {"sdpa": 1.5}}
        for heads in (8, 16)
        for train in (False, True)
    ]
    shelf(**{H100: {"attention": known}})
    for heads, keys, train, chosen in (
        (4, 1024, False, True), (1, 1024, False, False), (4, 1024, True, True), (4, 256, False, True),
        (4, 256, True, False),
    ):  # fmt: skip
        wanted = {**row, "heads": heads, "kv_len": keys, "train": train}
        found = decide(Query("attention", wanted, ("sdpa",)), CUDA)
        assert (found.kernel is not None) == chosen, (heads, keys, train)


@pytest.mark.parametrize("queries, chosen", [(1, False), (16, False), (32, True), (64, True)])
def test_attention_of_few_queries(queries: int, chosen: bool, shelf: Callable[..., None]) -> None:
    """Rows of whole tiles of queries say nothing of a tile with few, and the reverse."""
    row = {"batch": 512, "heads": 12, "kv_len": 64, "head_dim": 64, "dtype": "float32", "mask": "none"}
    row |= {"train": False, "gain": {"sdpa": 2.0}}
    shelf(**{H100: {"attention": [{**row, "q_len": 64}]}})
    wanted = {name: value for name, value in row.items() if name != "gain"} | {"q_len": queries}
    assert (decide(Query("attention", wanted, ("sdpa",)), CUDA).kernel is not None) == chosen
    shelf(**{H100: {"attention": [{**row, "q_len": 1}]}})
    assert (decide(Query("attention", wanted, ("sdpa",)), CUDA).kernel is not None) != chosen


@pytest.mark.parametrize(
    "kernel, keys, train, chosen",
    [
        ("sdpa", 512, False, True), ("sdpa", 4096, False, False), ("short", 4096, False, True),
        ("efficient", 512, True, True), ("efficient", 4096, True, False), ("short", 4096, True, True),
    ],
)  # fmt: skip
def test_attention_of_few_queries_and_more_keys(
    kernel: str, keys: int, train: bool, chosen: bool, shelf: Callable[..., None]
) -> None:
    """Few thread blocks read the keys one after another: what gains with few keys need not with many."""
    row = {"batch": 1, "heads": 16, "q_len": 32, "head_dim": 64, "dtype": "bfloat16", "mask": "pad"}
    row["train"] = train
    shelf(**{H100: {"attention": [{**row, "batch": 2, "kv_len": 256, "gain": {kernel: 2.2}}]}})
    found = decide(Query("attention", {**row, "kv_len": keys}, (kernel,)), CUDA)
    assert (found.kernel == kernel) == chosen, found


@pytest.mark.parametrize("mask, queries, chosen", [("none", 1, True), ("pad", 1, False), ("none", 2, False)])
def test_keys_of_a_single_query_are_split(
    mask: str, queries: int, chosen: bool, shelf: Callable[..., None]
) -> None:
    """Without a mask SDPA splits the keys of one query: few heads fill the device."""
    row = {"batch": 1, "heads": 16, "head_dim": 64, "dtype": "bfloat16", "mask": mask, "train": False}
    row |= {"q_len": queries}
    shelf(**{H100: {"attention": [{**row, "kv_len": 2048, "gain": {"sdpa": 1.4}}]}})
    found = decide(Query("attention", {**row, "kv_len": 8192}, ("sdpa",)), CUDA)
    assert (found.kernel == "sdpa") == chosen, found


@pytest.mark.parametrize(
    "keys, train, chosen", [(16, True, False), (64, True, False), (96, True, True), (16, False, True)]
)
def test_attention_of_few_keys(keys: int, train: bool, chosen: bool, shelf: Callable[..., None]) -> None:
    """The tiles of a backward are of keys: rows of many keys say nothing of few."""
    row = {"batch": 8, "heads": 16, "q_len": 1024, "head_dim": 64, "dtype": "bfloat16", "mask": "none"}
    row["train"] = train
    shelf(**{H100: {"attention": [{**row, "kv_len": 128, "gain": {"sdpa": 2.0}}]}})
    found = decide(Query("attention", {**row, "kv_len": keys}, ("sdpa",)), CUDA)
    assert (found.kernel == "sdpa") == chosen, found
