"""The ways to compute a linear with adapters: stock, frozen, and the fusion in its configurations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.nn.functional as F

from bench import tuning_linears
from bench.common import DTYPES, Json
from bench.lora.rows import ALONE, Row
from bench.lora.spellings import ADDED, FUNCTIONS, Operands, Tensors, frozen, narrow_product

#: Configurations that are tried: of the grouped GEMM, and of the skinny GEMM beside the best of them.
BLOCK_CHOICES, NARROW_CHOICES = 6, 4
#: Configurations of a kernel that are tried where their times are to be compared: nearly all.
EVERY = 64


Run = Callable[[Operands], Tensors]
O = TypeVar("O")


def compiled(row: Row, fn: Callable[..., Tensors], operands: Operands, **options: Any) -> Run:
    """A function under `torch.compile`, compiled for `operands`; with its backward, for a step."""
    compiled_call = tuning_linears.compiled(fn, row, **options)

    def run(one: Operands) -> Tensors:
        if row.kind != "step":
            return compiled_call(one.x, one.w, one.a, one.b)  # type: ignore[no-any-return]
        (y,) = compiled_call(one.x[:1], one.w, one.a, one.b)
        return [y, *torch.autograd.grad([y], [one.x[0], *one.a, *one.b], [one.x[1]])]

    run(operands)
    return run


def stock(row: Row, operands: Operands, mode: str | None) -> Run:
    """Stock's own, with the fusions switched off."""
    from inductor_fusions import config

    with config.patch(enabled=False):
        return compiled(row, FUNCTIONS[row.kind], operands, mode=mode)


@dataclass(frozen=True)
class Choice:
    """Configurations of the kernels of one candidate; None: that of the table where a row is of several
    kernels, and the default one elsewhere."""

    block: Any = None
    narrow: Any = None
    decode: Any = None
    added: Any = None

    def _kinds(self) -> list[tuple[str, Any]]:
        return [
            ("block", self.block), ("narrow", self.narrow), ("pair", self.decode), ("tile", self.added)
        ]  # fmt: skip

    @property
    def name(self) -> str:
        """Short."""
        parts = []
        for kind, chosen in self._kinds():
            if chosen is not None:
                parts.append(f"{kind} " + "-".join(str(v) for v in asdict(chosen).values()))
        return ", ".join(parts) or "defaults"

    @classmethod
    def named(cls, text: str) -> Choice:
        """The one that has this name."""
        from inductor_fusions.block_mm import configurations
        from inductor_fusions.fusions.lora import accumulate_kernel, decode, narrow

        made = {
            "block": ("block", configurations.Config), "narrow": ("narrow", narrow.Config),
            "pair": ("decode", decode.Config), "tile": ("added", accumulate_kernel.Config),
        }  # fmt: skip
        found = {}
        for part in text.split(", ") if text != "defaults" else ():
            kind, _, values = part.partition(" ")
            name, config = made[kind]
            found[name] = config(*map(_value, values.split("-")))
        return cls(**found)


def _value(text: str) -> str | int | bool:
    """A value of a configuration."""
    return int(text) if text.isdigit() else text == "True" if text in ("True", "False") else text


class Seen:
    """The problems that the lowerings met."""

    def __init__(self) -> None:
        self.block: list[Any] = []
        self.narrow: list[Any] = []
        self.decode: list[Any] = []
        self.added: list[Any] = []


def plain(shape: Any) -> Json:
    """What a kernel is asked for, as JSON: a `narrow.Shape`, an `accumulate_kernel.Shape` or a `Problem`."""
    return {
        name: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        for name, value in vars(shape).items()
    }


def shape_of(kind: type[O], found: Json) -> O:
    """What `plain` was made of."""

    def value(name: str, given: Any) -> Any:
        if name in ("dtype", "narrow"):
            return DTYPES[given]
        return tuple(given) if isinstance(given, list) else given

    return kind(**{name: value(name, given) for name, given in found.items()})


