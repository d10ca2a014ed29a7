"""The graph pass that Inductor runs, one for each stage."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from torch import fx

from . import config, reporting, tables
from ._inductor import CustomGraphPass, is_body_of_dynamo, trace_artifact
from .fusion import Candidate, Fusion, LeftToStock, Rejected

log = logging.getLogger(__name__)


class FusionPass(CustomGraphPass):
    """Applies the fusions of one stage to a graph, in place.

    Args:
        stage: "pre_grad" or "post_grad".
        fusions: the fusions of that stage, in order.
        before: a pass that the hook held before and that runs first (torch 2.11 and 2.12, where a
            hook holds a single callable).
    """

    def __init__(
        self, stage: str, fusions: tuple[Fusion, ...], before: Callable[..., Any] | None = None
    ) -> None:
        self.stage, self.fusions, self.before = stage, fusions, before

    def __call__(self, graph: fx.Graph) -> None:
        if self.before is not None:
            self.before(graph)
        if not config.enabled:
            return
        if self.stage == "post_grad":
            reporting.flush_counts()
        elif not is_body_of_dynamo(graph):
            reporting.forget_counts()
        sites = [site for fusion in self.fusions if _is_on(fusion.name) for site in apply(fusion, graph)]
        if self.stage == "post_grad":
            reporting.flush_counts()
        if sites:
            trace_artifact("inductor_fusions", lambda: reporting.Report(sites).to_json())

    def uuid(self) -> Any:
        """Everything that the outcome of the pass depends on beside the graph.

        None, which makes Inductor bypass its cache, where a pass that was there before has none.
        """
        before = None
        if self.before is not None:
            before = self.before.uuid() if isinstance(self.before, CustomGraphPass) else None
            if before is None:
                return None
        toggles = config.get_config_copy()
        state = json.dumps(
            [self.stage, [f.name for f in self.fusions], toggles, tables.digest()], default=str
        )
        return hashlib.sha256(f"{code_digest(self.fusions)}{state}{before!r}".encode()).hexdigest()

    def __deepcopy__(self, memo: dict[int, Any]) -> FusionPass:
        return self  # configs are copied when they are saved

    def __reduce__(self) -> tuple[Any, ...]:
        # torch 2.11 pickles the value of a pre-grad hook into its cache key.
        return (str, (f"{self.stage}:{self.uuid()}",))


def _is_on(name: str) -> bool:
    return bool(getattr(config, name, True))


@functools.lru_cache
def code_digest(fusions: tuple[Fusion, ...]) -> str:
    """Hash of every source file of the package, of third parties' fusions, and of the versions."""
    package = Path(__file__).parent
    files = sorted(path for path in package.rglob("*") if path.suffix in (".py", ".jinja"))
    for fusion in fusions:
        path = Path(fusion.recognise.__code__.co_filename) if hasattr(fusion.recognise, "__code__") else None
        if path is not None and package not in path.parents and path.exists():
            files.append(path)
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    for name in ("inductor_fusions", "triton"):
        try:
            digest.update(f"{name}={metadata.version(name)}".encode())
        except metadata.PackageNotFoundError:
            digest.update(f"{name} absent".encode())
    return digest.hexdigest()


def apply(fusion: Fusion, graph: fx.Graph) -> list[reporting.Site]:
    """Apply one fusion to every candidate in `graph` and return their sites.

    A fusion that raises leaves its site as it was; `config.strict` raises instead.
    """
    sites: list[reporting.Site] = []
    try:
        for candidate in fusion.recognise(graph):
            sites.append(_fuse(fusion, candidate))
    except Exception as error:
        if config.strict:
            raise
        log.warning("%s: recognising raised %r; the rest of this graph is left as it is", fusion.name, error)
        log.info("traceback", exc_info=True)
    return sites


def _fuse(fusion: Fusion, candidate: Candidate) -> reporting.Site:
    anchor = candidate.anchor
    graph = anchor.graph  # of the candidate: it may be the body of a nested region
    site = reporting.Site(fusion.name, "fused", anchor.name, source=reporting.source_line(anchor))
    known = set(graph.nodes)
    try:
        site.details = candidate.describe()
        candidate.guard()
        site.kernel = candidate.rewrite()
    except Rejected as miss:
        site.verdict = "left to stock" if isinstance(miss, LeftToStock) else "rejected"
        site.reason, site.hint = miss.reason, miss.hint
        _erase_new(graph, known)
    except Exception as error:
        if config.strict:
            raise
        _erase_new(graph, known)
        site.verdict, site.reason = "failed", repr(error)
        log.warning(
            "%s raised %r at %s; the site is left as it was", fusion.name, error, site.source or site.node
        )
        log.info("traceback", exc_info=True)
    else:
        log.info("%s", site)
    if site.verdict != "fused":
        log.info("%s", site)
    reporting.record(site)
    reporting.count(fusion.name, site.verdict)
    return site


def _erase_new(graph: fx.Graph, known: set[fx.Node]) -> None:
    """Remove the nodes that an abandoned rewrite left behind."""
    for node in reversed(list(graph.nodes)):
        if node not in known and not node.users:
            graph.erase_node(node)
