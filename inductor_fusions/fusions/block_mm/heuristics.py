"""Which kernel a block GEMM gets on a device, and whether it is measured to pay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from ... import config, tables
from ...fusion import LeftToStock
from ...operands import known_size

Template = Literal["tiled", "persistent", "row"]

#: How far apart two measured numbers of rows may be for one between them to count as covered.
BRACKET = 8
#: Most rows that are multiplied without tensor cores.
MOST_SINGLE_ROWS = 4


@dataclass(frozen=True)
class Problem:
    """The sizes of a block GEMM.

    Attributes:
        rows: M of each group; None where it is symbolic.
        columns: N of each group.
        inner: K of each product; None where it is symbolic.
        groups: group of each product.
        layouts: of each product, two letters: whether a and b have their elements in order ("n", along
            the last dim) or are transposed ("t", along the first).
        dtype: of the operands of the first product.
        gated: whether the two groups are multiplied.
        shared: "a" or "b" where all products have that operand in common, else "".
        activation: that the kernel applies to the first group; what the scheduler fuses behind it is not
            known here.
    """

    rows: tuple[int | None, ...]
    columns: tuple[int, ...]
    inner: tuple[int | None, ...]
    groups: tuple[int, ...]
    layouts: tuple[str, ...]
    dtype: torch.dtype
    gated: bool = False
    shared: str = ""
    activation: str = ""

    @property
    def kind(self) -> str:
        """What tables call it: "gated", "shared_a", "shared_b", "sum", "linear", or "mixed"."""
        count = self.groups[-1] + 1
        if self.gated:
            return "gated"
        if count == 1:
            return "linear" if len(self.groups) == 1 else "sum"
        if len(self.groups) == count and self.shared:
            return f"shared_{self.shared}"
        return "mixed"

    @property
    def key(self) -> dict[str, Any]:
        """What a row of a table must agree in. Rows of a shared a, K of a shared b, are left open."""
        open_inner = self.kind == "shared_b"
        return {
            "kind": self.kind,
            **({"groups": list(self.groups)} if self.kind == "mixed" else {}),
            **({"activation": self.activation} if self.kind in ("gated", "linear") else {}),
            "n": list(self.columns),
            "m": list(self.rows) if open_inner else None,
            "k": None if open_inner else list(self.inner),
            "layout": list(self.layouts),
            "dtype": tables.dtype_name(self.dtype),
        }

    @property
    def tokens(self) -> int | None:
        """The size that differs from call to call: rows, or K where the gradient of weights is computed."""
        return self.inner[0] if self.kind == "shared_b" else self.rows[0]


@dataclass(frozen=True)
class Config:
    """One configuration of a template.

    Attributes:
        template: "tiled" (a tile for each thread block), "persistent" (bulk tensor copies, as many thread
            blocks as the multiprocessors hold) or "row" (few rows of input, without tensor cores).
        block_m, block_n, block_k: the tile; of "row", `block_m` is the most rows that it is for.
        num_warps, num_stages: as Triton has them.
        group_m: tiles in M that are neighbours in time.
        subtiles: parts in which a tile is stored.
        per_processor: thread blocks of a persistent kernel on each multiprocessor.
    """

    template: Template
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    subtiles: int = 1
    per_processor: int = 1

    def to_json(self) -> dict[str, Any]:
        """As tables have it."""
        return asdict(self)


@dataclass(frozen=True)
class Choice:
    """What a device gets for a problem.

    Attributes:
        config: the kernel.
        note: for the report: where it comes from.
    """

    config: Config
    note: str


def capability(device: torch.device) -> int:
    """Compute capability as one number: 80, 90, 100."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def choose(problem: Problem, device: torch.device) -> Choice:
    """The kernel for a problem.

    Raises:
        LeftToStock: no measurement says that one pays, and the policy asks for that.
    """
    if capability(device) < 80:
        raise LeftToStock("the device is older than compute capability 8.0")
    try:
        return measured(problem, device)
    except LeftToStock:
        if config.policy != "always":
            raise
    return Choice(default(problem, capability(device)), ", not measured")


