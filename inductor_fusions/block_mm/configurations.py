"""Kernel configurations: which are valid for a problem, and which are candidates for tuning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from ..decisions import devices
from ..decisions.problems import FEW_ROWS
from ..decisions.schema import NARROWEST, padded
from .problem import Problem, few_rows, tiles

Template = Literal["tiled", "persistent", "row"]


@dataclass(frozen=True)
class Config:
    """One configuration of a template.

    Attributes:
        template: "tiled" (a tile for each thread block), "persistent" (bulk tensor copies, as many thread
            blocks as the multiprocessors hold) or "row" (few rows of input, without tensor cores).
        block_m, block_n, block_k: the tile; powers of two, but `block_n` of "tiled" may be three times one.
            Of "row", `block_m` is the most rows that it is for.
        group_m: tiles in M that are neighbours in time.
        subtiles: parts in which a tile is stored.
        per_processor: thread blocks of a persistent kernel on each multiprocessor.
        across: whether the tiles of "tiled" go across groups, as if their weights lay beside each other.
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
    across: bool = False


def suits(choice: Config, problem: Problem) -> bool:
    """Whether a template takes a problem at all."""
    if choice.template == "row":
        return 0 < few_rows(problem) <= choice.block_m
    if choice.across and not _lie_alike(problem):
        return False
    return choice.template == "tiled" or _bulk_copies(problem)


def _lie_alike(problem: Problem) -> bool:
    """Whether the columns of all groups are computed alike: one input, and weights contiguous along K."""
    return (
        problem.kind == "shared_a"
        and {x[1] for x in problem.layouts} == {"t"}
        and len(set(problem.inner)) == 1
    )


def default(problem: Problem, arch: int) -> Config:
    """A configuration that fits every device of an architecture; it is not tuned.

    Args:
        arch: 80, 86, 89, 90, 100, 120.
    """
    rows = [512 if m is None else m for m in problem.rows]
    wide = problem.dtype == torch.float32
    most = max(rows)
    if few := few_rows(problem):
        block_n, block_k = 2 if few == 1 or problem.gated else 4, 512 if few > 1 and wide else 1024
        return Config("row", padded(few, 1), block_n, row_step(_longest(problem), block_k), 4, 1)
    if most <= FEW_ROWS:
        block_m = padded(most)
        block_k = 64 if wide else 128
        stages = 3 if wide or block_m == 64 else 4
        return Config("tiled", block_m, 32, block_k, 4, stages)
    if 90 <= arch < 120 and not wide and _bulk_copies(problem, arch):
        small = tiles(problem, 128, 256) < 100
        if problem.gated:
            return Config("persistent", 128, 64 if small else 128, 64, 8, 3, subtiles=1)
        if small or not _are_alike(problem):
            return Config("persistent", 128, 128, 64, 8, 4)
        return Config("persistent", 128, 256, 64, 8, 3, subtiles=2)
    return _any_size(problem)


def _any_size(problem: Problem) -> Config:
    """A tiled configuration for more than 64 rows, with room for it on every device."""
    most = max(512 if m is None else m for m in problem.rows)
    if problem.dtype == torch.float32 or problem.gated or most <= 256:
        return Config("tiled", 64, 64, 32, 4, 3)
    return Config("tiled", 128, 128, 32, 8, 3)


def _are_alike(problem: Problem) -> bool:
    """Whether the groups are few and computed alike; otherwise their code takes registers from the tiles."""
    kinds = [
        [(k, x) for g, k, x in zip(problem.groups, problem.inner, problem.layouts, strict=True) if g == group]
        for group in set(problem.groups)
    ]
    return len(kinds) <= 4 and all(kind == kinds[0] for kind in kinds)


