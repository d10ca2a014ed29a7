"""`inductor_fusions::lora_linear` in Inductor: two kernels for few rows, or the products one by one.

The first multiplies the input by every A, with K in parts that thread blocks of their own compute. The second
streams the weights; at its end it adds up the parts, multiplies them by B and adds that. Where the device can
launch it early, it waits for the first one only there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ... import _inductor
from ...block_mm.configurations import loaded_well, row_step, shared_limit
from ...block_mm.heuristics import capability
from ...block_mm.lowering import check_factors
from ...decisions import Query, configured, tables, tiles
from ...decisions.problems import FEW_ROWS, SINGLE_ROWS, Row
from ...decisions.schema import padded
from ...fusion import Rejected
from ...lowering import check_templates
from ...operands import may_use_tf32
from . import elements, lowering, narrow, narrow_kernel
from .op import Linears

aten = torch.ops.aten

#: Up to so many rows there are kernels without tensor cores: with more, arithmetic takes longer than memory.
MOST_SINGLE_ROWS = 8
#: The shortest step of K without tensor cores.
LEAST_STEP = 128


@dataclass(frozen=True)
class Config:
    """One configuration of the pair of kernels.

    Attributes:
        block_n, block_k: the tile of a weight.
        num_warps, num_stages: of the kernel that reads the weights, as Triton has them.
        splits: parts of K of the down-projections.
        lanes: parts of `block_k` that warps multiply side by side; it divides both.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    splits: int
    lanes: int = 1

    @property
    def row(self) -> bool:
        """Whether it needs no tensor cores, whose tiles have 16 columns or more."""
        return self.block_n < 16


@dataclass(frozen=True)
class Shape:
    """The sizes of linears with adapters on few rows.

    Attributes:
        rows: M, inner: K, columns: N of each linear, ranks: of all adapters.
        dtype, adapters: of the base and of the adapters.
        along: whether the elements of the weights lie next to each other along K.
    """

    rows: int
    inner: int
    columns: tuple[int, ...]
    ranks: tuple[int, ...]
    dtype: torch.dtype
    adapters: torch.dtype
    along: bool = True

    @property
    def key(self) -> dict[str, Any]:
        """The columns of a table's row."""
        return tables.columns_of(self, "rows", "along")


def default(shape: Shape) -> Config:
    """A configuration that fits every device; it is not tuned."""
    splits = _splits(shape, 16)
    if shape.rows <= SINGLE_ROWS and shape.along:
        return Config(2 if shape.rows == 1 else 4, row_step(shape.inner, 1024, LEAST_STEP), 4, 1, splits)
    tall = padded(shape.rows)
    block_k = 128 if tall <= 32 else 64
    stages = 5 if tall == 16 else 4
    return Config(32, block_k, 4, stages, splits)


def vector(shape: Shape) -> int:
    """Elements of a weight that a thread loads at once: 16 bytes."""
    return 16 // shape.dtype.itemsize