def measured(problem: Problem, device: torch.device) -> Choice:
    """What the table of a device says.

    A row counts for its own number of rows; two rows count for those between them where both are faster
    than stock and not further apart than a factor of 8.

    Raises:
        LeftToStock: nothing that holds for this problem, or that it does not pay.
    """
    name = tables.device_name(device)
    table = tables.load(name)
    if table is None:
        raise LeftToStock(f"no measurements for the device {name}")
    tokens = problem.tokens
    if tokens is None:
        raise LeftToStock("the number of rows is not known when the kernel is chosen")
    known = sorted(
        (row for row in table.get("block_mm", []) if _matches(row, problem)), key=lambda row: row["tokens"]
    )
    below = [row for row in known if row["tokens"] <= tokens]
    above = [row for row in known if row["tokens"] >= tokens]
    if not below or not above or above[0]["tokens"] > BRACKET * below[-1]["tokens"]:
        raise LeftToStock(f"not measured on {name}: {describe(problem)}")
    around = (below[-1], above[0])
    gain = min(row["gain"] for row in around)
    if gain < tables.MARGIN or any(row["config"] is None for row in around):
        raise LeftToStock(f"not measured to be faster than stock on {name} at this shape")
    fitting = [row for row in around if suits(Config(**row["config"]), problem)]
    if not fitting:
        raise LeftToStock(f"the kernels that were measured on {name} take other numbers of rows")
    nearest = min(fitting, key=lambda row: abs(math.log2(row["tokens"] / tokens)))
    return Choice(Config(**nearest["config"]), f", {gain:.2f}x measured")


def suits(choice: Config, problem: Problem) -> bool:
    """Whether a template takes a problem at all."""
    if choice.template == "row":
        return 0 < few_rows(problem) <= choice.block_m
    return choice.template == "tiled" or _bulk_copies(problem)


def _matches(row: dict[str, Any], problem: Problem) -> bool:
    return all(row.get(name) == wanted for name, wanted in problem.key.items())


def describe(problem: Problem) -> str:
    """A problem in words: "2048 x (4096 -> 14336 + 14336), bfloat16, silu"."""
    inner = problem.inner if problem.kind == "sum" else dict.fromkeys(problem.inner)
    rows = " + ".join(_text(m) for m in dict.fromkeys(problem.rows))
    sizes = f"{' + '.join(_text(k) for k in inner)} -> {' + '.join(_text(n) for n in problem.columns)}"
    words = [f"{rows} x ({sizes})", str(problem.dtype).removeprefix("torch."), problem.activation]
    return ", ".join(filter(None, words))


def _text(size: int | None) -> str:
    return "?" if size is None else str(size)


def default(problem: Problem, arch: int) -> Config:
    """A configuration that fits every device of an architecture; it is not tuned.

    Args:
        problem: what is computed.
        arch: 80, 90, 100.
    """
    rows = [512 if m is None else m for m in problem.rows]
    wide = problem.dtype == torch.float32
    most = max(rows)
    if few := few_rows(problem):
        block_n, block_k = 2 if few == 1 or problem.gated else 4, 512 if few > 1 and wide else 1024
        return Config("row", tall(few), block_n, _row_step(problem, block_k), 4, 1)
    if most <= 64:
        block_m = max(16, tall(most))
        block_k = 64 if wide else 128
        stages = 3 if wide or block_m == 64 else 4
        return Config("tiled", block_m, 32, block_k, 4, stages)
    if arch >= 90 and not wide and _bulk_copies(problem, arch):
        small = tiles(problem, 128, 256) < 100
        if problem.gated:
            return Config("persistent", 128, 64 if small else 128, 64, 8, 3, subtiles=1)
        if small or not _are_alike(problem):
            return Config("persistent", 128, 128, 64, 8, 4)
        return Config("persistent", 128, 256, 64, 8, 3, subtiles=2)
    if wide or problem.gated or most <= 256:
        return Config("tiled", 64, 64, 32, 4, 3)
    return Config("tiled", 128, 128, 32, 8, 3)


def _are_alike(problem: Problem) -> bool:
    """Whether the groups are few and computed alike; the code of others takes registers of their tiles."""
    kinds = [
        [(k, x) for g, k, x in zip(problem.groups, problem.inner, problem.layouts, strict=True) if g == group]
        for group in set(problem.groups)
    ]
    return len(kinds) <= 4 and all(kind == kinds[0] for kind in kinds)


def few_rows(problem: Problem) -> int:
    """The number of rows, where the template for a few takes them: weights that lie along K. Else 0."""
    rows = problem.rows[0]
    if rows is None or rows > MOST_SINGLE_ROWS or set(problem.rows) != {rows} or None in problem.inner:
        return 0
    return rows if {x[1] for x in problem.layouts} == {"t"} else 0


def tall(rows: int) -> int:
    """The power of two that holds so many rows."""
    return 1 << max(0, rows - 1).bit_length()


def _row_step(problem: Problem, wanted: int) -> int:
    """A step of K that no product is much shorter than, except for those of adapters."""
    longest = max(k for k in problem.inner if k is not None)
    return min(wanted, max(16, 1 << (longest - 1).bit_length()))


def _bulk_copies(problem: Problem, arch: int = 90) -> bool:
    """Whether the persistent template takes it: bulk copies know their sizes in advance.

    Without a loop over K, what is added to the next tiles is under way as well on Blackwell, where shared
    memory has no room for it.
    """
    if None in problem.inner:
        return False
    steps = [
        max(k or 0 for g, k in zip(problem.groups, problem.inner, strict=True) if g == group)
        for group in set(problem.groups)
    ]
    return arch < 100 or min(steps) > 64


