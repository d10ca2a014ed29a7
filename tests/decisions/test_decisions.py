"""Which kernel a problem gets: from its own rows, from rows nearby, from other devices; how that is said."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from devtools import cuda_codegen
from inductor_fusions import config, decisions
from inductor_fusions.decisions import (
    Query,
    Span,
    decide,
    decide_for_all,
    devices,
)
from inductor_fusions.fusion import Rejected
from inductor_fusions.reasons import code_of

CUDA = torch.device("cuda")
H100, H200, A100 = "nvidia_h100_80gb_hbm3", "nvidia_h200", "nvidia_a100_sxm4_80gb"

# -- attention ---------------------------------------------------------------------------------------------

SHAPE = {"batch": 1, "heads": 2, "q_len": 64, "kv_len": 64, "head_dim": 32, "dtype": "float32", "train": True}
WANTED = {"dtype": torch.float32, "batch_heads": 2, "q_len": 64, "kv_len": 64, "head_dim": 32}


def attention(*changes: dict[str, Any]) -> dict[str, Any]:
    return {"attention": [{**SHAPE, "mask": "causal", "gain": {}, **change} for change in changes]}


def verdict(candidates: tuple[str, ...] = ("sdpa", "flex"), **changes: Any) -> decisions.Decision:
    wanted = {**WANTED, "mask": "causal", "train": True, **changes}
    return decisions.attention(device=CUDA, candidates=candidates, **wanted)


LOOKED_UP: dict[str, tuple[list[dict[str, Any]], str | None]] = {
    "the best": ([{"gain": {"sdpa": 1.2, "flex": 1.5}}], "flex"),
    "level": ([{"gain": {"flex": 1.01}}], None),
    "level, and a neighbour gains": ([{"gain": {"flex": 1.01}}, {"q_len": 128, "gain": {"flex": 9.0}}], None),
    "a neighbour": ([{"q_len": 128, "gain": {"flex": 2.0}}], "flex"),
    "a neighbour gains too little": ([{"q_len": 128, "gain": {"flex": 1.03}}], None),
    "a neighbour of a wider head": ([{"head_dim": 256, "gain": {"flex": 9.0}}], None),
    "a neighbour with TF32": ([{"q_len": 128, "tf32": True, "gain": {"flex": 9.0}}], None),
    "a neighbour was wrong": (
        [{"q_len": 128, "gain": {"flex": 2.0}}, {"q_len": 32, "gain": {"flex": 0.0}}],
        None,
    ),
    "far away": ([{"q_len": 64 * 1024, "gain": {"flex": 9.0}}], None),
    "one of two masks of the kind loses": ([{"gain": {"flex": 2.0}}, {"gain": {"flex": 0.9}}], None),
    "both gain": ([{"gain": {"flex": 2.0}}, {"gain": {"flex": 1.1}}], "flex"),
}


@pytest.mark.parametrize("name", LOOKED_UP)
def test_verdict(name: str, shelf: Callable[..., None]) -> None:
    """A measurement of this very shape counts alone; without one, the neighbours do."""
    changes, expected = LOOKED_UP[name]
    shelf(**{H100: attention(*changes)})
    assert verdict().kernel == expected


def test_float16_is_as_bfloat16(shelf: Callable[..., None]) -> None:
    shelf(**{H100: attention({"dtype": "bfloat16", "gain": {"sdpa": 2.0}})})
    assert verdict(dtype=torch.float16).note == "2.00x measured"
    assert verdict(dtype=torch.float32).kernel is None


def test_tf32_is_another_problem(shelf: Callable[..., None]) -> None:
    shelf(**{H100: attention({"gain": {"sdpa": 2.0}})})
    assert verdict().kernel == "sdpa" and verdict(tf32=True).kernel is None
    shelf(**{H100: attention({"dtype": "bfloat16", "gain": {"sdpa": 2.0}})})
    assert verdict(dtype=torch.bfloat16, tf32=True).kernel == "sdpa"


def test_tiles_of_flex_attention(shelf: Callable[..., None]) -> None:
    """The nearest rows of the head dim, those of the mask first; Inductor's own where these were faster."""
    forward, backward = {"fwd_BLOCK_M": 64}, {"bwd_BLOCK_M1": 16}
    found = attention(
        {"train": False, "options": {"fwd_BLOCK_M": 32}, "mask": "tanh causal"},
        {"train": False, "options": forward, "q_len": 256},
        {"options": backward, "q_len": 256},
        {"options": {}},
    )
    for name in (H100, H200):  # those of a device with the same compute capability fit
        shelf(**{name: found})
        assert decisions.flex_options(device=CUDA, mask="causal", **WANTED) == forward
        longer = {**WANTED, "q_len": 256}
        assert decisions.flex_options(device=CUDA, mask="causal", **longer) == forward | backward
        assert decisions.flex_options(device=CUDA, mask="causal", **{**WANTED, "head_dim": 64}) == {}
    shelf(**{H200: found}, on=A100)
    assert decisions.flex_options(device=CUDA, mask="causal", **WANTED) == {}


