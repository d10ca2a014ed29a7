"""The graph pass that Inductor runs, one for each stage."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import logging
import uuid
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import fx

from .. import _inductor, config, decisions, reporting, tags
from .._inductor import CustomGraphPass, is_body, trace_artifact
from ..decisions import machine, tables
from ..effects import inplace, modes
from ..fusion import Candidate, Fusion, LeftToStock, Rejected, Unfinished
from ..graph import values
from ..graph.facts import Journal, held, recording
from ..layouts import leaving, pinning, zeros
from ..reasons import Reason
from ..sites import Report, Site
from . import attempts, changes, containment, matching, smoke, watching

log = logging.getLogger(__name__)

#: Name of the log of sites that were not fused: TORCH_LOGS="fusion_misses".
MISSES = "fusion_misses"


class FusionPass(CustomGraphPass):
    """Applies the fusions of one stage to a graph, in place.

    Args:
        stage: "pre_grad" or "post_grad".
        fusions: the fusions of that stage, in order; or a function that returns them. It is called when the
            pass is used, because fusions of other packages may import Inductor.
        before: a pass that was in the hook before and runs first (torch 2.11 and 2.12, where a hook holds a
            single callable).
    """

    def __init__(
        self,
        stage: str,
        fusions: tuple[Fusion, ...] | Callable[[], tuple[Fusion, ...]],
        before: Callable[..., Any] | None = None,
    ) -> None:
        self.stage, self.before = stage, before
        self._fusions = fusions

    @property
    def fusions(self) -> tuple[Fusion, ...]:
        """The fusions of the stage, in order."""
        return self._fusions() if callable(self._fusions) else self._fusions

    def __call__(self, graph: fx.Graph) -> None:
        if self.before is not None:
            self.before(graph)
        # Without ours after autograd, nothing keeps the layouts that readers of a fused operation rely on.
        if reporting.are_off() or self._problem():
            return
        owner, attempt = graph.owning_module, attempts.current()
        if attempt is not None:
            attempt.enters(self.stage)
        left_out = attempt.left_out(self.stage) if attempt is not None else None
        if self.stage == "pre_grad" and not is_body(graph):
            reporting.begin()
            _inductor.share_fake_mode(graph)
        values.complete(graph)
        if self.stage == "post_grad":
            zeros.drop(graph)
        first = reporting.pending() if self.stage == "pre_grad" else 0
        watcher = watching.current()
        if watcher is not None:
            watcher.begins(self.stage, graph)
        sites: list[Site] = []
        fusions = self.fusions
        if attempt is not None and left_out is not None:
            fusions = tuple(each for each in fusions if each.protects and not attempt.without.bare)
            running = {each.name for each in fusions}
            sites += [site for site in left_out if site.fusion not in running]
            for site in sites:
                _tell(site)
        fusions = tuple(fusion for fusion in fusions if config.is_on(fusion.name))
        # A fusion of another package may change a graph without the journal: each gets new facts.
        for _, some in itertools.groupby(fusions, lambda each: containment.is_foreign(each) and each.name):
            with held():
                for fusion in some:
                    sites += apply(fusion, graph, first + len(sites))
                    # A graph that was broken is replaced by the copy from before.
                    graph = owner.graph if isinstance(owner, fx.GraphModule) else graph
        if self.stage == "post_grad":
            leaving.release(graph)
            leaving.lay_out_gradients(graph)
            pinning.correct(graph)
            if left_out is None:
                _pin(graph)
        if watcher is not None:
            watcher.ends(self.stage, graph, sites)
        if self.stage == "post_grad":
            reporting.store(graph, sites)
        else:
            reporting.keep_pending(sites)
        if sites:
            trace_artifact("inductor_fusions", lambda: Report(sites).to_json())

    def _problem(self) -> str:
        """Why nothing can be fused with this version of torch, or ""."""
        return smoke.problem(self.stage, self.fusions)

    def uuid(self) -> Any:
        """A hash of everything but the graph that the outcome of the pass depends on.

        None makes Inductor bypass its cache: if the outcome depends on earlier compiles, if the source of a
        fusion is not found, if something raises, or if the pass that was in the hook before has no uuid.
        """
        before = None
        if self.before is not None:
            before = self.before.uuid() if isinstance(self.before, CustomGraphPass) else None
            if before is None:
                return None
        try:
            state = self._state()
        except Exception as error:  # a compile must not fail because of a file that cannot be read
            if config.strict:
                raise
            _say_bypassed(repr(error))
            return None
        return None if state is None else hashlib.sha256(f"{state}{before!r}".encode()).hexdigest()

    def _state(self) -> str | None:
        """What `uuid` hashes of the package itself; None if it cannot be hashed."""
        # Mostly none, so that both stages share one digest.
        code = containment.code_digest(tuple(filter(containment.is_foreign, self.fusions)))
        if code is None or config.most_sites() is not None or _inductor.bisecting():
            return None
        toggles, autocast = config.get_config_copy(), _inductor.autocast_beside_the_key()
        names, attempt = [fusion.name for fusion in self.fusions], attempts.current()
        left_out = attempt.without.digest() if attempt is not None else ""
        state = [
            self.stage, names, toggles, autocast, modes.settings(), tables.digest(), machine.digest(),
            self._problem(), left_out,
        ]  # fmt: skip
        return code + json.dumps(state, default=str)

    def __deepcopy__(self, memo: dict[int, Any]) -> FusionPass:
        return self  # configs are copied when they are saved

    def __reduce__(self) -> tuple[Any, ...]:
        # torch 2.11 pickles the value of a pre-grad hook into its cache key.
        return (str, (f"{self.stage}:{self.uuid() or uuid.uuid4()}",))


@functools.lru_cache
def _say_bypassed(error: str) -> None:
    log.warning("Inductor's cache is bypassed, because the key of the fusions cannot be computed: %s", error)


@held()
@decisions.once()
def apply(fusion: Fusion, graph: fx.Graph, first: int = 0) -> list[Site]:
    """Apply one fusion to every candidate in `graph` and return their sites.

    Only rewrites change the graph. If a guard or a rewrite raises, its site is left unfused; with
    `config.strict`, the exception is raised. If a fusion of another package breaks the graph, all of its
    changes are undone: the graph is restored from a copy.

    Args:
        first: number of the first site in this graph.

    Raises:
        Unfinished: a change was begun and cannot be undone, so the graph must not be compiled.
    """
    sites: list[Site] = []
    nodes: list[int] = []
    named: set[fx.Graph] = set()
    copy: containment.Copy | None = None
    broken = ""  # how a fusion of another package has broken the graph
    try:
        for target in fusion.marks:
            changes.remove_marks(target, graph)
        if config.measure and not config.always() and not containment.is_foreign(fusion):
            _measure(fusion, graph)
        for candidate in _candidates(fusion, graph):
            if copy is None and containment.is_foreign(fusion):
                copy = containment.Copy(graph)
            if candidate.finishes:
                _finish(fusion, candidate)
                continue
            site, replaced = _fuse(fusion, candidate, first + len(sites), named)
            counted = config.most_sites() is not None and site.verdict == "fused"
            by_hand = site.verdict == "rejected" and _inductor.is_backward_of_function(candidate.anchor.graph)
            if (by_hand or not candidate.reported) and copy is None and not counted and not _raised(site):
                continue
            sites.append(site)
            nodes.append(replaced)
            if copy is not None and _raised(site):
                break
        if copy is not None and any(site.verdict == "fused" or _raised(site) for site in sites):
            broken = copy.problem()
    except Exception as error:
        if config.strict or (copy is None and isinstance(error, Unfinished)):
            raise
        log.warning("%s: matching raised %r; the rest of this graph is not fused", fusion.name, error)
        log.info("traceback", exc_info=True)
        if copy is not None:
            broken = str(error) if isinstance(error, Unfinished) else copy.problem()
    finally:
        if copy is not None and (broken or any(map(_raised, sites))):
            copy.restore()
            _undo(fusion, sites, broken)
        for site, replaced in zip(sites, nodes, strict=True):
            _tell(site)
            if site.verdict == "fused":
                _inductor.count_match(fusion.name, replaced)
    if broken and config.strict:
        raise RuntimeError(f"{fusion.name} made the graph invalid: {broken}")
    return sites


def _measure(fusion: Fusion, graph: fx.Graph) -> None:
    """Measure the unknown problems of a graph before the first of them is decided.

    All guards run before that, so that the problems with the largest savings are measured first, and once
    more with what was found: where a group of products does not pay, smaller ones are looked at. What the
    guards raise is ignored here: they run again when the sites are fused.
    """
    found: Collection[object] = (graph,)
    while found:
        with decisions.measured_together() as found, contextlib.suppress(Exception):
            for candidate in _candidates(fusion, graph):
                if not candidate.finishes:
                    with contextlib.suppress(Exception), changes.reading(fusion, graph):
                        candidate.guard()


def _pin(graph: fx.Graph) -> None:
    try:
        pinning.pin(graph)
    except Exception as error:
        if config.strict:
            raise
        log.warning("the tensors that flex attention captures are not changed: %r", error)
        log.info("traceback", exc_info=True)


def _raised(site: Site) -> bool:
    """Whether a fusion raised at a site in this attempt, not in an earlier one."""
    attempt = attempts.current()
    return site.verdict == "failed" and not (attempt is not None and attempt.has_left_out(site))


def _undo(fusion: Fusion, sites: list[Site], broken: str) -> None:
    """Mark every fused site of a fusion as failed: its changes of the graph were undone."""
    why = f"the graph was broken: {broken}" if broken else "another site of this fusion raised in this graph"
    undone = [site for site in sites if site.verdict == "fused"]
    for site in undone:
        site.verdict, site.reason, site.code = "failed", why, Reason.RAISED.code
        site.kernel, site.saved = "", {}
    if broken:
        message = "%s made a graph invalid (%s); its changes at %d sites of this graph are undone"
        log.warning(message, fusion.name, broken, len(undone))


def _candidates(fusion: Fusion, graph: fx.Graph) -> Iterator[Candidate]:
    found = matching.candidates(fusion, graph)
    while True:
        with changes.reading(fusion, graph):
            candidate = next(found, None)
        if candidate is None:
            return
        yield candidate


def _finish(fusion: Fusion, candidate: Candidate) -> None:
    try:
        candidate.guard()
        log.debug("%s: %s", fusion.name, candidate.rewrite())
    except Rejected:
        pass
    except Exception as error:
        if config.strict:
            raise
        raise Unfinished(f"{fusion.name} raised {error!r} after the last site of a graph") from error


def _fuse(fusion: Fusion, candidate: Candidate, number: int, named: set[fx.Graph]) -> tuple[Site, int]:
    """Judge one candidate; returns its site, and how many nodes it replaced.

    `named` collects the graphs in which each name of a value was replaced by what it stands for.
    """
    anchor, graph = candidate.anchor, candidate.anchor.graph  # it may be the body of a nested region
    attempt = attempts.current()
    key = attempt.key(fusion.stage, fusion.name, anchor) if attempt is not None else None
    site = Site(
        fusion.name, "fused", anchor.name,
        source=_inductor.source_line(anchor), module=_inductor.module_path(anchor),
    )  # fmt: skip
    with recording(graph) as journal:
        try:
            try:
                if _inductor.eager_bits_are_wanted() and not (fusion.exact or fusion.protects):
                    raise Reason.EAGER_BITS.left_to_stock(
                        "torch._inductor.config.numerics asks for eager's results bit for bit"
                    )
                with changes.reading(fusion, graph):
                    candidate.guard()
            finally:
                site.details = candidate.describe()  # the guard may have left out a part of it
            if attempt is not None and key in attempt.without.sites:
                return attempt.failed(site), 1
            if not _wanted(site):
                raise Reason.LEFT_OUT.left_to_stock("excluded by INDUCTOR_FUSIONS_MAX or by torch's bisector")
            site.saved = candidate.savings()
            if fusion.stage == "pre_grad" and graph not in named:
                inplace.rename(graph)
                named.add(graph)
            journal.clear()
            site.kernel = candidate.rewrite()
        except Exception as error:
            _leave_unfused(site, fusion, error, graph, journal)
        else:
            if candidate.reported:
                _mark(site, fusion, journal, number)
            if attempt is not None and key is not None:
                attempt.fused.append(attempts.Fused(key, site))
    return site, max(1, len(journal.gone))


def _leave_unfused(site: Site, fusion: Fusion, error: Exception, graph: fx.Graph, journal: Journal) -> None:
    """Undo what a rewrite has begun, and give a site the verdict that an exception means."""
    if config.strict and not isinstance(error, Rejected):
        reporting.record(site)
        raise error
    # A rewrite that rejects may have begun to change the graph as well.
    undone = changes.put_back(graph, journal)
    if not undone and not containment.is_foreign(fusion):
        raise Unfinished(f"{fusion.name} raised {error!r} during a rewrite") from error
    site.saved = {}
    if isinstance(error, Rejected) and undone:
        site.verdict = "left to stock" if isinstance(error, LeftToStock) else "rejected"
        site.reason, site.hint, site.code = str(error.reason), error.hint, error.code
        return
    site.verdict, site.reason, site.code = "failed", repr(error), Reason.RAISED.code
    log.warning("%s raised %r at %s; the site runs unfused", fusion.name, error, site.source or site.node)
    log.info("traceback", exc_info=True)


_counted = 0


def count_from(number: int = 0) -> int:
    """Count the sites that INDUCTOR_FUSIONS_MAX allows from a number on; how many were counted before."""
    global _counted
    before, _counted = _counted, number
    return before


def _wanted(site: Site) -> bool:
    """Whether INDUCTOR_FUSIONS_MAX and torch's bisector allow a site to be fused."""
    most = config.most_sites()
    if most is not None:
        global _counted
        _counted += 1
        if _counted > most:
            return False
    return not _inductor.bisected_away(lambda: f"{site.fusion} at {site.source or site.node}")


def _mark(site: Site, fusion: Fusion, journal: Journal, number: int) -> None:
    """Rename and tag the nodes of a fused site, so that generated code and reports can refer to it."""
    added = journal.added()
    calls = [node for node in added if node.op == "call_function"]
    for node in calls:
        if fusion.stage == "pre_grad":
            tags.put(node, number)
    # The comments in Inductor's output code and its provenance tables name these nodes.
    main = [node for node in calls if "attention" in node.name or "inductor_fusions" in str(node.target)]
    for node in main or calls[-1:]:
        _inductor.rename(node, f"inductor_fusions_{fusion.name}_{node.name}")
    watcher = watching.current()
    if watcher is not None:
        watcher.fused(site, journal.removed(), added)


def _tell(site: Site) -> None:
    """Tell the report, the counters and the logs of a site."""
    reporting.record(site)
    misses = _inductor.artifact_log(__name__, MISSES) if site.verdict != "fused" else None
    if misses is not None:
        misses.debug("%s", site)
    else:
        log.info("%s", site)


_inductor.run_deferred()
