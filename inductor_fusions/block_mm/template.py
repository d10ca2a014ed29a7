"""Renders the kernel templates for the structure of one grouped GEMM."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..decisions.schema import padded
from .configurations import Config

FOLDER = Path(__file__).parent / "templates"
#: Most products that are one loop: each step chooses among their operands.
LONGEST_CHAIN = 8


@dataclass(frozen=True)
class Operand:
    """A matrix that a product reads.

    Attributes:
        name: of the kernel's argument; equal operands have one.
        inner: whether its elements lie next to each other along K.
    """

    name: str
    inner: bool


@dataclass(frozen=True)
class Factor:
    """One product, as a template sees it.

    Attributes:
        group: which group it is summed into.
        scale: its factor, not 0.
        size: K; None where it is symbolic.
        precision: of `tl.dot`: "tf32", "tf32x3" or "ieee"; only float32 depends on it.
    """

    group: int
    a: Operand
    b: Operand
    scale: float
    size: int | None
    precision: str
    dtype: str = ""


@dataclass(frozen=True)
class Norm:
    """An RMSNorm in front of the first product of each group; "row" alone has it.

    Attributes:
        gain: the name of the vector that it multiplies by, or "".
        shift: what is added to that vector.
        clamps: whether the root is that of the larger one of the mean and eps, and not of their sum.
    """

    eps: float
    gain: str
    shift: float
    clamps: bool = False


@dataclass(frozen=True)
class Structure:
    """Everything but the configuration that a rendered template depends on.

    Attributes:
        names: the kernel's arguments, in order: operands, biases, further outputs.
        biases: of each group: (name, whether it has rows), or None.
        outputs: of each group from the second on: name of its output. Empty where gated.
        gated: whether the two groups are multiplied.
        pair: whether the first products of a gated pair have weights of one layout, so that bulk copies can
            take a tile of both at once.
    """

    names: tuple[str, ...]
    factors: tuple[Factor, ...]
    biases: tuple[tuple[str, bool] | None, ...]
    activations: tuple[str, ...]
    outputs: tuple[str, ...]
    gated: bool
    pair: bool = False
    norm: Norm | None = None

    @property
    def groups(self) -> int:
        """The number of groups."""
        return len(self.activations)


@dataclass
class _Step:
    """One loop over K: a product, or two of a gated pair side by side."""

    index: int
    a: str
    a_inner: bool
    b_inner: bool
    block_k: int
    precision: str
    left: list[str]
    right: list[str]
    dots: list[dict[str, str]]
    a_mask: str = ""
    b_mask: str = ""
    whole: bool = False  # all of K in one block: Triton takes the loop away
    single: bool = False
    ragged: bool = False
    together: int = 1
    factors: list[tuple[str, float]] = field(default_factory=list)


def can_gate(structure: Structure) -> bool:
    """Whether the products of a gated pair run side by side: the same steps over the same sizes."""
    first, second = ([f for f in structure.factors if f.group == g] for g in (0, 1))
    return len(first) == len(second) and all(
        (x.a.inner, x.b.inner, x.size, x.precision) == (y.a.inner, y.b.inner, y.size, y.precision)
        for x, y in zip(first, second, strict=True)
    )


def source(
    chosen: Config, structure: Structure, rows: int = 0, early: bool = False, joined: bool = True
) -> str:
    """The text that Inductor's templates take.

    Args:
        chosen: the configuration, which names the template.
        rows: M of every group where it is known to be less than a tile has, else 0; "row" needs it.
        early: whether it starts before the kernel in front ends, and waits: "tiled" and "row".
        joined: whether the tiles of several groups may be one loop, and whether that over tiles may be one
            with a loop over K that has a product behind it: for Blackwell, Triton fails on many of them.
    """
    return render(
        FOLDER,
        f"{chosen.template}.py.jinja",
        names=structure.names,
        **_parts(structure, chosen.block_k, chosen.template == "persistent", rows, joined),
        rows=rows,
        early=early,
        thirds=chosen.block_n % 3 == 0,
        across=chosen.across,
        norm=structure.norm,
    )


def render(folder: Path, template: str, **structure: Any) -> str:
    """The text that Inductor's templates take, of one in a folder."""
    text: str = environment(folder).get_template(template).render(**structure)
    return text