def test_backward_in_chunks(shelf: Callable[..., None]) -> None:
    """By the shape and the share of the scores that is visible; nothing far from what was measured."""
    shelf(**{H100: attention({"gemm_backward": 1024, "visible": 0.5}, {"gemm_backward": 0, "visible": 0.1})})
    assert decisions.flex_backward(device=CUDA, visible=0.6, **WANTED) == 1024
    assert decisions.flex_backward(device=CUDA, visible=0.12, **WANTED) == 0
    assert decisions.flex_backward(device=CUDA, visible=0.6, **{**WANTED, "q_len": 2**14}) == 0
    assert decisions.flex_backward(device=CUDA, visible=0.6, **{**WANTED, "head_dim": 64}) == 0


# -- linears -----------------------------------------------------------------------------------------------

LORA = {
    "inner": [4096], "outer": [4096], "ranks": [[16]], "dtype": "bfloat16", "adapters": "bfloat16",
    "layout": "t", "tokens": 4096,
}  # fmt: skip


def lora(**changes: Any) -> Query:
    return Query("lora", {**LORA, **changes}, text="a linear")


def rows(*gains: tuple[dict[str, Any], float]) -> dict[str, Any]:
    return {"lora": [{**LORA, **changes, "gain": gain} for changes, gain in gains]}


def test_a_size_of_0_is_near_no_row(shelf: Callable[..., None]) -> None:
    shelf(**{H100: rows(({}, 1.5))})
    with pytest.raises(Rejected) as refused:
        decide(lora(tokens=0), CUDA)
    assert refused.value.code == "empty"


def test_row_of_the_problem(shelf: Callable[..., None]) -> None:
    shelf(**{H100: rows(({}, 1.5), ({"tokens": 1024}, 1.2), ({"tokens": 512}, 0.9))})
    assert decide(lora(), CUDA) == decisions.Decision(
        "lora", "measured", 1.5, 1.5, ({**LORA, "gain": 1.5},) * 2
    )
    assert decide(lora(), CUDA).note == "1.50x measured"
    # Between two, the worse one counts.
    assert decide(lora(tokens=2048), CUDA).note == "1.20x measured"
    slow = decide(lora(tokens=600), CUDA)
    assert (slow.kernel, slow.measured) == (None, True)
    assert code_of(slow.reason) == "not-faster" and H100 in slow.reason


def test_ranks_of_one_tile_are_one_problem(shelf: Callable[..., None]) -> None:
    shelf(**{H100: rows(({}, 1.5), ({"ranks": [[64]]}, 1.2))})
    notes = {rank: decide(lora(ranks=[[rank]]), CUDA).note for rank in (1, 8, 16, 33, 64)}
    assert notes == {1: "1.50x measured", 8: "1.50x measured", 16: "1.50x measured",
                     33: "1.20x measured", 64: "1.20x measured"}  # fmt: skip
    assert decide(lora(ranks=[[32]]), CUDA).source == "estimated"


def test_estimate_between_widths(shelf: Callable[..., None]) -> None:
    near = rows(({"inner": [2048]}, 1.4), ({"inner": [8192]}, 1.3), ({"outer": [8192]}, 1.35))
    shelf(**{H100: near})
    found = decide(lora(), CUDA)
    assert found.kernel == "lora" and found.source == "estimated" and len(found.rows) == 3
    assert 1.3 < found.gain < 1.4 and 1.2 < found.lower < found.gain
    says = f"(expected {found.gain:.2f}x, at least {found.lower:.2f}x)"
    assert found.note == f"estimated from 3 measurements nearby {says}"
    with config.patch(estimate=False):
        off = decide(lora(), CUDA)
    assert (
        off.reason == f"not measured on {H100}, and no measured shape is close: a linear"
        and off.source == "stock"
    )


