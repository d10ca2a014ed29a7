"""`explain()`: runs all passes on a model without code generation, and reports the sites."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from .. import _inductor, config, decisions, reporting
from ..checking.runs import copied, own_buffers, run
from ..driver import watching
from ..effects.derivatives import takes_gradient
from ..sites import SCHEMA, Report, table, text
from .graphs import Line, Pair, Recorder

__all__ = ["Explanation", "Line", "Pair", "explain"]


@dataclass
class Explanation(Report):
    """All candidates of a model and their verdicts: print it, or write an HTML page.

    Attributes:
        sites: each candidate, in the order of the graphs.
        unknown: always 0, because no cache is read.
        off: whether the fusions are off.
        title: name of the function or of the module's class.
        train: whether the backward was compiled as well.
        facts: versions, device and policy, name -> text.
        seconds: how long the passes and the compile around them took.
        graphs: every graph with candidates, before and after.
    """

    title: str = ""
    train: bool = False
    facts: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    graphs: list[Pair] = field(default_factory=list)

    @property
    def report(self) -> Report:
        """The sites as a `Report`."""
        return Report(list(self.sites))

    def __str__(self) -> str:
        rows = text(table(self.sites)) if self.sites else ""
        return f"{rows}{self.title}: {self.summary()}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data: that of `Report.to_dict()`, with "title", "train", "facts" and "seconds"."""
        return {
            "schema": SCHEMA,
            "title": self.title,
            "train": self.train,
            "facts": dict(self.facts),
            "seconds": round(self.seconds, 3),
            "sites": super().to_dict()["sites"],
        }

    def to_html(self, path: str | Path | None = None) -> str:
        """One self-contained HTML page: the sites, and the graphs before and after.

        Args:
            path: also write the page to this file.

        Returns:
            The page.
        """
        from .page import render

        page = render(self)
        if path is not None:
            Path(path).write_text(page, "utf-8")
        return page


def explain(
    fn: Callable[..., Any],
    *args: Any,
    train: bool = False,
    dynamic: bool | None = None,
    gpu: str | None = None,
    **kwargs: Any,
) -> Explanation:
    """List every candidate of a model: whether it is fused, and why.

    All passes of Inductor run, and the model runs once. No code is generated, because no decision depends on
    it. The caller's compiled code, caches, counters, random state, reports and buffers do not change.

    Args:
        fn: a function or a module, compiled or not.
        args: its arguments. Tensors are copied first.
        train: also compile the backward, for every floating output that requires a gradient.
        dynamic: as in `torch.compile`.
        gpu: name of a GPU, such as "nvidia_h200", that need not be in this machine: list what would be fused
            there. Nothing is computed on it: `fn` must not read values of tensors there, and its tensors must
            be arguments, parameters or buffers.
        kwargs: keyword arguments of `fn`.

    Returns:
        The sites, and the graphs before and after.

    Raises:
        ValueError: the GPU is unknown, or `fn` does not run on tensors there, which have no values.
        Exception: whatever `fn` raises.
    """
    fn = getattr(fn, "_torchdynamo_orig_callable", getattr(fn, "_orig_mod", fn))  # of a compiled one
    if gpu is None:
        return _explained(fn, args, kwargs, train, dynamic)
    device, differentiates = absent(gpu), _differentiates_cuda()
    with (
        contextlib.nullcontext() if differentiates else _inductor.gradients_without_device(),
        _inductor.absent_device(device),
        _inductor.on_absent_device(fn, args, kwargs) as (moved, moved_args, moved_kwargs),
    ):
        explained = _explained(moved, moved_args, moved_kwargs, train, dynamic, differentiates)
    explained.facts["device"] = f"{device.name}, which need not be in this machine"
    return explained


def absent(gpu: str) -> _inductor.AbsentDevice:
    """The stand-in for a GPU that need not be in this machine.

    Raises:
        ValueError: nothing is known of it; names those that are known.
    """
    name, found = decisions.target(gpu)
    return _inductor.AbsentDevice(name, found.capability, found.multiprocessors, found.shared_bytes)


def _differentiates_cuda() -> bool:
    """Whether this machine can run a backward of CUDA tensors, be they fake."""
    return torch.cuda.is_available()


def _explained(
    fn: Callable[..., Any],
    args: Any,
    kwargs: Mapping[str, Any],
    train: bool,
    dynamic: bool | None,
    differentiates: bool = True,
) -> Explanation:
    """`explain`, on the device of the tensors.

    Args:
        differentiates: whether torch can run a backward there. Else autograd is traced on the CPU.
    """

    def traces_on_cpu(graph: fx.GraphModule) -> bool:
        graphs = [module.graph for module in graph.modules() if isinstance(module, fx.GraphModule)]
        return not differentiates and (train or any(takes_gradient(node) for g in graphs for node in g.nodes))

    recorder = Recorder()
    start = time.perf_counter()
    with (
        _inductor.isolated_compile() as compile,
        reporting.isolated(keep=False) as sites,
        watching.observing(recorder),
        own_buffers(fn),
    ):
        compiled = compile(fn, _inductor.passes_only(traces_on_cpu), dynamic)
        if differentiates or not train:
            run(compiled, fn, args, kwargs, train, alike=True)
        else:
            args, kwargs = copied((args, kwargs), train, alike=True)
            with torch.enable_grad():
                compiled(*args, **kwargs)
    return Explanation(
        sites=sites,
        off=reporting.are_off(),
        title=type(fn).__name__ if isinstance(fn, torch.nn.Module) else getattr(fn, "__name__", repr(fn)),
        train=train,
        facts=_facts(fn, (args, kwargs)),
        seconds=time.perf_counter() - start,
        graphs=[pair for pair in recorder.pairs if pair.sites],
    )


def _facts(fn: Callable[..., Any], inputs: Any) -> dict[str, str]:
    from torch.utils import _pytree as pytree

    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    if isinstance(fn, torch.nn.Module):
        tensors += list(fn.parameters())
    devices = dict.fromkeys(str(tensor.device) for tensor in tensors)
    facts = {"torch": str(torch.__version__), "device": ", ".join(devices) or "cpu"}
    if any(tensor.is_cuda for tensor in tensors):
        facts["device"] += f" ({torch.cuda.get_device_name()})"
    facts["policy"] = str(config.policy)
    if not config.enabled:
        facts["fusions"] = "off: INDUCTOR_FUSIONS=0"
    return facts
