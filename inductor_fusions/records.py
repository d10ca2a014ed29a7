"""Files of sites beside Inductor's cache: written with a cache entry, read where a cache serves it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from torch import fx

from . import _inductor
from .sites import SCHEMA, Report, Site

log = logging.getLogger(__name__)


#: The key of records of sites before autograd begins with it.
JOINT = "joint_"


def key(sites: Sequence[Site], joint: bool = False) -> str:
    """Key of records: a hash of what was decided in the pass (backends are known later).

    Args:
        joint: whether the sites are from before autograd.
    """
    plain = [{**asdict(site), "backend": ""} for site in sites]
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:32]
    return JOINT + digest if joint else digest


def located(sites: Sequence[Site], module: fx.GraphModule) -> list[Site]:
    """Sites before autograd with the lines of the graph that they are served for.

    Caches tell graphs by their operations: the lines in a record may be those of an equal function, or of an
    earlier version of the file. A site is at the node of its name. If there is none, or several in nested
    bodies, it keeps a line that is in this graph, and loses any other.
    """
    bodies = [each.graph for each in module.modules() if isinstance(each, fx.GraphModule)]
    nodes = [(node, _inductor.source_line(node)) for body in bodies for node in body.nodes]
    lines = {line for _, line in nodes}

    def at(site: Site) -> Site:
        places = {line: _inductor.module_path(node) for node, line in nodes if node.name == site.node}
        if len(places) != 1 and site.source in lines:
            return site
        source, path = next(iter(places.items())) if len(places) == 1 else ("", "")
        return replace(site, source=source, module=path)

    return [at(site) for site in sites]


def path_of(key: str) -> Path | None:
    """The file of a key; None if there is no cache folder."""
    folder = _inductor.cache_folder()
    return None if folder is None else folder / "inductor_fusions" / key[-2:] / f"{key}.json"


def write(sites: Sequence[Site], key: str) -> None:
    """Save sites, where there is a folder that can be written."""
    path = path_of(key)
    if path is None or path.exists():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            file.write(Report(list(sites)).to_json())
        os.replace(file.name, path)
    except OSError as error:
        log.debug("the records of a graph were not saved: %s", error)


def read(key: str) -> list[Site] | None:
    """The sites of a key; None if their file is missing or not understood."""
    if not re.fullmatch(f"({JOINT})?[0-9a-f]{{32}}", key):
        return None  # a key from a cache names a file, so its form is checked
    path = path_of(key)
    try:
        values = json.loads(path.read_text()) if path is not None else {}
        if values.get("schema") != SCHEMA:
            return None
        return [Site.from_dict(site) for site in values["sites"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