def test_ranks_of_narrow_products_are_far_apart(shelf: Callable[..., None]) -> None:
    """On an H100 rank 64 was slower than stock where rows of rank 16 had 2.4x."""
    row = {"width": 4096, "layout": "t", "dtype": "bfloat16", "narrow": "bfloat16", "tokens": 2048}
    shelf(**{H100: {"narrow_mm": [{**row, "ranks": [16], "gain": 2.4, "config": None}]}})
    for rank, chosen in ((8, True), (16, True), (32, True), (64, False)):
        wanted = {**row, "width": 5120, "ranks": [rank]}
        assert (decide(Query("narrow_mm", wanted), CUDA).kernel is not None) == chosen, rank


def test_results_of_one_wave_more(shelf: Callable[..., None]) -> None:
    """144 tiles of 128 x 256 take two waves on 132 multiprocessors; the library's 132 of 192 x 192 one."""
    shelf(**{H100: rows(*(({"outer": [outer], "tokens": 2048}, 1.1) for outer in (2048, 2560)))})
    for outer, chosen in (([1920], True), ([2304], False)):
        wanted = lora(outer=outer, tokens=2048)
        assert (decide(wanted, CUDA).kernel is not None) == chosen, outer


def test_what_is_in_doubt_is_left_to_stock(shelf: Callable[..., None]) -> None:
    """Neighbours that do not agree; and one that gains too little, and is far."""
    shelf(**{H100: rows(({"inner": [2048]}, 2.0), ({"inner": [8192]}, 0.7))})
    found = decide(lora(), CUDA)
    assert (found.kernel, found.source) == (None, "estimated")
    assert found.reason == f"not expected to be faster than stock on {H100} at this shape"
    shelf(**{H100: rows(({"inner": [512], "outer": [512]}, 1.06))})
    assert decide(lora(), CUDA).kernel is None
    shelf(**{H100: rows(({"inner": [3584]}, 1.06))})
    assert decide(lora(), CUDA).kernel == "lora"
    # Other dtypes, layouts and numbers of tokens are other kernels.
    for change in ({"adapters": "float32"}, {"layout": "n"}, {"tokens": 16}):
        assert decide(lora(**change), CUDA).source == "stock"


@pytest.mark.parametrize(("gain", "fused"), [(1.01, True), (0.98, True), (0.96, False)])
def test_what_saves_memory_may_take_a_little_longer(
    gain: float, fused: bool, shelf: Callable[..., None]
) -> None:
    """A loss head is chosen where it is nearly as fast as stock, by its own row and by one nearby."""
    head = {
        "dtype": "bfloat16", "train": True, "frozen": True, "reduced": True, "width": 2048, "classes": 128256,
        "tokens": 8192,
    }  # fmt: skip
    shelf(**{H100: {"linear_cross_entropy": [{**head, "gain": gain}]}})
    for tokens in (8192, 8448):
        decision = decide(Query("linear_cross_entropy", {**head, "tokens": tokens}), CUDA)
        assert (decision.kernel is not None) == fused, tokens


def test_another_device(shelf: Callable[..., None]) -> None:
    """Of the same compute capability: nearly all. Of another one: what follows from memory traffic."""
    shelf(**{H200: rows(({}, 1.5), ({"tokens": 16}, 2.0))})
    found = decide(lora(), CUDA)
    assert (found.kernel, found.source, found.device) == ("lora", "another device", H200)
    assert found.note.startswith(f"estimated from 1 measurement on {H200} (expected 1.46x, at least 1.40x)")
    shelf(**{H200: rows(({"tokens": 2048}, 1.03), ({"tokens": 16}, 2.0))})
    assert decide(lora(tokens=2048), CUDA).kernel is None
    shelf(**{H200: rows(({}, 1.5), ({"tokens": 16}, 2.0))}, on=A100)
    assert decide(lora(), CUDA).kernel is None
    few = decide(lora(tokens=16), CUDA)
    assert few.kernel == "lora" and few.lower < few.gain == pytest.approx(math.sqrt(2.0), rel=0.02)
    # Rows of the device itself count for more, those of the other one if they are nearer.
    shelf(**{H200: rows(({}, 1.5)), H100: rows(({"inner": [2048]}, 0.8))})
    assert decide(lora(), CUDA).kernel is None
    shelf(**{H200: rows(({}, 0.8)), H100: rows(({"inner": [2048]}, 1.5))})
    assert decide(lora(), CUDA).kernel is None
    shelf(**{H200: rows(({}, 1.5)), H100: rows(({"inner": [2048]}, 1.4))})
    found = decide(lora(), CUDA)
    assert (found.kernel, found.source) == ("lora", "estimated")
    assert found.note.startswith(f"estimated from 2 measurements nearby, 1 of them on {H200} (expected 1.4")
    # Half of the multiprocessors are full with half of the tokens.
    assert devices.known("nvidia_h200_mig_1g_18gb") is None