@contextlib.contextmanager
def choosing(row: Row, choice: Choice, seen: Seen) -> Iterator[None]:
    """Inside, the kernels get these configurations."""
    from inductor_fusions import config
    from inductor_fusions.block_mm import configurations, heuristics
    from inductor_fusions.fusions.lora import accumulate_kernel, decode, lowering, narrow

    known_block, known = heuristics.choose, row.kind in ADDED or row.kind == "step" or row.dropout > 0

    def block(posed: Any, device: torch.device, tokens: int | None) -> Any:
        seen.block.append(posed)
        if known and choice.block is None and torch.cuda.is_available():
            return known_block(posed, device, tokens)
        arch = heuristics.capability(device)
        return choice.block or configurations.default(posed, arch)

    def thin(shape: Any, device: torch.device) -> Any:
        seen.narrow.append(shape)
        return choice.narrow or (narrow.measured(shape, device) if known else None) or narrow.default(shape)

    def pair(shape: Any, device: torch.device) -> Any:
        seen.decode.append(shape)
        return choice.decode or decode.default(shape)

    def tile(shape: Any, device: torch.device) -> Any:
        seen.added.append(shape)
        found = accumulate_kernel.measured(shape, device) if known and row.kind not in ADDED else None
        return choice.added or found or accumulate_kernel.default(shape)

    others = {"qkv": False, "gated_mlp": False, "linear_epilogue": False}
    with (
        config.patch(policy="always", **others),
        mock.patch.object(heuristics, "choose", block),
        mock.patch.object(lowering, "choose", thin),
        mock.patch.object(decode, "choose", pair),
        mock.patch.object(accumulate_kernel, "choose", tile),
        nullcontext() if torch.cuda.is_available() else on_the_cpu(),
    ):
        yield


@contextlib.contextmanager
def on_the_cpu() -> Iterator[None]:
    """Inside, the CPU counts as a device, to try the script: the operations are products one by one."""
    from inductor_fusions import operands
    from inductor_fusions.fusions.lora import inputs

    with (
        mock.patch.object(operands, "check_device", lambda value: None),
        mock.patch.object(inputs, "check_device", lambda value: None),
        mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: (8, 0)),
    ):
        yield


def ours(row: Row, operands: Operands, choice: Choice, seen: Seen) -> Run:
    """The fusion in one configuration.

    Raises:
        RuntimeError: nothing was fused.
    """
    import inductor_fusions

    fn = narrow_product if row.kind in ALONE else FUNCTIONS[row.kind]
    inductor_fusions.clear()
    with choosing(row, choice, seen):
        run = compiled(row, fn, operands)
    sites = list(inductor_fusions.report())
    if row.kind not in ALONE and not any(s.fusion == "lora" and s.verdict == "fused" for s in sites):
        raise RuntimeError(f"not fused: {[s.reason for s in sites]}")
    return run


def frozen_run(row: Row) -> Run:
    """The library's linears alone; of a step, with the gradient of the input."""

    def run(one: Operands) -> Tensors:
        if row.kind != "step":
            return frozen(row, one)
        return [F.linear(one.x[0].detach(), one.w[0]), one.x[1] @ one.w[0]]

    return run


def first_choices(row: Row, seen: Seen, arch: int, quick: bool, every: bool = False) -> list[Choice]:
    """What to try: configurations of the kernel that does most of the work.

    Args:
        every: all of them, in place of some.
    """
    from inductor_fusions.block_mm import configurations
    from inductor_fusions.fusions.lora import accumulate_kernel, decode, narrow

    def some(items: Sequence[Any], count: int) -> list[Any]:
        return spread(items, EVERY if every else count)

    found = [Choice()]
    if seen.decode:
        found += [Choice(decode=c) for c in decode.candidates(seen.decode[0], arch)]
    elif seen.added:
        found += [
            Choice(added=c)
            for c in some(accumulate_kernel.candidates(seen.added[0])[0 if every else 1 :], 10)
        ]
    elif row.dropout and row.kind == "forward" and seen.narrow:
        found += [Choice(narrow=c) for c in some(narrow.candidates(seen.narrow[0])[1:], 14)]
    elif seen.block and row.kind != "step":
        wanted = configurations.candidates(seen.block[0], arch)
        found += [Choice(block=c) for c in wanted[: EVERY if every else BLOCK_CHOICES]]
    elif row.kind in ALONE and seen.narrow:
        found += [Choice(narrow=c) for c in some(narrow.candidates(seen.narrow[0]), 10)]
    found = list(dict.fromkeys(found))
    return found[:3] if quick else found


def second_choices(best: Choice, seen: Seen, quick: bool) -> list[Choice]:
    """Configurations of the skinny GEMM beside the best grouped GEMM."""
    from inductor_fusions.fusions.lora import narrow

    if best.block is None or not seen.narrow:
        return []
    wanted = narrow.candidates(seen.narrow[0])[:NARROW_CHOICES]
    return [Choice(block=best.block, narrow=c) for c in wanted][: 2 if quick else None]


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """So many of them, evenly."""
    step = max(1, -(-len(items) // count))
    return list(items[::step])