def _parts(structure: Structure, block_k: int, persistent: bool, rows: int, joined: bool) -> dict[str, Any]:
    """The loops of a template: groups one by one, or sections of groups that share a loop."""
    groups = _groups(structure, block_k, persistent, rows)
    if not persistent:
        return {"groups": groups}
    parts = [groups] if joined and _is_one_loop(structure, groups) else [[g] for g in groups]
    return {"sections": [_section(part, joined) for part in parts]}


def _is_one_loop(structure: Structure, groups: Sequence[dict[str, Any]]) -> bool:
    """Whether the tiles of all groups can be one loop: they are computed alike, and Triton compiles it.

    Each step chooses the bulk copy of its group. Triton 3.6 and 3.7 fail where the loop over the tiles does
    so without a loop over K inside, and where behind that loop the sum is scaled, or a product has operands
    of another layout or dtype.
    """
    found: list[list[Any]] = [[] for _ in groups]  # all but operands, outputs and sizes of each
    for f in structure.factors if not structure.gated else ():
        found[f.group].append((f.a.inner, f.b.inner, f.scale, f.size, f.precision, f.dtype))
    if structure.gated or any(each != found[0] for each in found):
        return False
    steps = groups[0]["steps"]
    if len(groups) == 1 or groups[0]["chained"]:
        return True
    scaled = _is_flat(groups[0]) and any(step.factors for step in steps[:-1])
    kinds = {(f.a.inner, f.b.inner, f.dtype) for f in structure.factors if f.group == 0}
    return not scaled and not all(step.whole for step in steps) and len(kinds) == 1


def _is_flat(group: dict[str, Any]) -> bool:
    """Whether Triton makes one loop of those over tiles and over K: where a tile has one loop over K."""
    return group["chained"] or sum(not step.single for step in group["steps"]) == 1


def _section(groups: list[dict[str, Any]], joined: bool) -> dict[str, Any]:
    """Groups whose tiles are one loop, with what that loop reads.

    Its `lefts` and `rights` say for each step which bulk copy it takes: pairs of the first group that takes
    it and its name. `left_copies` and `right_copies` are the distinct ones: step, operand, and a group that
    has its size.
    """
    steps = range(len(groups[0]["steps"]))
    section: dict[str, Any] = {
        "groups": groups,
        "along_n": len(groups) > 1 and len({g["a"] for g in groups}) == 1,
        "chained": groups[0]["chained"],
        "flat": _is_flat(groups[0]) and (joined or not any(step.single for step in groups[0]["steps"])),
    }
    for letter, side in ("a", "left"), ("b", "right"):
        copies: dict[Any, Any] = {}
        for g, i in itertools.product(groups, steps):
            for name in getattr(g["steps"][i], side):
                copies.setdefault((i, name), (i, name, g["index"]))
        section[f"{side}_copies"] = list(copies.values())
        section[f"{side}s"] = [
            [
                (number, f"{letter}_{i}_{names[number]}")
                for number in range(len(groups))
                if number == 0 or names[number] != names[number - 1]
            ]
            for i in steps
            for names in [[getattr(g["steps"][i], side)[0] for g in groups]]
        ]
    return section