def test_attention_of_another_capability(shelf: Callable[..., None]) -> None:
    """Where cuDNN is what gained on one, flash attention may not gain on the other."""

    def kernel(sdpa: float, on: str) -> str | None:
        shelf(**{H200: attention({"batch": 8192, "gain": {"sdpa": sdpa, "row_bias": 9.0}})}, on=on)
        return verdict(("sdpa", "row_bias"), batch_heads=2 * 8192).kernel

    assert kernel(2.0, A100) is None and kernel(4.0, A100) == "sdpa" and kernel(2.0, H100) == "row_bias"


@pytest.mark.parametrize("changes, carries", [
    ({"kind": "shared_a", "n": [64, 64], "k": [64, 64], "layout": ["nt", "nt"]}, True),
    ({"activation": "relu"}, True),
    ({}, False),
], ids=["two linears", "an activation", "a linear by itself"])  # fmt: skip
def test_one_row_of_another_capability(
    changes: dict[str, Any], carries: bool, shelf: Callable[..., None]
) -> None:
    """What a linear by itself gains is how far that device's library is from the limit."""
    row = {
        "kind": "linear", "n": [64], "m": None, "k": [64], "layout": ["nt"], "dtype": "bfloat16",
        "tokens": 1,
    }  # fmt: skip
    row |= changes
    shelf(**{H200: {"block_mm": [{**row, "gain": 2.0, "config": None}]}}, on=A100)
    assert (decide(Query("block_mm", row), CUDA).kernel is not None) == carries


def test_launches_in_training_vary(shelf: Callable[..., None]) -> None:
    """Of few scores the times are those of launches: neighbours say little."""
    shelf(**{H100: attention({"q_len": 128, "gain": {"flex": 1.5}})})
    assert verdict().kernel is None
    shelf(**{H100: attention({"q_len": 128, "batch": 4096, "gain": {"flex": 1.5}})})
    assert verdict(batch_heads=2 * 4096).kernel == "flex"


def test_kernels_beside_an_attention_count(shelf: Callable[..., None]) -> None:
    """What keeps the gradient of fully masked rows takes more launches than a small attention saves."""
    gain = {"sdpa": 1.8, "short": 1.1}
    shelf(**{H100: attention({"gain": gain}, {"batch": 512, "q_len": 512, "kv_len": 512, "gain": gain})})
    assert verdict(("sdpa", "short")).kernel == "sdpa"
    assert verdict(("sdpa", "short"), beside=1).kernel == "short", "which keeps them by itself"
    left = verdict(("sdpa",), beside=1)
    assert left.kernel is None and code_of(left.reason) == "not-faster" and "fully masked" in left.reason
    large = {"batch_heads": 2 * 512, "q_len": 512, "kv_len": 512}
    assert verdict(("sdpa", "short"), **large, beside=1).kernel == "sdpa"
    slower = verdict(("sdpa",), **large, beside=1)
    assert 1.6 < slower.gain < 1.8 and slower.source == "estimated", "the kernels beside it are not measured"
    assert verdict(("sdpa",), **large, beside=10**11).kernel is None, "that much is read and written"


