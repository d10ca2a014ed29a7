"""Kernel templates, and autotuning among them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .loading import inductor_config
from .reuse import write_over


def max_autotune() -> bool:
    """Whether Inductor chooses between matrix products by measuring them."""
    return bool(inductor_config().max_autotune or inductor_config().max_autotune_gemm)


def captures_graphs() -> bool:
    """Whether Inductor launches what it compiles as CUDA graphs."""
    return bool(inductor_config().triton.cudagraphs)


def freezes_weights() -> bool:
    """Whether Inductor computes what depends on weights alone once, in inference."""
    return bool(inductor_config().freezing)


def interprets_triton() -> bool:
    """Whether kernels of Triton run in its interpreter, which has no inline assembly."""
    return bool(importlib.import_module("triton").knobs.runtime.interpret)


class NoKernel(Exception):
    """There is no kernel of ours for an operation that is lowered, and why."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """One configuration of a kernel template.

    Attributes:
        source: what Inductor's TritonTemplate takes.
        outputs: arguments of the kernel, at its end, that are outputs beside the first.
        early: whether it starts before the kernel in front of it ends, and waits in its own code.
        wider: by a number of bytes, constants in place of those of `meta`, and `num_stages`, where the
            scheduler fuses something behind the kernel that stores elements of so many bytes.
        crowded: constants in place of smaller ones, where what is fused behind reads a tensor of the size of
            the first output, and the kernel stores two of them: a thread then holds several times its part
            of a tile.
    """

    source: str
    meta: dict[str, Any]
    num_warps: int
    num_stages: int
    outputs: tuple[str, ...]
    early: bool = False
    wider: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    crowded: dict[str, int] = dataclasses.field(default_factory=dict)


def lower_to_template(
    name: str,
    inputs: Sequence[tuple[str, Any]],
    shapes: Sequence[tuple[Any, Any]],
    dtype: torch.dtype,
    device: torch.device,
    variants: Sequence[Variant],
    stock: Callable[..., torch.Tensor] | None = None,
    dtypes: Sequence[torch.dtype] = (),
    grid_sizes: Sequence[Any] = (),
    over: str = "",
) -> list[Any]:
    """The outputs of one Triton kernel.

    Args:
        inputs: its arguments by name, in memory.
        shapes: of its outputs, which are row-major.
        variants: its configurations; the fastest is taken where there are several.
        stock: what does the same without it, on tensors that are `inputs` and outputs: where
            given, it is measured as well.
        dtypes: of each output, where they differ.
        grid_sizes: pairs of sizes whose tiles are counted for the grid; `shapes` by default.
        over: the input that the first output may take the memory of: each program reads of it what it
            writes, and only then writes.

    Raises:
        NoKernel: `stock` is faster, or the first output has one number, or Inductor takes no template.
    """
    each = list(dtypes) or [dtype] * len(shapes)
    row_major = [Output("", s, (s[1], 1), kind) for s, kind in zip(shapes, each, strict=True)]
    call_sizes = list(grid_sizes) or [size for shape in shapes for size in shape]
    return _lower(name, inputs, row_major, device, _tiles, call_sizes, variants, stock, over)


@dataclasses.dataclass(frozen=True)
class Output:
    """An output of a kernel: its argument (the first has none), sizes, strides and dtype."""

    name: str
    size: Sequence[Any]
    stride: Sequence[Any]
    dtype: torch.dtype


def lower_to_kernel(
    name: str,
    inputs: Sequence[tuple[str, Any]],
    outputs: Sequence[Output],
    device: torch.device,
    grid: Callable[..., Any],
    grid_sizes: Sequence[Any],
    variant: Variant,
) -> list[Any]:
    """The outputs, of any layout, of one Triton kernel with a grid of its own.

    Args:
        inputs: its arguments by name, in memory.
        outputs: its outputs; those after the first are its last arguments.
        grid: called with `grid_sizes`, the constants of the kernel, `cdiv` and `min`.
        grid_sizes: sizes that the number of programs depends on.

    Raises:
        NoKernel: the first output has one number, or Inductor takes no template.
    """
    return _lower(name, inputs, outputs, device, grid, grid_sizes, [variant], None)


def _is_one_number(size: Sequence[Any]) -> bool:
    """Whether a tensor of a size is known to hold one number."""
    known = all(isinstance(each, int) or getattr(each, "is_Integer", False) for each in size)
    return known and math.prod(int(each) for each in size) == 1


def _lower(
    name: str,
    inputs: Sequence[tuple[str, Any]],
    outputs: Sequence[Output],
    device: torch.device,
    grid: Callable[..., Any],
    call_sizes: Sequence[Any],
    variants: Sequence[Variant],
    stock: Callable[..., torch.Tensor] | None,
    over: str = "",
) -> list[Any]:
    ir = importlib.import_module("torch._inductor.ir")
    select = importlib.import_module("torch._inductor.select_algorithm")
    lowering = importlib.import_module("torch._inductor.lowering")
    first = outputs[0]
    if _is_one_number(first.size):
        # Inductor stores it without a mask: whatever else a tile holds goes there too.
        raise NoKernel("the result is one number")
    layout = ir.FixedLayout(device, first.dtype, list(first.size), list(first.stride))
    more = [
        lowering.empty_strided(list(out.size), list(out.stride), dtype=out.dtype, device=device)
        for out in outputs[1:]
    ]
    nodes = [*(value for _, value in inputs), *more]
    choices: list[Any] = []
    for variant in variants:
        _template(name, variant.source, grid).maybe_append_choice(
            choices, input_nodes=tuple(nodes), layout=layout, call_sizes=list(call_sizes),
            num_warps=variant.num_warps, num_stages=variant.num_stages,
            **({"triton_meta": {"launch_pdl": True}} if variant.early else {}), **variant.meta,
            **{
                f"WIDER_{size}_{name}": value
                for size, constants in variant.wider.items()
                for name, value in constants.items()
            },
            **{f"CROWDED_{name}": value for name, value in variant.crowded.items()},
        )  # fmt: skip
    if not choices:
        raise NoKernel("Inductor accepted no template")
    if stock is not None:
        choices.append(_extern(stock).bind(tuple(nodes), layout))
    chosen = select.autotune_select_algorithm(name, choices, nodes, layout, return_multi_template=False)
    output = chosen[0] if isinstance(chosen, tuple) else chosen
    buffer = output.data.data
    if not isinstance(buffer, ir.TritonTemplateBuffer):
        raise NoKernel("stock's products are measured to be faster")
    if any(variant.wider or variant.crowded for variant in variants):
        buffer.make_kernel_render = _with_behind(buffer.make_kernel_render)
    if over:
        write_over(buffer, dict(inputs)[over])
    if more:
        _declare_writes(buffer, more, device)
    return [output, *more]


def _declare_writes(buffer: Any, more: list[Any], device: torch.device) -> None:
    """Tell the scheduler that a kernel writes into the buffers of its further outputs.

    They are not given to the template itself: torch 2.11 lets only its own operations write into inputs.
    """
    ir = importlib.import_module("torch._inductor.ir")
    writes = [ir.MutationOutput(ir.NoneLayout(device=device), value, buffer) for value in more]
    buffer.mutated_inputs = more
    if hasattr(buffer, "mutation_outputs"):
        buffer.mutation_outputs = [*buffer.mutation_outputs, *writes]
    else:
        buffer.outputs = [*buffer.outputs, *writes]


def _with_behind(make: Callable[..., Any]) -> Callable[..., Any]:
    """Renders a kernel with constants that depend on what the scheduler fuses behind it.

    Its first lines, which hold them, are written after all others.
    """

    def make_kernel_render(*args: Any, **kwargs: Any) -> tuple[Any, Callable[[], Any]]:
        kernel, render = make(*args, **kwargs)

        def rendered() -> Any:
            partial = render()
            definition = partial.replacement_hooks["<DEF_KERNEL>"]

            def define() -> str:
                _, _, arguments, _ = kernel.args.python_argdefs()
                stored = [x.dtype.itemsize for x in arguments if x.name.startswith(("out_ptr", "in_out_ptr"))]
                crowded = len(stored) > 1 and _reads_tiles(kernel, arguments)
                settled = _settled(kernel.defines, max(stored, default=0), crowded)
                kernel.num_stages = int(settled.pop("num_stages", kernel.num_stages))
                kernel.defines = "".join(f"{name}{_CONSTEXPR}{value}\n" for name, value in settled.items())
                return str(definition())

            partial.replacement_hooks["<DEF_KERNEL>"] = define
            return partial

        return kernel, rendered

    return make_kernel_render


_CONSTEXPR = " : tl.constexpr = "


def _reads_tiles(kernel: Any, arguments: Sequence[Any]) -> bool:
    """Whether what is fused behind a kernel reads a tensor as large as the kernel's first output."""
    graph = importlib.import_module("torch._inductor.virtualized").V.graph
    read = [x.buffer for x in arguments if x.name.startswith(("in_ptr", "in_out_ptr"))]
    size = graph.get_numel(kernel.output_node.get_name())
    return any(graph.get_numel(name) == size for name in read)