@functools.cache
def environment(folder: Path) -> Any:
    """The jinja environment of a folder: it renders << >> and [% %], and leaves {{ }} to Inductor."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        block_start_string="[%",
        block_end_string="%]",
        variable_start_string="<<",
        variable_end_string=">>",
        comment_start_string="{#-",
        comment_end_string="-#}",
        keep_trailing_newline=True,
    )


def _groups(structure: Structure, block_k: int, may_chain: bool, rows: int) -> list[dict[str, Any]]:
    owners = [(0, 1)] if structure.gated else [(g,) for g in range(structure.groups)]
    found = []
    for index, members in enumerate(owners):
        factors = [[f for f in structure.factors if f.group == g] for g in members]
        accumulators = []
        for position, group in enumerate(members):
            bias = structure.biases[group]
            accumulators.append(
                {
                    "name": "acc" if position == 0 else "acc_1",
                    "bias": bias[0] if bias else "",
                    "bias_rows": bool(bias and bias[1]),
                    "activation": structure.activations[group],
                }
            )
        first = factors[0][0]
        chained = may_chain and _is_chain(factors)
        starts = [0]  # of each product, in steps of a chain
        for factor in factors[0]:
            starts.append(starts[-1] + -(-(factor.size or 0) // block_k))
        found.append(
            {
                "index": index,
                "a": first.a.name,
                "b": first.b.name,
                "accumulators": accumulators,
                "joint": structure.pair and first.a.inner and first.b.inner,
                "chained": chained,
                "starts": starts,
                "steps": _steps(index, factors, block_k, chained, rows),
                "output": "" if index == 0 else structure.outputs[index - 1],
            }
        )
    return found


def _is_chain(factors: Sequence[Sequence[Factor]]) -> bool:
    """Whether the products of a group are one loop: the later ones are further steps of that of the first."""
    if len(factors) != 1 or not 1 < len(factors[0]) <= LONGEST_CHAIN:
        return False
    alike = {(f.a.inner, f.b.inner, f.precision, f.dtype, f.scale) for f in factors[0]}
    return len(alike) == 1 and all(f.size is not None for f in factors[0])


def _steps(
    group: int, factors: Sequence[Sequence[Factor]], block_k: int, chained: bool, rows: int
) -> list[_Step]:
    steps = []
    for index, side_by_side in enumerate(zip(*factors, strict=True)):
        first = side_by_side[0]
        size = first.size
        block = block_k
        if size is not None and not chained:
            block = min(block_k, padded(size))
        step = _Step(
            index=index,
            a=first.a.name,
            a_inner=first.a.inner,
            b_inner=first.b.inner,
            block_k=block,
            precision=first.precision,
            whole=not chained and size is not None and size <= block,
            single=index > 0 and size is not None and size <= block,
            left=list(dict.fromkeys(f.a.name for f in side_by_side)),
            right=list(dict.fromkeys(f.b.name for f in side_by_side)),
            dots=[
                {"acc": "acc" if i == 0 else "acc_1", "a": f.a.name, "b": f.b.name}
                for i, f in enumerate(side_by_side)
            ],
        )
        step.ragged = size is None or size % block != 0
        if rows > 1:
            # In "row" a thread adds up the products of one load, so that a row takes few registers of it.
            step.together = 4 if first.dtype == "torch.float32" else 8
        rest = ["{} < K - k"] if step.ragged else []
        a_masks = [text.format("rk[None, :]") for text in rest]
        b_masks = [text.format("rk[:, None]") for text in rest]
        # Where a tile has fewer rows, all thread blocks would wait for the one that is read in their place.
        if rows or not step.a_inner:
            a_masks.append(f"rm[:, None] < M_{group}")
        if not step.b_inner:
            b_masks.append(f"rn[None, :] < N_{group}")
        step.a_mask = " & ".join(f"({text})" for text in a_masks)
        step.b_mask = " & ".join(f"({text})" for text in b_masks)
        for i, f in enumerate(side_by_side):
            # The accumulator is kept in units of the next product's scale, and ends in units of 1.
            following = factors[i][index + 1].scale if index + 1 < len(factors[i]) else 1.0
            if f.scale != following:
                step.factors.append(("acc" if i == 0 else "acc_1", f.scale / following))
        steps.append(step)
    return steps