def tiles(problem: Problem, block_m: int, block_n: int) -> int:
    """Number of tiles of a problem."""
    groups = list(zip(problem.rows, problem.columns, strict=True))[: 1 if problem.gated else None]
    return sum(-(-(512 if m is None else m) // block_m) * -(-n // block_n) for m, n in groups)


#: Tiles without tensor cores: columns, step of K, warps.
ONE_ROW = (
    (1, 2048, 4), (2, 2048, 4), (2, 1024, 4), (4, 2048, 8), (4, 1024, 4), (2, 1024, 2), (1, 4096, 8),
    (1, 1024, 4),
)  # fmt: skip
SOME_ROWS = (
    (4, 1024, 4), (2, 1024, 4), (2, 2048, 4), (4, 512, 4), (8, 512, 4), (1, 2048, 4), (4, 512, 2),
    (2, 512, 2),
)  # fmt: skip


def candidates(problem: Problem, arch: int) -> list[Config]:
    """Configurations worth measuring, for tuning and for `max_autotune`."""
    most = max(512 if m is None else m for m in problem.rows)
    found = [default(problem, arch)]
    few = few_rows(problem)
    if few:
        for block_n, block_k, warps in ONE_ROW if few == 1 else SOME_ROWS:
            if block_n * _row_step(problem, block_k) >= 32 * warps * (2 if few == 1 else 8):
                found.append(Config("row", tall(few), block_n, _row_step(problem, block_k), warps, 1))
    if few == 1:
        for block_n in (16, 32, 64):
            found.append(Config("tiled", 16, block_n, 256, 2, 4))
    elif most <= 64:
        block_m = max(16, tall(most))
        for block_n, block_k, warps, stages in (
            (16, 256, 2, 4), (32, 256, 2, 4), (64, 256, 2, 4), (64, 256, 4, 3), (64, 256, 8, 4),
            (64, 128, 4, 5), (32, 128, 4, 5), (16, 128, 2, 4),
        ):  # fmt: skip
            found.append(Config("tiled", block_m, block_n, block_k, warps, stages))
    elif arch >= 90 and problem.dtype != torch.float32 and _bulk_copies(problem, arch):
        for block_m, columns, warps, stages, parts, each, group_m in (
            (128, 256, 8, 3, 2, 1, 8), (128, 256, 8, 3, 1, 1, 16), (128, 128, 4, 3, 1, 2, 8),
            (128, 128, 4, 3, 1, 2, 16), (128, 128, 8, 4, 1, 1, 8), (64, 256, 4, 4, 1, 1, 8),
            (256, 128, 8, 3, 2, 1, 8), (64, 128, 4, 4, 1, 2, 8),
            # Four stages leave no room for a whole tile that is stored, so it goes in parts.
            (128, 256, 8, 4, 4, 1, 8),
        ):  # fmt: skip
            # A gated pair has two accumulators, each of half of the columns.
            block_n, parts = (columns // 2, 1) if problem.gated else (columns, parts)
            found.append(Config("persistent", block_m, block_n, 64, warps, stages, group_m, parts, each))
    if 64 < most <= 2048 or arch < 90:
        for block_m, block_n, block_k, warps, stages in (
            (64, 64, 64, 4, 4), (64, 64, 64, 4, 6), (64, 64, 128, 4, 3), (64, 64, 128, 4, 5),
            (128, 128, 64, 8, 4), (64, 128, 64, 4, 4), (128, 64, 64, 4, 4), (128, 64, 128, 8, 4),
            (64, 32, 128, 4, 4),
        ):  # fmt: skip
            found.append(Config("tiled", block_m, block_n, block_k, warps, stages))
    if 64 < most <= 2048 and arch >= 90:
        # One tile for each multiprocessor, as large as its accumulator can be: loads by pointer start a
        # microsecond earlier for each descriptor of a bulk copy that is not made.
        for block_m, columns, block_k, warps, stages in (
            (64, 128, 128, 4, 4), (64, 128, 128, 8, 4), (64, 128, 64, 4, 6), (128, 128, 64, 8, 6),
            (64, 256, 64, 4, 4), (64, 256, 64, 8, 4), (128, 256, 64, 8, 4),
        ):  # fmt: skip
            block_n = columns // 2 if problem.gated else columns
            found.append(Config("tiled", block_m, block_n, block_k, warps, stages))
    return [
        c
        for c in dict.fromkeys(found)
        if shared_bytes(c, problem) <= SHARED_LIMIT[arch] // c.per_processor
        and _fits_registers(c, problem, arch)
    ]


def _fits_registers(choice: Config, problem: Problem, arch: int) -> bool:
    """Whether the accumulators and the tiles of one step leave a thread without spills, as compiled."""
    if choice.template == "tiled" and choice.block_m >= 64:
        if choice.block_k > 128 or (choice.num_warps == 8 and choice.block_n == 16):
            return False
    if choice.template == "tiled" and choice.num_warps == 2:
        if (choice.block_m + choice.block_n) * choice.block_k > 80 * 256:
            return False
    columns = choice.block_n * (2 if problem.gated else 1)
    if choice.template == "row":
        most = 16 if choice.block_m > 1 and problem.dtype == torch.float32 else 64
        return columns * choice.block_k <= most * 32 * choice.num_warps
    held = choice.block_m * columns // (32 * choice.num_warps)
    return held <= (64 if choice.template == "tiled" and arch < 90 else 128)


#: Shared memory of one thread block, in bytes.
SHARED_LIMIT = {80: 166912, 90: 232448, 100: 232448}


def shared_bytes(choice: Config, problem: Problem, stored: int = 0) -> int:
    """About what a configuration needs of shared memory for the tiles that are under way.

    Args:
        choice: the configuration.
        problem: what is computed.
        stored: bytes of a part of a tile that goes through shared memory when it is stored.
    """
    if choice.template == "row":
        return 0
    # Two products that are multiplied may have an input each.
    pair = problem.gated and len(problem.groups) == 2 and problem.shared != "a"
    rows, columns = choice.block_m * (1 + pair), choice.block_n * (1 + problem.gated)
    step = (rows + columns) * problem.dtype.itemsize
    if choice.template == "tiled":
        return step * choice.block_k * choice.num_stages
    ahead, last = 0, 0
    for group in set(problem.groups):
        inner = [k for g, k in zip(problem.groups, problem.inner, strict=True) if g == group]
        short = [max(16, tall(k)) for k in inner if k is not None and k <= choice.block_k]
        # Without a loop over K, all products of the next tiles are under way.
        ahead = max(ahead, sum(short) if len(short) == len(inner) else choice.block_k)
        last = max([last, *short[-1:]]) if len(short) < len(inner) else last
    return step * ahead * choice.num_stages + max(step * last, stored)


def fitted(choice: Config, problem: Problem, arch: int, dtype: torch.dtype) -> Config:
    """A configuration whose tiles are stored in so many parts, or read so little ahead, that they fit.

    Tables are measured with outputs of the dtype of the operands. Others may be wider, and so may be what the
    scheduler stores in their place; a part is staged in shared memory beside the tiles that are under way.

    Args:
        choice: the configuration.
        problem: what is computed.
        arch: 80, 90, 100.
        dtype: the widest that is stored.
    """
    if choice.template != "persistent":
        return choice

    def needed(tried: Config) -> int:
        part = tried.block_m * tried.block_n // tried.subtiles * dtype.itemsize
        return shared_bytes(tried, problem, part)

    limit = SHARED_LIMIT[arch]
    # A gated pair is stored in one part.
    if dtype.itemsize > problem.dtype.itemsize and not problem.gated:
        while needed(choice) > limit // choice.per_processor and choice.block_n // choice.subtiles > 16:
            choice = replace(choice, subtiles=2 * choice.subtiles)
    while needed(choice) > limit and choice.num_stages > 2:
        choice = replace(choice, num_stages=choice.num_stages - 1)
    return choice


def of_operands(
    a: Sequence[Any],
    b: Sequence[Any],
    groups: Sequence[int],
    gated: bool,
    dtype: torch.dtype,
    names: Any,
    activation: str = "",
) -> Problem:
    """A problem from (sizes, strides) of its operands.

    Args:
        a, b: of each product: ((rows, columns), (strides)).
        groups: group of each product.
        gated: whether the groups are multiplied.
        dtype: of the operands.
        names: of each product: what tells its operands apart, a pair.
        activation: of the first group.
    """

    first = [list(groups).index(group) for group in range(groups[-1] + 1)]
    shared = "a" if len({pair[0] for pair in names}) == 1 else ""
    shared = shared or ("b" if len({pair[1] for pair in names}) == 1 else "")
    return Problem(
        rows=tuple(known_size(a[p][0][0]) for p in first),
        columns=tuple(known_size(b[p][0][1]) or 0 for p in first),
        inner=tuple(known_size(left[0][1]) for left in a),
        groups=tuple(groups),
        layouts=tuple(_letter(left) + _letter(right) for left, right in zip(a, b, strict=True)),
        dtype=dtype,
        gated=gated,
        shared=shared,
        activation=activation,
    )


def _letter(operand: Any) -> str:
    (_, _), (_, last) = operand
    return "n" if last == 1 else "t"