def with_norm(choice: Config, problem: Problem) -> Config:
    """The configuration of "row" with an RMSNorm in front of one row.

    The norm takes registers, so that the tiles of the tables leave room for fewer thread blocks. Long gated
    pairs read two weights in each step, for which eight warps have the registers. `bench.norm_linear` has
    measured these tiles and others.
    """
    if few_rows(problem) != 1:
        return choice
    if problem.gated and min(k or 0 for k in problem.inner) >= 4096:
        return Config("row", 1, 2, 2048, 8, 1)
    return Config("row", 1, 2, step_with_norm(_longest(problem)), 4, 1)


def step_with_norm(width: int) -> int:
    """The step of K with an RMSNorm of a width in front: none is half empty if a shorter one avoids that.

    A single step of 2,048 is faster than two of which the second is half empty.
    """
    if width % 1024 and width <= 2048:
        return padded(width)
    return 512 if 0 < width % 1024 <= 512 else 1024


def row_step(inner: int, wanted: int, least: int = NARROWEST) -> int:
    """A step of K, without tensor cores, that a product of this K is not much shorter than."""
    return min(wanted, padded(inner, least))


def loaded_well(
    tried: Iterable[tuple[int, int, int]], inner: int, each: int, least: int = NARROWEST
) -> Iterator[tuple[int, int, int]]:
    """The tiles, without tensor cores, that give each thread enough to load: columns, step of K, warps.

    Args:
        tried: the same, with the step that is wanted.
        each: elements for a thread; those of more than one row are loaded at once.
    """
    for block_n, wanted, warps in tried:
        block_k = row_step(inner, wanted, least)
        if block_n * block_k >= 32 * warps * each:
            yield block_n, block_k, warps


def _longest(problem: Problem) -> int:
    return max(k for k in problem.inner if k is not None)


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


#: Tiles without tensor cores: columns, step of K, warps. The kernels of adapters have others, and they are
#: tried in another order.
ONE_ROW = (
    (1, 2048, 4), (2, 2048, 4), (2, 1024, 4), (4, 2048, 8), (4, 1024, 4), (2, 1024, 2), (1, 4096, 8),
    (1, 1024, 4),
)  # fmt: skip
SOME_ROWS = (
    (4, 1024, 4), (2, 1024, 4), (2, 2048, 4), (4, 512, 4), (8, 512, 4), (1, 2048, 4), (4, 512, 2),
    (2, 512, 2),
)  # fmt: skip


#: Tiles for up to 64 rows: columns, step of K, warps, stages.
FEW = (
    (16, 256, 2, 4), (32, 256, 2, 4), (64, 256, 2, 4), (64, 256, 4, 3), (64, 256, 8, 4), (64, 128, 4, 5),
    (32, 128, 4, 5), (16, 128, 2, 4),
)  # fmt: skip
#: Persistent tiles: rows, columns, warps, stages, parts of a stored tile, thread blocks of a multiprocessor,
#: and `group_m`. Four stages leave no room for a whole tile that is stored, so it goes in parts.
PERSISTENT = (
    (128, 256, 8, 3, 2, 1, 8), (128, 256, 8, 3, 1, 1, 16), (128, 128, 4, 3, 1, 2, 8),
    (128, 128, 4, 3, 1, 2, 16), (128, 128, 8, 4, 1, 1, 8), (64, 256, 4, 4, 1, 1, 8),
    (256, 128, 8, 3, 2, 1, 8), (64, 128, 4, 4, 1, 2, 8), (128, 256, 8, 4, 4, 1, 8),
)  # fmt: skip
#: Tiles for some rows: rows, columns, step of K, warps, stages.
SOME = (
    (64, 64, 64, 4, 4), (64, 64, 64, 4, 6), (64, 64, 128, 4, 5), (128, 128, 64, 8, 4), (64, 128, 64, 4, 4),
    (128, 64, 64, 4, 4), (64, 32, 128, 4, 4),
)  # fmt: skip
#: One tile for each multiprocessor, as large as its accumulator can be: loads by pointer start a microsecond
#: earlier for each descriptor of a bulk copy that is not made. Widths of models are multiples of three or
#: divide badly: tiles of 96 and 192 fill the device.
LARGE = (
    (64, 128, 128, 4, 4), (64, 128, 64, 4, 6), (128, 128, 64, 8, 6), (64, 256, 64, 4, 4),
    (64, 256, 64, 8, 4), (128, 256, 64, 8, 4), (64, 96, 128, 4, 4), (64, 96, 64, 4, 6), (128, 96, 64, 4, 4),
    (128, 96, 64, 8, 4), (64, 192, 64, 4, 4), (64, 192, 64, 4, 6), (128, 192, 64, 8, 4),
)  # fmt: skip
#: Tiles that go across groups.
ACROSS = (
    (64, 96, 128, 4, 5), (128, 96, 64, 4, 4), (64, 192, 64, 4, 4), (64, 192, 64, 4, 6),
    (128, 192, 64, 8, 4), (64, 128, 128, 4, 4), (64, 128, 64, 4, 4),
)  # fmt: skip


