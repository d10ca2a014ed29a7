"""If a compile raises with fusions, it is repeated with fewer of them, down to none.

Before each attempt, what the one before did to the graph, the records and the process state is undone. So
stock Inductor compiles the graph that it would have got without this package, and if that raises too, the
error is stock's.

AOTAutograd ignores an error in the compile of a backward until the backward is called. By then the forward
has run, and what it saves is fixed. So only sites after autograd can be left out of a backward. The backward
of an attention that was fused before autograd is computed by matrix products instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from .. import _inductor, config, reporting
from ..reasons import Reason
from ..sites import Site, error_text
from . import attempts, launching, unfusing
from .attempts import Without
from .trials import Made, Trials


def around(compile: Callable[..., Any], model: Any, inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    """Compile a graph; if that raises because of our fusions, compile it with fewer of them.

    Args:
        compile: Inductor's `compile_fx`.

    Returns:
        The result of `compile`.

    Raises:
        Exception: what `compile` raises without any fusion. With `config.strict`, or if the error is meant
            for the caller, what it raised with them.
    """
    if attempts.current() is not None or not config.enabled or not isinstance(model, fx.GraphModule):
        return compile(model, inputs, *args, **kwargs)

    def attempt() -> Any:
        reporting.begin(in_pass=False)
        compiled = compile(model, list(inputs), *args, **kwargs)
        reporting.served(model)
        return compiled

    trials = Trials(model, attempt, inputs)
    inner = functools.partial(_inner, trials.cache_keys)
    args, kwargs = _inductor.with_inner_compile(inner, args, kwargs)
    if not _inductor.is_flat(model, inputs):
        trials.first.starts()
    return trials.run()


def starts(model: Any) -> None:
    """Tell the current attempt that Inductor's first pass over `model` is about to run."""
    attempt = attempts.current()
    if attempt is not None and attempt.model is model:
        attempt.starts()


def _inner(
    cache_keys: list[str], compile: Callable[..., Any], graph: Any, inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Compile one aten graph. The compile of a backward can be repeated by itself: see `Backward`."""
    outer = attempts.current()
    if outer is not None and isinstance(graph, fx.GraphModule):
        outer.communicates |= _inductor.communicates(graph)
    # If an attempt leaves out a stage, nothing is fused in a backward.
    spared = config.strict or not config.enabled or (outer is not None and outer.without.stages)
    backward = kwargs.get("is_backward") and isinstance(graph, fx.GraphModule)
    try:
        if not backward or spared:
            compiled = compile(graph, inputs, *args, **kwargs)
        else:
            compiled = Backward(
                graph, lambda: compile(graph, list(inputs), *args, **kwargs), cache_keys
            ).run()
    except Exception as error:
        # AOTAutograd ignores the error, and compiles the backward again when it is called.
        if backward and outer is not None and not config.strict:
            outer.broken = error
        raise
    reporting.served()
    key = _inductor.cache_key(compiled)
    if outer is not None and key:
        outer.graph_keys.append(key)
    return compiled


def keyed(key: str) -> None:
    """Tell the current attempt a key under which AOTAutograd looks for its graph in the cache."""
    attempt = attempts.current()
    if attempt is not None:
        attempt.cache_keys.append(key)


class Backward(Trials):
    """The compile of a backward's aten graph."""

    stages = frozenset({"post_grad"})

    def __init__(self, model: fx.GraphModule, compile: Callable[[], Any], cache_keys: list[str]) -> None:
        super().__init__(model, compile)
        self.cache_keys += cache_keys
        self.first.starts()
        self._attentions = [
            Site("attention", "failed", node.name, source=_inductor.source_line(node))
            for node in unfusing.backwards(model.graph)
        ]
        self._overwritten = _inductor.donated()

    def _may_be_ours(self) -> bool:
        return bool(self.first.fused or self._attentions)

    def _after(self, error: Exception) -> Made:
        if self.first.fused:
            try:
                return super()._after(error)
            except Exception as without:
                if not self._attentions or _inductor.is_for_the_caller(without):
                    raise
        of_first = self._take_back()
        try:
            made = self._again(*self._written_out(f"the compile of its backward raised {error_text(error)}"))
        except Exception as again:
            self._put_back(*of_first)
            raise self._explained(error) from again
        self._put_back(made.ledger, made.told)
        made.state.restore()
        self._say(made, error)
        self._attentions = []
        return made

    def _written_out(self, reason: str) -> tuple[Without, Callable[[fx.Graph], None]]:
        def change(graph: fx.Graph) -> None:
            for site in self._attentions:
                site.reason, site.code = reason, Reason.RAISED.code
                reporting.record(site)
            unfusing.write_out(graph)

        return Without(stages=self.stages, reason=reason), change

    def _explained(self, error: Exception) -> Exception:
        where = "; ".join(dict.fromkeys(site.source or site.node for site in self._attentions))
        return RuntimeError(
            f"the backward of the attention at {where} raised {error_text(error)}, after its forward had run."
            " INDUCTOR_FUSIONS_ATTENTION=0 disables the attention fusion"
        )

    def _guarded(self, compiled: Any) -> Any:
        if self._may_be_ours() and not self._communicates():
            launching.guard_backward(compiled, self._overwritten, self._relaunched)
        return compiled

    def _launches(self, reason: str) -> list[tuple[Without, Callable[[fx.Graph], None] | None]]:
        found = super()._launches(reason) if self.first.fused else []
        return [*found, *([self._written_out(reason)] if self._attentions else [])]

    def _left(self, kept: Made) -> list[Site]:
        return [*super()._left(kept), *(site for site in self._attentions if site.reason)]