def test_old_and_unknown_devices(shelf: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    shelf(**{H200: rows(({}, 9.0))}, on="nvidia_v100")
    for found in (None, devices.Hardware((7, 0), 80, 900)):
        monkeypatch.setattr(devices, "hardware", lambda device, found=found: found)
        assert decide(lora(), CUDA).source == "stock"
    shelf(**{"nvidia_unknown": rows(({}, 9.0))})  # of what it is nothing is known
    assert decide(lora(), CUDA).source == "stock"


def test_symbolic_number_of_tokens(shelf: Callable[..., None]) -> None:
    """One decision for what is likely, or none."""
    shelf(**{H100: rows(*(({"tokens": 2**power}, 1.2 + power / 100) for power in range(7, 15)))})
    found = decide_for_all(lora(), Span(2, 2048, 2**30), CUDA)
    assert found.kernel == "lora" and found.lower < decide(lora(tokens=2048), CUDA).lower
    mixed = rows(*(({"tokens": 2**power}, 1.3 if power > 9 else 0.9) for power in range(7, 15)))
    shelf(**{H100: mixed})
    assert "this kernel is not faster for" in decide_for_all(lora(), Span(2, 2048, 2**30), CUDA).reason
    assert decide_for_all(lora(), Span(1024, 2048, 2**30), CUDA).kernel == "lora"
    assert "as few as 16" in decide_for_all(lora(), Span(1, 16, 64), CUDA).reason


def test_tiles(shelf: Callable[..., None]) -> None:
    """Of the nearest row that fits, of a device with the same compute capability."""
    key = {"columns": 64, "inner": [48], "masks": 0, "dtype": "bfloat16", "narrow": "bfloat16"}
    found = {
        "lora_accumulate": [
            {**key, "tokens": tokens, "config": {"block_m": block_m, "block_n": 64, "num_warps": 4}}
            for tokens, block_m in ((512, 32), (2048, 64), (8192, 128))
        ]
        + [{**key, "tokens": 2000, "config": None}]
    }
    wanted = Query("lora_accumulate", {**key, "tokens": 2000})

    def fits(row: Any) -> int | None:
        block_m: int = row["config"]["block_m"]
        return block_m if block_m != 64 else None

    shelf(**{H200: found})
    assert decisions.tiles(wanted, CUDA, lambda row: int(row["config"]["block_m"])) == 64
    assert decisions.tiles(wanted, CUDA, fits) == 32
    assert decisions.tiles(wanted, CUDA, lambda row: None) is None
    shelf(**{H200: found}, on=A100)
    assert decisions.tiles(wanted, CUDA, fits) is None


def test_gain_of_a_whole_linear_is_not_that_of_its_block_gemm(shelf: Callable[..., None]) -> None:
    row = {
        "kind": "sum", "n": [4096], "m": None, "k": [4096, 48], "layout": ["nt", "nt"], "dtype": "bfloat16",
        "tokens": 4096, "gain": 9.0, "config": None,
    }  # fmt: skip
    shelf(**{H100: {"block_mm": [row]}})
    problem = {name: value for name, value in row.items() if name not in ("gain", "config")}
    assert decide(Query("block_mm", problem), CUDA).source == "stock"
    shelf(**{H100: {"block_mm": [{**row, "k": [4096, 4096]}]}})
    assert decide(Query("block_mm", {**problem, "k": [4096, 4096]}), CUDA).kernel == "block_mm"


# -- arithmetic --------------------------------------------------------------------------------------------


def test_what_is_asked_again_is_computed_once() -> None:
    """Inside `once`, unless problems are measured; another argument is another question."""
    seen: list[tuple[Any, ...]] = []

    def find(*about: Any) -> int:
        seen.append(about)
        return len(seen)

    with decisions.once():
        assert [decisions.asked(find, *about) for about in ((1, "a"), (1, "a"), (2, "a"))] == [1, 1, 2]
        with config.patch(measure=True):
            assert decisions.asked(find, 1, "a") == 3
    assert decisions.asked(find, 1, "a") == 4


def test_tables_are_found_once_in_a_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """By all fusions, and where the kernels are chosen."""
    seen: list[torch.device] = []

    def found(device: torch.device) -> Any:
        seen.append(device)
        return devices.sources(device)

    monkeypatch.setattr("inductor_fusions.decisions.deciding.sources", found)
    shapes = ((256, 512), (64, 512), (128, 512), (128, 512), (16, 512), (64, 16))
    x, *weights = (torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes)

    def model(x: Any, w: Any, gate: Any, up: Any, a: Any, b: Any) -> Any:
        adapted = F.linear(x, w) + F.linear(F.linear(x, a), b) * 2.0
        return adapted.sum() + (F.silu(F.linear(x, gate)) * F.linear(x, up)).sum()

    with config.patch(policy="profitable"):
        cuda_codegen.generate(model, (x, *weights), train=True, run=False)
    assert len(seen) == 1
