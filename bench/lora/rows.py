"""The linears with adapters that are measured: shapes, ranks and dtypes."""

from __future__ import annotations

from dataclasses import dataclass

#: Kinds that are one skinny GEMM.
ALONE = ("gradient", "down")


@dataclass(frozen=True)
class Row:
    """One problem.

    Attributes:
        kind: "forward", "backward", "gradient", "step", "accumulate", "dropped" or "down".
        tokens: rows of x.
        inner, outer: widths of the input and of each linear; of a gradient and of "down", `inner` is the
            width of the large matrix, and `outer` are the ranks where several adapters read it. Backward (as
            "dropped" is) the products go from `outer` to `inner`.
        rank: of each adapter.
        adapters: dtype of the adapters, a key of `DTYPES`.
        dropout: in front of each adapter; then the forward is that of a training step.
        large: dtype of the large matrix of a gradient, and of "down".
    """

    kind: str
    tokens: int
    inner: int
    outer: tuple[int, ...]
    rank: int = 16
    adapters: str = "float32"
    dropout: float = 0.0
    large: str = "bfloat16"

    @property
    def trains(self) -> bool:
        """Whether operands take gradients."""
        return self.kind == "step" or (self.kind == "forward" and self.dropout > 0)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of `ALONE`: of each adapter that reads the large matrix."""
        return self.outer or (self.rank,)

    @property
    def key(self) -> str:
        """How `--only` and the progress name it."""
        sizes = f"{self.inner}->{'+'.join(map(str, self.outer or (self.rank,)))}"
        extra = [f"dropout{self.dropout}"] if self.dropout else []
        extra += [self.large] if self.kind in ALONE else []
        return " ".join([self.kind, sizes, f"r{self.rank}", self.adapters, *extra, f"m{self.tokens}"])


#: K and N of the linears that LoRAFusion reports, and of Llama 3 8B.
SQUARE = ((4096, 4096), (5120, 5120), (8192, 8192), (4096, 14336), (14336, 4096))
#: The linears of a layer of Llama 3.2 1B, by input.
LLAMA_1B = ((2048, (2048, 512, 512)), (2048, (2048,)), (2048, (8192, 8192)), (8192, (2048,)))


def grid() -> list[Row]:
    """What is measured: decode and the shapes of the models first."""
    rows: list[Row] = []
    for adapters in ("float32", "bfloat16"):
        for inner, outer in LLAMA_1B:
            rows += [Row("forward", m, inner, outer, 16, adapters) for m in (1, 4, 8, 16, 4096)]
            rows.append(Row("backward", 4096, inner, outer, 16, adapters))
        # Behind a dropout of its own each of gate and up stands alone.
        rows.append(Row("forward", 4096, 2048, (8192,), 16, adapters))
        for outer_width in (4096, 14336):
            rows += [Row("forward", m, 4096, (outer_width,), 16, adapters) for m in (1, 4, 8, 16)]
        # Of the input of q, k and v, and of that of gate and up.
        rows += [Row("gradient", 4096, 2048, (16,) * count, 16, adapters) for count in (3, 2)]
        for width in (512, 2048, 8192):
            rows.append(Row("gradient", 4096, width, (), 16, adapters))
        if adapters == "float32":
            rows += [Row("gradient", 4096, w, (), 16, adapters, large="float32") for w in (2048, 8192)]
    for adapters in ("float32", "bfloat16"):
        for inner, width in SQUARE:
            for tokens in (4096, 8192, 2048):
                rows += [
                    Row(kind, tokens, inner, (width,), 16, adapters)
                    for kind in ("forward", "backward", "step")
                ]
    rows += behind_dropouts()
    for rank in (64, 128):
        for adapters in ("float32", "bfloat16"):
            for kind in ("forward", "backward", "step"):
                rows += [Row(kind, 4096, inner, (width,), rank, adapters) for inner, width in SQUARE]
            rows += [Row("forward", m, 4096, (4096,), rank, adapters) for m in (1, 4, 16)]
    for adapters in ("float32", "bfloat16"):
        rows += [Row("forward", m, 4096, (4096, 1024, 1024), 16, adapters) for m in (1, 4, 16, 2048, 4096)]
        rows += [Row("gradient", m, 4096, (), 16, adapters) for m in (2048, 4096, 8192)]
        rows += [Row("gradient", m, 14336, (), 16, adapters) for m in (2048, 4096, 8192)]
    rows += [*accumulated(), *dropped(), *wide_gradients(), *down_projections()]
    return list(dict.fromkeys(rows))


def wide_gradients() -> list[Row]:
    """Gradients of adapters of larger ranks, at which the library catches up."""
    rows = []
    for rank in (32, 64, 128):
        for adapters in ("float32", "bfloat16"):
            for width in (1024, 2048, 4096, 14336):
                rows.append(Row("gradient", 4096, width, (), rank, adapters))
            for count in (2, 3) if rank < 128 else (2,):  # no kernel has more than 256 columns
                rows.append(Row("gradient", 4096, 2048, (rank,) * count, rank, adapters))
            rows += [Row("gradient", tokens, 4096, (), rank, adapters) for tokens in (2048, 8192)]
    return rows


def down_projections() -> list[Row]:
    """Skinny GEMMs whose linear stays: x A in the forward, dY B in the backward."""
    rows = []
    for adapters in ("float32", "bfloat16"):
        for width in (2048, 4096, 8192, 14336):
            rows += [Row("down", m, width, (), rank, adapters) for rank in (16, 32, 64) for m in (512, 4096)]
        rows += [Row("down", 4096, 4096, (16,) * count, 16, adapters) for count in (3, 2)]
    return rows


def behind_dropouts() -> list[Row]:
    """Linears whose adapter is behind a dropout, and the gradients of its A."""
    rows = []
    sizes = [*SQUARE, (2048, 2048), (2048, 512), (2048, 8192), (8192, 2048), (4096, 1024)]
    for adapters in ("float32", "bfloat16"):
        for kind in ("forward", "step"):
            rows += [
                Row(kind, m, inner, (width,), 16, adapters, 0.1)
                for inner, width in sizes
                for m in (4096, 8192, 2048)
            ]
        for width in (2048, 4096, 5120, 8192, 14336):
            rows += [
                Row("gradient", m, width, (16,) * count, 16, adapters, 0.1)
                for count in ((3, 2, 1) if width <= 4096 else (1,))
                for m in (4096, 8192, 2048)
            ]
    return rows


def accumulated() -> list[Row]:
    """Adapters of quantised linears: what they are added to is in memory."""
    sizes = [*SQUARE, (2048, 2048), (2048, 512), (2048, 8192), (8192, 2048), (4096, 1024), (1024, 4096)]
    return [
        Row("accumulate", tokens, inner, (width,), rank, adapters)
        for rank in (16, 64)
        for tokens in (4096, 8192, 2048)
        for adapters in ("float32", "bfloat16")
        for inner, width in sizes
    ]


def dropped() -> list[Row]:
    """Gradients of inputs whose linears have an adapter with a dropout of its own."""
    layers = [
        (2048, (2048, 512, 512)), (2048, (8192, 8192)), (2048, (2048,)), (8192, (2048,)),
        (4096, (4096, 1024, 1024)), (4096, (14336, 14336)), (4096, (4096,)), (14336, (4096,)),
    ]  # fmt: skip
    others = [(5120, (5120,)), (8192, (8192,)), (4096, (14336,)), (2048, (8192,))]
    return [
        Row("dropped", tokens, inner, outer, rank, adapters)
        for rank, some in ((16, [*layers, *others]), (64, layers))
        for tokens in (4096, 8192, 2048)
        for adapters in ("float32", "bfloat16")
        for inner, outer in some
    ]


#: Widths that divide badly into tiles, and ranks.
ODD_WIDTHS = (
    (576, 1536), (720, 2880), (1100, 1100), (1536, 576), (2048, 1024), (2560, 3584), (3584, 720),
)  # fmt: skip
ODD_RANKS = (4, 16, 64, 8, 32)


def odd_grid() -> list[Row]:
    """Widths and numbers of tokens that fill a device badly, where the choice of tiles counts most."""
    rows, sizes = [], (200, 1000, 4100)
    for kind in ("forward", "accumulate", *ALONE):
        for i, (inner, outer) in enumerate(ODD_WIDTHS):
            for j, tokens in enumerate(sizes):
                adapters = ("float32", "bfloat16")[(i + j) % 2]
                widths = () if kind in ALONE else (outer,)
                rows.append(Row(kind, tokens, inner, widths, ODD_RANKS[(i + j) % 5], adapters))
    # A DoRA of this width was slower than stock.
    for adapters in ("float32", "bfloat16"):
        rows += [Row("forward", tokens, 2048, (1024,), 16, adapters) for tokens in sizes]
        rows += [Row("down", tokens, 2048, (), 16, adapters) for tokens in sizes]
    return list(dict.fromkeys(rows))