def _settled(defines: str, size: int, crowded: bool) -> dict[str, str]:
    """The constants of a kernel whose widest stored elements have `size` bytes."""
    found = dict(line.split(_CONSTEXPR, 1) for line in defines.splitlines() if line)
    for name in [name for name in found if name.startswith("WIDER_")]:
        _, wide, replaced = name.split("_", 2)
        value = found.pop(name)
        if int(wide) == size:
            found[replaced] = value
    for name in [name for name in found if name.startswith("CROWDED_")]:
        value, replaced = found.pop(name), name.removeprefix("CROWDED_")
        if crowded:
            found[replaced] = str(max(int(value), int(found[replaced])))
    return found


@functools.cache
def _symbolic_grid(grid: Callable[..., Any]) -> Any:
    select = importlib.import_module("torch._inductor.select_algorithm")
    return select.SymbolicGridFn(grid)


def _tiles(*sizes_and_meta: Any, cdiv: Any, min: Any) -> tuple[Any, int, int]:
    """The grid of a grouped GEMM."""
    *sizes, meta = sizes_and_meta
    pairs = list(zip(sizes[::2], sizes[1::2], strict=True))
    if meta.get("ACROSS"):  # the columns of all outputs are numbered through
        pairs = [(sizes[0], sum(n for _, n in pairs))]
    tiles = sum(cdiv(m, meta["BLOCK_M"]) * cdiv(n, meta["BLOCK_N"]) for m, n in pairs)
    tiles = tiles * meta.get("SPLITS", 1)
    return (min(tiles, meta["NUM_PROGRAMS"]) if "NUM_PROGRAMS" in meta else tiles, 1, 1)


_templates: dict[tuple[str, str], Any] = {}


def _template(name: str, source: str, grid: Callable[..., Any]) -> Any:
    """The TritonTemplate of a source; its registry wants each name once."""
    if (name, source) not in _templates:
        select = importlib.import_module("torch._inductor.select_algorithm")
        unique = f"{name}_{hashlib.sha256(source.encode()).hexdigest()[:12]}"
        # Calls alike, as in each layer of a model, are rendered once for autotuning.
        _templates[name, source] = select.TritonTemplate(
            name=unique, grid=_symbolic_grid(grid), source=source, cache_codegen_enabled_for_template=True
        )
    return _templates[name, source]


_externs: dict[Any, Any] = {}


def _extern(function: Callable[..., torch.Tensor]) -> Any:
    """An eager function as a choice of autotuning."""
    if function not in _externs:
        select = importlib.import_module("torch._inductor.select_algorithm")
        _externs[function] = select.ExternKernelChoice(
            function, name=f"{function.__name__}", has_out_variant=False
        )
    return _externs[function]
