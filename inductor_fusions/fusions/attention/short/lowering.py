"""`inductor_fusions::short_attention` and its backward in Inductor: one Triton kernel each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .... import _inductor
from ....block_mm import template
from ....decisions.schema import padded
from ....fusion import Rejected
from ....lowering import check_templates
from ....operands import may_use_tf32
from . import op, plan

TEMPLATES = Path(__file__).parent / "templates"
#: Dtypes of q, k and v that the kernels take.
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
#: Masks that the kernels add up at most.
MOST_MASKS = 8


def forward(*given: Any) -> Any:
    """The result of one kernel; the arguments are those of the operation.

    Raises:
        Rejected: there is no kernel for it.
    """
    return Call(*given).forward()[0]


def backward(grad: Any, *given: Any) -> list[Any]:
    """The gradients of `forward`, by one kernel; `given` are its arguments and the number of windows, or 0.

    Raises:
        Rejected: there is no kernel for it.
    """
    return Call(*given[:-1]).backward(grad, given[-1])


class Call:
    """One call of the operation while it is lowered.

    Args:
        q, k, v, masks, numbers, scale, causal: as in `op`, with Inductor's values for tensors.
    """

    def __init__(
        self, q: Any, k: Any, v: Any, masks: Sequence[Any], numbers: Sequence[float], scale: float,
        causal: bool,
    ) -> None:  # fmt: skip
        self.device = q.get_device()
        self.dtype = q.get_dtype()
        check_templates(self.device)
        if self.dtype not in DTYPES or len(masks) > MOST_MASKS:
            raise Rejected(f"no kernel for {self.dtype} with {len(masks)} masks")
        sizes = [_inductor.sizes(x) for x in (q, k, v)]
        if not all(isinstance(n, int) for size in sizes for n in size[1:]):
            raise Rejected("lengths, heads or head dims are symbolic")
        longest, widest = max(sizes[0][2], sizes[1][2]), max(sizes[0][3], sizes[2][3])
        if why := plan.too_large(longest, widest, self.dtype):
            raise Rejected(why)
        self.q, self.k, self.v, *self.masks = _inductor.realize([q, k, v, *masks])
        self.shape, self.kv_len, self.v_dim = sizes[0], sizes[1][2], sizes[2][3]
        self.numbers, self.scale, self.causal = list(numbers), float(scale), causal
        self.period = self._find_period()

    def forward(self) -> list[Any]:
        """The result of one kernel."""
        chosen = plan.forward(self.shape, self.kv_len, self.v_dim, self.period, bool(self.masks), self.dtype)
        blocks = math.ceil(self.shape[2] / chosen.block_m)
        inputs = [("Q", self.q), ("K", self.k), ("V", self.v), *self._named_masks()]
        shape = (*self.shape[:3], self.v_dim)
        return self._kernel(
            "short_attention", inputs, [_inductor.Output("", shape, op.dense(*shape), self.dtype)],
            chosen, blocks, blocks * self.shape[1],
        )  # fmt: skip

    def backward(self, grad: Any, windows: int) -> list[Any]:
        """The gradients, of one kernel."""
        (grad,) = _inductor.realize([grad])
        given = windows or plan.windows_of(self.shape, self.kv_len, self.period)
        fills = any(mask.get_dtype() == torch.bool for mask in self.masks)
        chosen = plan.backward(
            self.shape, self.kv_len, self.v_dim, given if self.masks else 1, fills, self.dtype
        )
        blocks = math.ceil(self.shape[2] / chosen.block_m)
        if blocks > 1 and chosen.windows > 1:
            raise Rejected("a program has several samples and several blocks of queries")
        inputs = [("G", grad), ("Q", self.q), ("K", self.k), ("V", self.v), *self._named_masks()]
        k_shape, v_shape = _inductor.sizes(self.k), _inductor.sizes(self.v)
        outputs = [
            _inductor.Output(name, size, op.dense(*size), self.dtype)
            for name, size in (("", self.shape), ("DK", k_shape), ("DV", v_shape))
        ]
        if windows:
            repeats = self.shape[0] // self.period
            parts = (repeats + windows - 1) // windows
            size = (parts, self.period, self.shape[1], self.shape[2], self.kv_len)
            strides = [1]
            for n in reversed(size[1:]):
                strides.insert(0, strides[0] * n)
            outputs.append(_inductor.Output("DS", size, tuple(strides), torch.float32))
        return self._kernel(
            "short_attention_backward", inputs, outputs, chosen, blocks, self.shape[1], change=bool(windows)
        )

    def _find_period(self) -> Any:
        """The number of samples after which the masks repeat; symbolic if it is the whole batch."""
        sizes = [_inductor.sizes(mask)[0] for mask in self.masks]
        if any(size == self.shape[0] for size in sizes):
            return self.shape[0]
        if not all(isinstance(size, int) for size in sizes):
            raise Rejected("the batch size of a mask is symbolic")
        return max(sizes, default=1)

    def _named_masks(self) -> list[tuple[str, Any]]:
        return [(f"MASK{i}", mask) for i, mask in enumerate(self.masks)]

    def _kernel(
        self, name: str, inputs: list[tuple[str, Any]], outputs: list[_inductor.Output], chosen: plan.Plan,
        blocks: int, programs: int, **more: Any,
    ) -> list[Any]:  # fmt: skip
        text = self._source(name.removeprefix("short_attention_"), inputs, outputs, chosen, blocks, **more)
        return _inductor.lower_to_kernel(
            name=name,
            inputs=inputs,
            outputs=outputs,
            device=self.device,
            grid=_programs,
            grid_sizes=[self.shape[0], self.period],
            variant=_inductor.Variant(
                source=text,
                meta={"PROGRAMS": programs, "WINDOWS": chosen.windows},
                num_warps=chosen.num_warps,
                num_stages=chosen.num_stages,
                outputs=tuple(out.name for out in outputs[1:]),
            ),
        )

    def _source(
        self, name: str, inputs: list[tuple[str, Any]], outputs: list[_inductor.Output], chosen: plan.Plan,
        blocks: int, change: bool = False,
    ) -> str:  # fmt: skip
        block_d, block_e = padded(self.shape[3]), padded(self.v_dim)
        sizes = {"i": self.shape[2], "j": self.kv_len, "d": self.shape[3], "e": self.v_dim}
        tiles = {"i": blocks * chosen.block_m, "j": chosen.block_n, "d": block_d, "e": block_e}
        ragged = {axis: sizes[axis] != tiles[axis] for axis in sizes}
        terms = [
            self._term(f"MASK{i}", mask, number, ragged)
            for i, (mask, number) in enumerate(zip(self.masks, self.numbers, strict=True))
        ]
        return template.render(
            TEMPLATES,
            "backward.py.jinja" if name == "backward" else "forward.py.jinja",
            names=[*(n for n, _ in inputs), *(out.name for out in outputs[1:])],
            terms=terms,
            fills=any(term["boolean"] for term in terms),
            based=bool(terms) or self.causal or ragged["j"],
            causal=self.causal,
            scale=repr(self.scale),
            precision=_precision(),
            period=str(self.period) if isinstance(self.period, int) else '{{size("Q", 0)}}',
            windows=chosen.windows,
            blocks=blocks,
            block_m=chosen.block_m,
            block_n=chosen.block_n,
            block_d=block_d,
            block_e=block_e,
            sizes=sizes,
            ragged=ragged,
            change=change,
        )

    def _term(self, name: str, mask: Any, number: float, ragged: dict[str, bool]) -> dict[str, Any]:
        """The arguments of the template for one mask: how it is addressed and applied."""
        sizes, strides = _inductor.sizes(mask), _inductor.strides(mask)
        varies = [size != 1 and stride != 0 for size, stride in zip(sizes, strides, strict=True)]
        text = [f'{{{{stride("{name}", {dim})}}}}' for dim in range(4)]
        place, within = [name], []
        if varies[0]:
            index = "r" if sizes[0] == self.period else f"(r % {sizes[0]})"
            place.append(f"{index}.to(tl.int64) * {text[0]}")
        if varies[1]:
            place.append(f"h * {text[1]}")
        if varies[2]:
            place.append(f"i[:, None] * {text[2]}")
            if ragged["i"]:
                within.append(f"(i[:, None] < {self.shape[2]})")
        if varies[3]:
            place.append(f"j[None, :] * {text[3]}")
            if ragged["j"]:
                within.append(f"(j[None, :] < {self.kv_len})")
        return {
            "place": " + ".join(place),
            "within": " & ".join(within),
            "boolean": mask.get_dtype() == torch.bool,
            "number": _literal(number),
        }


def _literal(number: float) -> str:
    limit = torch.finfo(torch.float32).max
    return f'float("{"-" if number < 0 else ""}inf")' if abs(number) > limit else repr(float(number))


def _precision() -> str:
    """How float32 is multiplied: as torch is told to."""
    return '"tf32"' if may_use_tf32() else '"ieee"'


def _programs(batch: Any, period: Any, meta: dict[str, Any], *, cdiv: Any, min: Any) -> tuple[Any, int, int]:
    """The grid: blocks of queries and heads, times samples with the same masks."""
    return (period * meta["PROGRAMS"] * cdiv(batch, period * meta["WINDOWS"]), 1, 1)
