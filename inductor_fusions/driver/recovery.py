"""If a compile raises with fusions, it is repeated with fewer of them, down to none.

What each attempt does to the graph, to the records and to the state of the process is undone before the next,
so that stock Inductor compiles what it would have been given without this package. Where that raises too, the
error is its own.

A backward is compiled when it is first called, or its error is ignored until then: the forward has run, and
what it keeps is settled. Of its graph the sites after autograd can be left out; a backward of an attention
that was fused before autograd is written as matrix products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from .. import _inductor, config, reporting
from ..reasons import Reason
from ..sites import Site
from . import attempts, launching, unfusing
from .attempts import Without
from .trials import Made, Trials, line


def around(compile: Callable[..., Any], model: Any, inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    """What `compile` gives, or where it raises because of our fusions, what it gives with fewer of them.

    Args:
        compile: Inductor's `compile_fx`.
        model, inputs, args, kwargs: its arguments.

    Raises:
        Exception: what `compile` raises without any fusion; with `config.strict`, or where the error is meant
            for the caller, what it raised with them.
    """
    if attempts.current() is not None or not config.enabled or not isinstance(model, fx.GraphModule):
        return compile(model, inputs, *args, **kwargs)
    trials = Trials(model, lambda: compile(model, list(inputs), *args, **kwargs))
    inner = functools.partial(_inner, trials.cache_keys)
    args, kwargs = _inductor.with_inner_compile(inner, args, kwargs)
    if not _inductor.is_flat(model, inputs):
        trials.first.starts()
    return trials.run()


def starts(model: Any) -> None:
    """Inductor's first pass over a graph is about to run."""
    attempt = attempts.current()
    if attempt is not None and attempt.model is model:
        attempt.starts()


def _inner(
    cache_keys: list[str], compile: Callable[..., Any], graph: Any, inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Code for one aten graph. That of a backward is made when it is first called, or by then it may be."""
    outer = attempts.current()
    if outer is not None and isinstance(graph, fx.GraphModule):
        outer.communicates |= _inductor.communicates(graph)
    # Where an attempt leaves out a stage, nothing of a backward is fused.
    spared = config.strict or not config.enabled or (outer is not None and outer.without.stages)
    if not kwargs.get("is_backward") or spared or not isinstance(graph, fx.GraphModule):
        compiled = compile(graph, inputs, *args, **kwargs)
    else:
        trials = Backward(graph, lambda: compile(graph, list(inputs), *args, **kwargs), cache_keys)
        try:
            compiled = trials.run()
        except Exception as error:
            # AOTAutograd ignores it, and compiles the backward again when it is called.
            if outer is not None:
                outer.broken = error
            raise
    key = _inductor.cache_key(compiled)
    if outer is not None and key:
        outer.graph_keys.append(key)
    return compiled


def keyed(key: str) -> None:
    """AOTAutograd looks for a graph in its cache."""
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
            Site("attention", "failed", node.name, source=reporting.source_line(node))
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
            made = self._again(*self._written_out(f"the compile of its backward raised {line(error)}"))
        except Exception as again:
            self._put_back(*of_first)
            raise self._explained(error) from again
        self._put_back(made.ledger, made.told)
        made.state.put_back()
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
            f"the backward of the attention at {where} raised {line(error)}, after its forward had run. "
            "INDUCTOR_FUSIONS_ATTENTION=0 disables the attention fusion"
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