def _splits(shape: Shape, wanted: int) -> int:
    return max(1, min(wanted, 1 << int(math.log2(max(1, shape.inner // 128)))))


#: Tiles without tensor cores: columns, step of K, warps.
ONE_ROW = (
    (1, 2048, 4), (2, 2048, 4), (1, 1024, 4), (4, 1024, 4), (4, 2048, 8), (1, 4096, 8), (2, 1024, 2),
)  # fmt: skip
SOME_ROWS = (
    (4, 1024, 4), (2, 1024, 4), (2, 2048, 4), (4, 512, 4), (8, 512, 4), (4, 512, 2), (4, 2048, 8),
    (1, 2048, 4),
)  # fmt: skip
#: Tiles with tensor cores: columns, step of K, warps, stages; the second with a lane for each warp.
TILES = (
    (16, 256, 2, 4), (32, 256, 2, 4), (64, 256, 2, 4), (64, 256, 4, 3), (64, 128, 4, 5), (32, 128, 4, 5),
    (16, 128, 2, 4), (32, 64, 4, 4),
)  # fmt: skip
LANES = (
    (16, 256, 4, 5), (16, 256, 8, 6), (16, 512, 4, 4), (16, 512, 8, 5), (32, 256, 4, 4), (32, 256, 4, 6),
    (32, 512, 8, 4), (64, 256, 4, 4), (64, 256, 4, 3),
)  # fmt: skip


def candidates(shape: Shape, arch: int) -> list[Config]:
    """Configurations worth measuring."""
    first = default(shape)
    splits, tall = first.splits, padded(shape.rows)
    found = [first]
    if shape.rows <= MOST_SINGLE_ROWS and shape.along:
        tried, each = (ONE_ROW, 2) if shape.rows == 1 else (SOME_ROWS, vector(shape))
        for block_n, block_k, warps in loaded_well(tried, shape.inner, each, LEAST_STEP):
            if shape.rows <= 4 or block_n >= 4:  # with more rows, fewer columns spill
                found.append(Config(block_n, block_k, warps, 1, splits))
    if 1 < shape.rows <= 16:
        for block_n, block_k, warps, stages in LANES:
            if block_k <= max(256, shape.inner // 2) and _under_way(
                shape, block_n, block_k, stages - 1, arch
            ):
                found.append(Config(block_n, block_k, warps, stages, splits, warps))
    for block_n, block_k, warps, stages in TILES:
        if _under_way(shape, block_n, block_k, stages, arch) and block_k * tall <= 4096:
            found.append(Config(block_n, block_k, warps, stages, splits))
    if max(shape.ranks) > 64:  # the parts of wide adapters need the registers
        found = [config for config in found if config.block_n < 64]
    fewer = _splits(shape, 8)
    found += [replace(config, splits=fewer) for config in found[:3]]
    return list(dict.fromkeys(found))


def _under_way(shape: Shape, block_n: int, block_k: int, tiles: int, arch: int) -> bool:
    """Whether shared memory has room for this number of tiles."""
    room = min(160000, shared_limit(arch) - 4096)
    return (padded(shape.rows) + block_n) * block_k * shape.dtype.itemsize * tiles <= room


def choose(shape: Shape, device: torch.device) -> Config:
    """The configuration of the nearest problem that is measured and whose tiles fit, or the default one.

    Without tensor cores a kernel takes longer with each row: then for no more rows than it was measured with.
    """
    arch = capability(device)

    def fits(row: Row) -> Config | None:
        found = Config(**row["config"])
        if row["inner"] != shape.inner:
            found = replace(found, splits=min(found.splits, _splits(shape, 16)))
        if found.row:
            longest = row_step(shape.inner, 8192, LEAST_STEP)
            takes = shape.along and shape.rows <= row["tokens"] and found.block_k <= longest
            return found if takes else None
        if shape.along and shape.rows <= SINGLE_ROWS < row["tokens"]:
            return None  # tensor cores pay for more rows than so few
        wide = max(shape.ranks) > 64 and found.block_n >= 64  # its parts need the registers
        under_way = found.num_stages - (found.lanes > 1)
        room = _under_way(shape, found.block_n, found.block_k, under_way, arch)
        if found.lanes > 1:
            suits = shape.rows <= 16 and found.block_k <= max(256, shape.inner // 2)
        else:
            suits = found.block_k * padded(shape.rows) <= 4096
        return found if suits and room and not wide else None

    query = Query("lora_decode", {**shape.key, "tokens": shape.rows})
    usual = tiles(query, device, fits) or default(shape)
    return configured("lora_decode", query.row, usual, lambda: candidates(shape, arch))


class Lowering(Linears):
    """A call of the operation while it is lowered."""

    def kernels(self) -> list[Any]:
        """Two kernels.

        Raises:
            Rejected: there are none for it.
        """
        device = self.x.get_device()
        check_templates(device)
        check_factors(self.scales)
        held = _inductor.realize([self.x, *self.w, *self.a, *self.b])
        count, adapters = len(self.w), len(self.a)
        x, w, rest = held[0], held[1 : 1 + count], held[1 + count :]
        a, b = rest[:adapters], rest[adapters:]
        sizes = _inductor.sizes(x)
        columns, ranks = ([_inductor.sizes(right)[1] for right in some] for some in (w, a))
        if not all(isinstance(size, int) for size in (*sizes, *columns, *ranks)) or sizes[0] > FEW_ROWS:
            raise Rejected("a size is not known, or there are too many rows")
        if sum(padded(r) for r in ranks) > narrow.MOST_TOGETHER or max(ranks) > narrow.MOST_COLUMNS:
            raise Rejected(f"the ranks of the adapters sum to more than {narrow.MOST_TOGETHER}")
        dtypes = x.get_dtype(), a[0].get_dtype()
        along = all(_inductor.strides(right)[0] == 1 for right in w)
        shape = Shape(sizes[0], sizes[1], tuple(columns), tuple(ranks), *dtypes, along)
        config = choose(shape, device)
        early = self.early and capability(device) >= 90  # the second kernel starts before the first one ends
        parts = self._parts(x, a, shape, config, early, device)
        bias = zip(self.bias_groups, _inductor.realize(self.bias), strict=True)
        inputs = [("X", x), *((f"W{g}", right) for g, right in enumerate(w))]
        inputs += [(f"P{i}", part) for i, part in enumerate(parts)]
        inputs += [(f"B{i}", right) for i, right in enumerate(b)]
        inputs += [(f"C{g}", offset) for g, offset in bias]
        outputs = _inductor.lower_to_template(
            name="lora_linear",
            inputs=inputs,
            shapes=[(shape.rows, n) for n in columns],
            dtype=self.dtype,
            dtypes=self.dtypes,
            device=device,
            variants=[self._variant([name for name, _ in inputs], shape, config, early)],
            grid_sizes=[size for n in columns for size in (1, n)],
        )
        return outputs

    def _parts(
        self, x: Any, a: Sequence[Any], shape: Shape, config: Config, early: bool, device: torch.device
    ) -> list[Any]:
        """The down-projections, each of the shape (parts of K * rows, rank), in float32."""
        posed = narrow.Shape(shape.rows, shape.inner, shape.ranks, "n", shape.dtype, shape.adapters)
        warps = 4
        chosen = narrow.fitted(narrow.Config(padded(shape.rows), 128, config.splits, warps, 3), posed)
        waits = early and _inductor.captures_graphs()  # as short kernels of the grouped GEMM
        made = _inductor.lower_to_template(
            name="lora_narrow_mm",
            inputs=[("X", x), *lowering.narrow_inputs(a, posed)],
            shapes=[(shape.rows * config.splits, rank) for rank in shape.ranks],
            dtype=torch.float32,
            device=device,
            variants=[narrow_kernel.variant(chosen, posed, [1.0] * len(a), (), False, early, waits)],
            grid_sizes=[shape.rows, 1],
        )
        return _inductor.realize(made)

    def _variant(self, names: list[str], shape: Shape, config: Config, early: bool) -> _inductor.Variant:
        outputs = tuple(f"Y{g}" for g in range(1, len(self.w)))
        groups: list[dict[str, Any]] = []
        for group, size in enumerate(shape.columns):
            start = groups[-1]["end"] if groups else 0
            groups.append(
                {
                    "start": start,
                    "end": start + -(-size // config.block_n),
                    "size": size,
                    "w": f"W{group}",
                    "adapters": self._adapters(group, shape),
                    "bias": f"C{group}" if group in self.bias_groups else "",
                    "output": f"Y{group}" if group else "",
                }
            )
        ragged = shape.inner % config.block_k != 0
        text = elements.render(
            "decode_row.py.jinja" if config.row else "decode.py.jinja",
            names=[*names, *outputs],
            groups=groups,
            splits=config.splits,
            ragged=ragged,
            early=early,
            precision="tf32" if may_use_tf32() else "tf32x3",
            **(self._of_rows(shape) if config.row else self._of_tiles(shape, config, ragged)),
        )
        rows = padded(shape.rows, 1) if config.row else padded(shape.rows)
        meta = {"BLOCK_M": rows, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k}
        return _inductor.Variant(
            source=text,
            meta={**meta, "ACC_TYPE": "tl.float32"},
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            outputs=outputs,
            early=early,
        )

    def _adapters(self, group: int, shape: Shape) -> list[dict[str, Any]]:
        """The adapters of a group of columns, as the template names them."""
        return [
            {
                "index": i,
                "b": f"B{i}",
                "parts": f"P{i}",
                "rank": rank,
                "block": padded(rank),
                "scale": self.scales[i],
                "narrow": shape.adapters != torch.float32,
                "late": shape.adapters == torch.float16 and self.scales[i] != 1,
            }
            for i, rank in enumerate(shape.ranks)
            if self.groups[i] == group
        ]

    @staticmethod
    def _of_rows(shape: Shape) -> dict[str, Any]:
        """Further arguments of the template without tensor cores."""
        return {
            "rows": shape.rows,
            # A thread adds up the products of one load, so that each row takes few registers of it.
            "together": vector(shape) if shape.rows > 1 else 1,
        }

    @staticmethod
    def _of_tiles(shape: Shape, config: Config, ragged: bool) -> dict[str, Any]:
        """Further arguments of the template with tensor cores."""
        rows = "(rm[None, :, None] < M)" if config.lanes > 1 else "(rm[:, None] < M)"
        # Rows that are not there are not read: all thread blocks would wait for one row.
        masks = ["(x_k < K - k)"] * ragged + [rows] * (shape.rows < padded(shape.rows))
        return {"lanes": config.lanes, "x_mask": " & ".join(masks)}