def candidates(problem: Problem, arch: int) -> list[Config]:
    """Configurations worth measuring, for tuning and for `max_autotune`."""
    most = max(512 if m is None else m for m in problem.rows)
    few, some = few_rows(problem), FEW_ROWS < most <= 2048
    found = [default(problem, arch), *_of_few_rows(problem, few)]
    if few == 1:
        found += [Config("tiled", 16, block_n, 256, 2, 4) for block_n in (16, 32, 64)]
    elif most <= FEW_ROWS:
        found += [Config("tiled", padded(most), *tile) for tile in FEW]
    elif arch >= 90 and problem.dtype != torch.float32 and _bulk_copies(problem, arch):
        found += _persistent(problem)
    if some or arch < 90:
        found += [Config("tiled", *tile) for tile in SOME]
    if some and arch >= 90:
        # A gated pair has two accumulators, each of half of the columns.
        halves = 2 if problem.gated else 1
        for block_m, columns, block_k, warps, stages in LARGE:
            found.append(Config("tiled", block_m, columns // halves, block_k, warps, stages))
        found += _across(problem)
    return [c for c in dict.fromkeys(found) if fits(c, problem, arch)]


def _of_few_rows(problem: Problem, few: int) -> list[Config]:
    """Configurations of "row" that give each thread enough to load."""
    if not few:
        return []
    tried, each = (ONE_ROW, 2) if few == 1 else (SOME_ROWS, 8)
    return [Config("row", padded(few, 1), *tile, 1) for tile in loaded_well(tried, _longest(problem), each)]


def _persistent(problem: Problem) -> list[Config]:
    """Configurations of "persistent"; a gated pair has two accumulators, each of half of the columns."""
    found = []
    for block_m, columns, warps, stages, parts, each, group_m in PERSISTENT:
        block_n, parts = (columns // 2, 1) if problem.gated else (columns, parts)
        found.append(Config("persistent", block_m, block_n, 64, warps, stages, group_m, parts, each))
    return found


def _across(problem: Problem) -> list[Config]:
    """Configurations of "tiled" across groups, where a group ends inside of a tile."""
    if not _lie_alike(problem):
        return []
    tried = [Config("tiled", *tile, across=True) for tile in ACROSS]
    return [each for each in tried if any(n % each.block_n for n in problem.columns[:-1])]


def fits(choice: Config, problem: Problem, arch: int) -> bool:
    """Whether a multiprocessor of an architecture has room for a configuration."""
    room = shared_limit(arch) // choice.per_processor
    if choice.template == "persistent" and arch < 90:
        return False
    return shared_bytes(choice, problem) <= room and _fits_registers(choice, problem, arch)


def _fits_registers(choice: Config, problem: Problem, arch: int) -> bool:
    """Whether the accumulators and the tiles of one step leave a thread without spills, as compiled."""
    if choice.template == "tiled" and choice.block_m >= 64:
        if choice.block_k > 128 or (choice.num_warps == 8 and choice.block_n == 16):
            return False
    if choice.template == "tiled" and choice.num_warps == 4 and choice.block_m >= 32:  # by Triton 3.7
        if (choice.block_m + choice.block_n) * choice.block_k >= 96 * 256:
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


def shared_limit(arch: int) -> int:
    """Shared memory that one thread block may have, in bytes."""
    return devices.shared_bytes((arch // 10, arch % 10))


def shared_bytes(choice: Config, problem: Problem, stored: int = 0) -> int:
    """About what a configuration needs of shared memory for the tiles that are under way.

    Args:
        stored: bytes of a part of a tile that goes through shared memory when it is stored.
    """
    if choice.template == "row":
        return 0
    # Of each loop over tiles: (K, bytes for each of K) of its steps.
    loops = [
        [(problem.inner[p[0]], _width(choice, problem, p) * problem.dtype.itemsize) for p in steps]
        for steps in _side_by_side(problem)
    ]
    under_way, behind = 0, 0
    for steps in loops:
        short = [wide * padded(k) for k, wide in steps if k is not None and k <= choice.block_k]
        long = [wide * choice.block_k for k, wide in steps if k is None or k > choice.block_k]
        if choice.template == "tiled":
            needed = max(long, default=0) * choice.num_stages + max(short, default=0)
            under_way = max(under_way, needed if long else max(short) * choice.num_stages)
        else:
            # Without a loop over K, all products of the next tiles are under way.
            under_way = max(under_way, (max(long) if long else sum(short)) * choice.num_stages)
            behind = max([behind, *short[-1:]]) if long else behind
    return under_way + max(behind, stored)


def _side_by_side(problem: Problem) -> list[list[tuple[int, ...]]]:
    """The products of each group in order; of a gated pair those of both groups, two at a time."""
    groups, owners = sorted(set(problem.groups)), list(enumerate(problem.groups))
    members = [[p for p, owner in owners if owner == group] for group in groups]
    if problem.gated and len(members[0]) == len(members[1]):
        return [list(zip(*members, strict=True))]
    return [[(p,) for p in each] for each in members]


def _width(choice: Config, problem: Problem, products: tuple[int, ...]) -> int:
    """Rows and columns of the tiles that a step loads."""
    inputs = {problem.lefts[p] if problem.lefts else p * (problem.shared != "a") for p in products}
    return choice.block_m * len(inputs) + choice.block_n * (1 + problem.gated)


def fitted(choice: Config, problem: Problem, arch: int, dtype: torch.dtype) -> Config:
    """A configuration that fits into shared memory: with more subtiles, or fewer stages, if necessary.

    Tables are measured with outputs in the dtype of the operands. The stored values may be wider, and a
    subtile is staged in shared memory beside the tiles in flight. With many short products in flight together
    there may be no room for a persistent kernel: such a sum gets a tiled one.

    Args:
        arch: 80, 90, 100.
    """
    if choice.template != "persistent":
        return choice

    def needed(tried: Config) -> int:
        part = tried.block_m * tried.block_n // tried.subtiles * dtype.itemsize
        return shared_bytes(tried, problem, part)

    limit = shared_limit(arch)
    narrowest = 0 if problem.gated else choice.block_m * 16 * torch.float64.itemsize
    if shared_bytes(replace(choice, num_stages=2), problem, narrowest) > limit:
        return _any_size(problem)
    # A gated pair is stored in one part.
    if dtype.itemsize > problem.dtype.itemsize and not problem.gated:
        while needed(choice) > limit // choice.per_processor and choice.block_n // choice.subtiles > 16:
            choice = replace(choice, subtiles=2 * choice.subtiles)
    while needed(choice) > limit and choice.num_stages > 2:
        choice = replace(choice, num_stages=choice.num_stages - 1)
    return choice


def crowded(choice: Config) -> int:
    """In how many parts a tile is stored where a thread holds several tensors of its size.

    The gradient of a gated pair reads two and stores two. With more than 32 elements of each in a thread,
    tiles on Hopper spill up to 6 KiB of its registers, and take a third longer to compile.
    """
    parts = choice.subtiles
    while choice.block_m * choice.block_n > 32 * 32 * choice.num_warps * parts:
        parts *= 2
    return parts
