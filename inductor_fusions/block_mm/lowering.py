"""`inductor_fusions::block_mm` in Inductor: one kernel, or the products one by one."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import _inductor, config
from ..decisions import hardware
from ..decisions.schema import padded
from ..fusion import Rejected
from ..lowering import check_templates
from ..operands import known_size, may_use_tf32, profitable
from . import configurations, guards, heuristics, template
from .op import Call
from .problem import Problem, of_operands

#: Bulk copies know strides below this, in bytes.
FARTHEST = 2**40
#: The largest factor of a product: what it multiplies is in the range of float32 with it.
LARGEST_FACTOR = 2.0**40
#: The products that one kernel takes at most: its code grows with them.
MOST_PRODUCTS = 8


def check_factors(factors: Sequence[float]) -> None:
    """Refuse factors that are NaN or with which a kernel might overflow.

    Raises:
        Rejected: there is one.
    """
    if not all(abs(factor) <= LARGEST_FACTOR for factor in factors):
        raise Rejected(f"a product has a scale that is NaN or larger than {LARGEST_FACTOR:g}")


@dataclass
class Lowering(Call):
    """A call while it is lowered, with Inductor's values for tensors.

    Attributes:
        left, right: the operands in memory, for a kernel.
    """

    left: list[Any] = field(default_factory=list)
    right: list[Any] = field(default_factory=list)

    def kernel(self) -> list[Any]:
        """The outputs of one kernel.

        Raises:
            Rejected: there is no kernel for it.
        """
        device = self.a[0].get_device()
        check_templates(device)
        if len(self.groups) > MOST_PRODUCTS or 0.0 in self.scales:
            raise Rejected(f"there are more than {MOST_PRODUCTS} products, or one has the scale 0")
        # The accumulator is kept in units of them.
        check_factors([*self.scales, *(1 / scale for scale in self.scales)])
        self._check_dtypes()
        operands, structure = self._structure()
        if self.gated and not template.can_gate(structure):
            raise Rejected("the two products of the gated pair have different structures")
        left, right = (
            [(_inductor.sizes(x), _inductor.strides(x)) for x in side] for side in (self.left, self.right)
        )
        problem = of_operands(
            left, right, self.groups, self.gated, self.a[0].get_dtype(),
            [(f.a.name, f.b.name) for f in structure.factors], self.names[0],
        )  # fmt: skip
        arch, autotune = heuristics.capability(device), _inductor.max_autotune()
        shapes = [(left[p][0][0], right[p][0][1]) for p in self.first()]
        return _inductor.lower_to_template(
            name="block_mm",
            inputs=operands,
            shapes=shapes[:1] if self.gated else shapes,
            dtype=self.dtype,
            dtypes=self.dtypes,
            device=device,
            variants=[
                _variant(chosen, structure, arch, device, problem)
                for chosen in self._configurations(problem, device, arch)
            ],
            stock=self._stock(structure) if autotune and self.eps is None else None,
        )

    def _configurations(
        self, problem: Problem, device: torch.device, arch: int
    ) -> list[configurations.Config]:
        """The configuration that is decided, or those to measure under `max_autotune`."""
        if _inductor.max_autotune():
            configs = configurations.candidates(problem, arch)
        else:
            if not self.decided and not config.always():
                profitable(heuristics.decided(problem, device))
            configs = [heuristics.choose(problem, device, self.decided or None)]
        if self.eps is not None:
            rows = [chosen for chosen in configs if chosen.template == "row"]
            configs = [configurations.with_norm(chosen, problem) for chosen in rows[:1]]
            if not configs:
                raise Rejected("only the kernel for few rows applies a norm to its input")
        configs = [chosen for chosen in configs if configurations.suits(chosen, problem)]
        widest = max(self.dtypes, key=lambda dtype: dtype.itemsize)
        configs = [configurations.fitted(chosen, problem, arch, widest) for chosen in configs]
        if not all(_aligned(x) for x in (*self.left, *self.right)):
            configs = [chosen for chosen in configs if chosen.template != "persistent"]
        if not configs:
            raise Rejected("TMA needs static sizes and strides that are multiples of 16 bytes")
        return configs

    def _check_dtypes(self) -> None:
        first = self.a[0].get_dtype()
        for p, left in enumerate(self.a):
            if left.get_dtype() not in guards.DTYPES:
                raise Rejected(f"no kernel supports matrices of dtype {left.get_dtype()}")
            # One step of a kernel, whose steps were chosen for another dtype, has to hold it.
            inner, itemsize = _inductor.static(left.get_size()[1]), left.get_dtype().itemsize
            small = isinstance(inner, int) and inner * itemsize <= 128
            if left.get_dtype() != first and not (small and _repeats(self.groups, p)):
                raise Rejected("a product has another dtype and is not a low-rank adapter")

    def _structure(self) -> tuple[list[tuple[str, Any]], template.Structure]:
        """The distinct inputs of the kernel by name, and what it computes."""
        self.left, self.right = _inductor.realize(self.a), _inductor.realize(self.b)
        names: dict[Any, str] = {}
        inputs: list[tuple[str, Any]] = []

        def name(kind: str, value: Any) -> str:
            key = _inductor.value_key(value)
            if (kind, key) not in names:
                names[kind, key] = f"{kind}{sum(k == kind for k, _ in names)}"
                inputs.append((names[kind, key], value))
            return names[kind, key]

        factors = []
        for p, group in enumerate(self.groups):
            left, right = self.left[p], self.right[p]
            factors.append(
                template.Factor(
                    group,
                    template.Operand(name("A", left), _inner(left, 1)),
                    template.Operand(name("B", right), _inner(right, 0)),
                    self.scales[p],
                    known_size(_inductor.sizes(left)[1]),
                    _precision(left.get_dtype(), p > 0 and _repeats(self.groups, p)),
                    str(left.get_dtype()),
                )
            )
        biases: list[tuple[str, bool] | None] = [None] * len(self.names)
        for group, offset in self.offsets().items():
            (held,) = _inductor.realize([offset])
            biases[group] = (name("C", held), len(held.get_size()) == 2)
        norm = None
        if self.eps is not None:
            (gain,) = _inductor.realize([self.gain]) if self.gain is not None else (None,)
            norm = template.Norm(self.eps, "" if gain is None else name("G", gain), self.shift, self.clamps)
        outputs = () if self.gated else tuple(f"Y{g}" for g in range(1, len(self.names)))
        kinds = self.dtypes * 2 if self.gated else self.dtypes
        structure = template.Structure(
            (*(n for n, _ in inputs), *outputs), tuple(factors), tuple(biases),
            tuple(map(_rendered, self.names, kinds)), outputs, self.gated,
            pair=self.gated and self._is_pair(factors), norm=norm,
        )  # fmt: skip
        return inputs, structure

    def _is_pair(self, factors: Sequence[template.Factor]) -> bool:
        """Whether the first products of a gated pair have one input, and weights of one layout."""
        i, j = self.first()
        alike = _inductor.strides(self.right[i]) == _inductor.strides(self.right[j])
        return alike and factors[i].a == factors[j].a and factors[i].b.name != factors[j].b.name

    def _stock(self, structure: template.Structure) -> Callable[..., torch.Tensor]:
        """The products one by one, on the tensors that the kernel gets."""
        products = tuple((f.a.name, f.b.name) for f in structure.factors)
        return stock_products(structure.names, products)


@functools.cache
def stock_products(
    names: tuple[str, ...], products: tuple[tuple[str, str], ...]
) -> Callable[..., torch.Tensor]:
    """A function that does the products of a kernel with the library's own.

    Args:
        names: the tensors that it is called with.
    """

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        given = dict(zip(names, tensors, strict=True))
        results = [given[a] @ given[b] for a, b in products]
        return results[0]

    text = f"{names}{products}"
    run.__name__ = f"stock_products_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    return run


def _aligned(x: Any) -> bool:
    """Whether bulk copies can read a matrix."""
    per_load = guards.ALIGNMENT // x.get_dtype().itemsize
    numbers = [*(s for s in _inductor.strides(x) if s != 1), _inductor.static(x.get_layout().offset)]
    return all(isinstance(n, int) and n % per_load == 0 for n in numbers)


def _repeats(groups: Sequence[int], p: int) -> bool:
    """Whether a product is not the first of its group."""
    return groups[p] == groups[p - 1]


def _precision(dtype: torch.dtype, later: bool) -> str:
    """The precision of `tl.dot` for float32; 16-bit products are exact in any case.

    TF32 means three TF32 products: a single one truncates its operands, while the library rounds them, and
    has 2.6 times the library's error.
    """
    if dtype != torch.float32:
        return "tf32"
    return "tf32x3" if later or may_use_tf32() else "ieee"


def _rendered(activation: str, dtype: torch.dtype) -> str:
    """The name of an activation in the templates, for results of a dtype."""
    return "gelu_rounded" if activation == "gelu" and dtype == torch.bfloat16 else activation


def _inner(x: Any, dim: int) -> bool:
    strides, other = _inductor.strides(x), 1 - dim
    if strides[dim] == 1:
        return True
    if strides[other] != 1:
        raise Rejected("a matrix has no dim of stride 1")
    return False


def _variant(
    chosen: configurations.Config,
    structure: template.Structure,
    arch: int,
    device: torch.device,
    problem: Problem,
) -> _inductor.Variant:
    if chosen.template == "persistent" and arch < 90:
        raise Rejected("the device has no TMA")
    rows = (problem.rows[0] or 0) if len(set(problem.rows)) == 1 else 0
    row = chosen.template == "row"
    # In a graph the launch of a short kernel is prepared while the one in front runs; outside of one, such
    # launches take the host longer. Not with bulk copies: their descriptors are in memory that the kernel in
    # front may use as well.
    early = arch >= 90 and chosen.template != "persistent" and _inductor.captures_graphs()
    few = rows if row or rows < chosen.block_m else 0
    return _inductor.Variant(
        source=template.source(chosen, structure, few, early, joined=arch < 100),
        meta=_meta(chosen, padded(rows, 1) if row else chosen.block_m, device),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        outputs=structure.outputs,
        early=early,
        wider=_wider(chosen, problem, arch),
        crowded=_crowded(chosen, problem),
    )


def _meta(chosen: configurations.Config, block_m: int, device: torch.device) -> dict[str, Any]:
    """The constants of a kernel."""
    meta: dict[str, Any] = {
        "BLOCK_M": block_m,
        "BLOCK_N": chosen.block_n,
        "GROUP_M": chosen.group_m,
        "ACC_TYPE": "tl.float32",
    }
    if chosen.across:
        meta["ACROSS"] = True
    if chosen.template == "persistent":
        properties = hardware(device)
        assert properties is not None, device
        meta |= {
            "SUBTILES": chosen.subtiles,
            "NUM_PROGRAMS": chosen.per_processor * properties.multiprocessors,
            "FARTHEST": FARTHEST,
        }
    return meta


def _crowded(chosen: configurations.Config, problem: Problem) -> dict[str, int]:
    """Constants of a persistent kernel whose epilogue holds several tensors of the size of a tile."""
    if chosen.template != "persistent" or problem.gated:
        return {}
    return {"SUBTILES": configurations.crowded(chosen)}


def _wider(chosen: configurations.Config, problem: Problem, arch: int) -> dict[int, dict[str, int]]:
    """Constants of a persistent kernel whose results get wider in its epilogue, by their bytes."""
    found: dict[int, dict[str, int]] = {}
    for dtype in (torch.float32, torch.float64) if chosen.template == "persistent" else ():
        fitted = configurations.fitted(chosen, problem, arch, dtype)
        if fitted != chosen:
            found[dtype.itemsize] = {"SUBTILES": fitted.subtiles, "num_stages": fitted.num_stages}
    return found
