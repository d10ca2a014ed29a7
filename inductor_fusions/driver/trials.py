"""Compiles a graph with subsets of its sites until one does not raise."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from .. import _inductor, config, decisions, reporting, tags
from ..sites import Site, error_text
from . import attempts, launching, passes, watching
from .attempts import Attempt, Fused, Key, Without

log = logging.getLogger(__name__)

#: At most so many compiles of one graph, the one that raised and the one with no site among them.
MOST = 12

#: Counter of the compiles that raised with our fusions and were repeated with fewer.
RECOVERED = "recovered"


@dataclass
class Made:
    """A compile that did not raise."""

    attempt: Attempt
    compiled: Any
    ledger: reporting.Ledger
    told: list[Any]
    state: _inductor.GlobalState


class Trials:
    """The compiles of one graph: repeated if the first one, or the first call of its code, raises.

    Args:
        compile: compiles the module as it is when it is called.
    """

    #: The stages whose passes work on the graph.
    stages = frozenset({"pre_grad", "post_grad"})

    def __init__(self, model: fx.GraphModule, compile: Callable[[], Any], inputs: Sequence[Any] = ()) -> None:
        self.model, self._compile = model, compile
        self.cache_keys: list[str] = []
        self.first = self._last = Attempt(model, cache_keys=self.cache_keys)
        self._state, self._context = _inductor.GlobalState(), _inductor.Context(inputs)
        self._inference = torch.is_inference_mode_enabled()  # which only its guard can switch off
        self._records = reporting.mark()
        self._watcher = watching.current()
        self._told = self._watcher.mark() if self._watcher is not None else 0
        self._counted = passes.count_from()
        passes.count_from(self._counted)
        self._compiles = 1

    def run(self) -> Any:
        """The compiled code, with as many fused sites as possible."""
        try:
            compiled = self._made_by(self.first)
        except Exception as error:
            if not self._may_be_ours() or config.strict or _inductor.is_for_the_caller(error):
                raise
            if self._communicates() and _inductor.compiles_together():
                raise
            _inductor.clear_frames(error)
            if torch.is_inference_mode_enabled() != self._inference:
                raise
            made = self._after(error)
            self.first, compiled = made.attempt, made.compiled
        self._ledger = reporting.since(self._records)
        return self._guarded(compiled)

    def _may_be_ours(self) -> bool:
        """Whether a fusion can be the cause if the first compile raises."""
        return bool(self.first.fused)

    def _communicates(self) -> bool:
        """Whether other processes may wait for the code: it must not run twice here if it runs once there."""
        return self.first.communicates or _inductor.communicates(self.model)

    def _guarded(self, compiled: Any) -> Any:
        """The compiled code, guarded against an exception in its first call."""
        if (not self.first.fused and not self._ledger.fused) or self._communicates():
            return compiled
        return launching.guarded(compiled, self._context.written, self._relaunched)

    # -- attempts ---------------------------------------------------------------------------------

    def _made_by(self, attempt: Attempt) -> Any:
        with attempts.active(attempt), decisions.once():
            compiled = self._compile()
        # Without sites, the error is stock's: it is raised only if the backward is called.
        if attempt.broken is not None and attempt.fused:
            raise attempt.broken
        return compiled

    def _again(self, without: Without, change: Callable[[fx.Graph], None] | None = None) -> Made:
        """Undo what earlier attempts did, change the graph if `change` is given, and compile again."""
        self._compiles += 1
        self._state.restore()
        passes.count_from(self._counted)
        if self.first.copy is not None:
            self.first.copy.restore()
        attempt = self._last = Attempt(
            self.model, without, tuple(self.first.fused), self.first.copy, self.cache_keys
        )
        try:
            if change is not None:
                change(self.model.graph)
                self.model.recompile()
            compiled = self._made_by(attempt)
        except Exception:
            self._raised = self._take_back()
            raise
        finally:
            self.first.copy = attempt.copy
        return Made(attempt, compiled, *self._take_back(), _inductor.GlobalState())

    def _take_back(self) -> tuple[reporting.Ledger, list[Any]]:
        told = self._watcher.take_back(self._told) if self._watcher is not None else []
        return reporting.take_back(self._records), told

    def _put_back(self, ledger: reporting.Ledger, told: list[Any]) -> None:
        reporting.put_back(ledger)
        if self._watcher is not None:
            self._watcher.put_back(told)

    def _tries(self, without: Without) -> Made | None:
        """`_again`, or None if it raises."""
        try:
            return self._again(without)
        except Exception as error:
            if _inductor.is_for_the_caller(error):
                raise
            return None

    # -- the first call ---------------------------------------------------------------------------

    def _relaunched(self, error: Exception, call: launching.Call) -> tuple[Any, Any]:
        """The code that replaces the code whose first call raised, and its outputs.

        Sites that become the same kernel are left out together; then all sites are.
        """
        _inductor.forget_cached(self.cache_keys, self.first.graph_keys)
        reporting.remove(self._ledger)
        guards, self._records = self._context.guards(), reporting.mark()
        reason = f"its first call raised {error_text(error)}"
        left = self._launches(reason)
        while True:
            (without, change), made = left.pop(0), None
            try:
                with self._context.again():
                    self._state = self._state.later()
                    made = self._again(without, change)
                outputs = call.repeat(made.compiled)
                break
            except Exception as again:
                if not left or _inductor.is_for_the_caller(again):
                    reporting.put_back(self._ledger)
                    raise
                if made is not None:
                    _inductor.forget_cached(self.cache_keys, made.attempt.graph_keys)
                    if not self.first.fused:
                        self.first, left = made.attempt, self._launches(reason)
        self._put_back(made.ledger, made.told)
        self._say(made, error)
        if self._context.guards() == guards:
            return made.compiled, outputs
        # The new code relies on more facts about sizes than Dynamo checks: it serves these sizes alone.
        if self.first.copy is not None:
            self.first.copy.restore()
        return launching.for_sizes(made.compiled, launching.sizes_of(call.values), self.model), outputs

    def _launches(self, reason: str) -> list[tuple[Without, Callable[[fx.Graph], None] | None]]:
        """The sites to leave out, in turn: none at first if the code is from a cache."""
        by_kind: dict[tuple[str, str], list[Fused]] = {}
        for each in self.first.fused:
            by_kind.setdefault(each.kind, []).append(each)
        first = [Without(_keys(sites), reason=reason) for sites in by_kind.values()]
        if not 1 < len(by_kind) <= 3:  # one kind is all sites, and many would take too long
            first = [] if by_kind else [Without()]
        return [(without, None) for without in (*first, Without(stages=self.stages, reason=reason))]

    # -- which attempt is kept --------------------------------------------------------------------

    def _after(self, error: Exception) -> Made:
        """The compile with the most fused sites among those that do not raise."""
        self._take_back()
        reason = f"the compile of its graph raised {error_text(error)}"
        try:
            kept = self._stock(reason)
        except Exception as stock:
            self._last.say_of_left_out(f"the compile of its graph raises without it too: {error_text(stock)}")
            self._put_back(*self._raised)
            log.debug("the compile also raises without fusions: %r", stock)
            raise
        stocks = kept.attempt.broken
        if stocks is not None:
            kept.attempt.say_of_left_out(
                f"its backward does not compile without it either: {error_text(stocks)}"
            )
        for made in self._with_sites(reason) if stocks is None else ():
            if made is not None and len(made.attempt.fused) > len(kept.attempt.fused):
                kept = made
        self._put_back(kept.ledger, kept.told)
        kept.state.restore()
        if stocks is None:
            self._say(kept, error)
        return kept

    def _stock(self, reason: str) -> Made:
        """The compile without any site but those that protect it from wrong kernels, unless these raise."""
        without = Without(stages=self.stages, reason=reason)
        try:
            return self._again(without)
        except Exception as error:
            if not self._last.fused or _inductor.is_for_the_caller(error):
                raise
        return self._again(replace(without, bare=True))

    def _with_sites(self, reason: str) -> Iterator[Made | None]:
        """Compiles with some of the sites that the first attempt fused; None for a compile that raises.

        A binary search over the first sites finds the one that raises. Then it is left out; if that still
        raises, all sites of the same fusion and kernel are.
        """
        left = list(self.first.fused)
        out: list[Fused] = []
        while len(left) > 1:
            good, bad = 0, len(left)
            while bad - good > 1 and self._compiles < MOST:
                middle = (good + bad) // 2
                made = self._tries(self._up_to(left, middle, out, reason))
                good, bad = (good, middle) if made is None else (middle, bad)
                yield made
            guilty = left[bad - 1]
            alike = [each for each in left if each.kind == guilty.kind]
            for group in [[guilty], alike] if len(alike) > 1 else [[guilty]]:
                out += [each for each in group if each in left]
                left = [each for each in left if each not in group]
                if not left or self._compiles >= MOST:
                    return
                made = self._tries(Without(_keys(out), reason=reason))
                yield made
                if made is not None:
                    return

    @staticmethod
    def _up_to(left: list[Fused], count: int, out: list[Fused], reason: str) -> Without:
        """Leaves out all but the first sites.

        If a site before autograd is left out, nodes after autograd have other names, so those sites are too.
        """
        later = left[count:]
        if any(each.key[0] == "pre_grad" for each in later):
            return Without(_keys([*out, *later]), frozenset({"post_grad"}), reason=reason)
        return Without(_keys([*out, *later]), reason=reason)

    def _left(self, kept: Made) -> list[Site]:
        """The sites that the first attempt fused and the kept one did not."""
        fused = {each.key for each in kept.attempt.fused}
        return [each.site for each in self.first.fused if each.key not in fused]

    def _say(self, kept: Made, error: Exception) -> None:
        _inductor.compile_counters()[tags.TAG][RECOVERED] += 1
        left = self._left(kept)
        where = list(dict.fromkeys(f"{site.fusion} at {site.source or site.node}" for site in left))
        more = f" and {len(where) - 3} more" if len(where) > 3 else ""
        log.warning(
            "%s was raised. The graph was compiled again with stock's code for %s%s. Please report it: "
            "python -m inductor_fusions run --issue FILE SCRIPT collects what is needed",
            error_text(error), "; ".join(where[:3]), more,
        )  # fmt: skip
        log.info("traceback", exc_info=error)


def _keys(sites: Sequence[Fused]) -> frozenset[Key]:
    return frozenset(each.key for each in sites)
