"""Chooses the kernel of an attention: what each supports, and which is measured to be fastest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ... import config, decisions, modes, tables
from ..._inductor import hint, known_true, sdpa_is_fused
from ...fusion import LeftToStock
from ...graph import torch_ops
from ...operands import may_use_tf32
from ...reasons import Reason
from . import flex, row_bias
from .decode import plan as decode
from .problem import Problem, is_in_rows
from .short import terms as short
from .structure import Structure

CALL = "already an SDPA call"
CHOSEN = f"{CALL}, and the caller selects its backends"
FORBIDDEN = "no enabled SDPA backend supports this attention (sdpa_kernel, enable_flash_sdp)"


@dataclass(frozen=True)
class Choice:
    """What to emit.

    Attributes:
        kernel: "sdpa" (its own choice of backend), "efficient", "row_bias", "flex", "short" or "decode".
        grouped: whether k and v keep their own heads.
        text: for reports.
    """

    kernel: str
    grouped: bool
    text: str


def choose(problem: Problem) -> Choice:
    """The cheapest kernel for an attention that is spelled out.

    Args:
        problem: what to compute.

    Raises:
        LeftToStock: no fused kernel takes it, or none is measured to be faster.
        Rejected: those that take it would round a bias.
    """
    _drop_structure_that_is_limited(problem)
    flexible = _flexible(problem)
    if problem.stages:
        unable = flex.takes(problem)
        if unable:
            raise Reason.IN_BETWEEN.left_to_stock(
                f"the scores pass through {problem.stages[-1][0].function}, and {unable}"
            )
    if flexible and config.attention_kernel == "flex":
        return _choice("flex", problem)
    if decoding := _decoding(problem):
        return decoding
    is_short = config.attention_kernel in ("auto", "short") and not short.refused(problem)
    if is_short and config.attention_kernel == "short":
        return _choice("short", problem)
    if config.attention_kernel == "row_bias" and _has_row_bias(problem):
        return _choice("row_bias", problem)
    fits: tuple[str, ...] = ("flex",)
    if not problem.stages:
        fits = available(problem)
        if flexible and _is_sparse(problem) and config.attention_kernel == "auto":
            fits += ("flex",)
        if config.attention_kernel == "auto" and _has_row_bias(problem):
            fits += ("row_bias",)
        if is_short:
            fits += ("short",)
    if problem.rounded_bias is not None and not fits:
        raise Reason.NO_KERNEL.rejected(_why_math(problem), "give the bias the dtype of q")
    if config.policy == "always":
        kernel = _proved(problem, fits)
        if kernel == "sdpa" and not _may_call(problem, fits):
            raise Reason.NO_KERNEL.left_to_stock(FORBIDDEN)
        return _choice(kernel, problem)
    if not fits:
        raise Reason.NO_KERNEL.left_to_stock(
            f"no fused kernel supports this attention, because of {_why_math(problem)}"
        )
    verdict = _measured(problem, fits)
    if verdict.kernel is None:
        raise LeftToStock(verdict.reason, "INDUCTOR_FUSIONS_POLICY=always fuses whatever is proved")
    return _choice(verdict.kernel, problem, _note(verdict))


def choose_for_call(problem: Problem, changed: bool, as_short: Problem | None = None) -> Choice:
    """The kernel for a call of SDPA.

    Args:
        problem: what to compute.
        changed: whether its mask or its repeated heads go away, which is never slower.
        as_short: the same with its mask as a term, where the kernel for short attention takes it.

    Raises:
        LeftToStock: the call as it is is the fastest that is known.
    """
    structure = problem.structure
    if modes.is_restricted():
        return _as_a_call(problem, changed)
    _drop_structure_that_is_limited(problem)
    if decoding := _decoding(problem):
        return decoding
    reason = ""
    by_row: tuple[str, ...] = ("row_bias",) if _has_row_bias(problem) else ()
    if by_row and config.attention_kernel == "row_bias":
        return _choice("row_bias", problem)
    if _is_sparse(problem) and _flexible(problem) and config.attention_kernel != "sdpa":
        if config.attention_kernel == "flex" or (config.policy == "always" and _preferred(problem)):
            return _choice("flex", problem)
        verdict = _measured(problem, ("sdpa", "flex", *by_row))
        if verdict.kernel in ("flex", "row_bias"):
            return _choice(verdict.kernel, problem, _note(verdict))
        assert structure is not None
        reason = f"{CALL}; flex attention for its mask ({structure.kind}): {verdict.reason}"
        if verdict.kernel == "sdpa":
            reason = f"{CALL}, the fastest kernel measured for its mask ({structure.kind})"
    if as_short is not None and config.attention_kernel == "short":
        return _choice("short", as_short)
    if as_short is not None and config.attention_kernel == "auto":
        verdict = _measured(as_short, ("sdpa", "short"))
        if verdict.kernel == "short":
            return _choice("short", as_short, _note(verdict))
    if not changed:
        raise Reason.CHOSEN.left_to_stock(reason or why_as_it_is(problem, structure))
    return _choice("sdpa", problem)


def _as_a_call(problem: Problem, changed: bool) -> Choice:
    """A call that stays one, because the caller has chosen among the backends of SDPA."""
    if not changed:
        raise Reason.CHOSEN.left_to_stock(CHOSEN)
    choice = _choice("sdpa", problem)
    if not _may_call(problem, available(problem, choice.grouped)):
        raise Reason.NO_KERNEL.left_to_stock(f"{CHOSEN}; none of them supports the rewritten call")
    return choice


def _decoding(problem: Problem) -> Choice | None:
    """The kernel for a few queries, where it is measured to be faster than SDPA, or asked for."""
    asked = config.attention_kernel
    if asked not in ("auto", "decode") or decode.refused(problem):
        return None
    if asked == "decode":
        return _choice("decode", problem)
    query = decisions.Query("decode_attention", decode.shape_of(problem).row)
    verdict = decisions.decide(query, problem.q.value.device, may_measure=False)
    return None if verdict.kernel is None else _choice("decode", problem, f", {verdict.note}")


def _may_call(problem: Problem, fits: tuple[str, ...]) -> bool:
    """Whether SDPA has a backend for a problem that the caller allows; `fits` are its fused ones."""
    return "sdpa" in fits or torch.backends.cuda.math_sdp_enabled()


def why_as_it_is(problem: Problem, structure: Structure | None) -> str:
    """Why a call of SDPA is left as it is, from what was proved of its mask."""
    if problem.attn_mask is None:
        return f"{CALL} without a mask"
    if structure is None:
        return f"{CALL}, and nothing is proved about its mask"
    unable = flex.takes(problem)
    if not unable and problem.structure is None:
        unable = "on a CPU flex attention cannot be followed by the correction of fully masked rows"
    if not unable:
        asked = config.attention_kernel
        unable = f"flex attention is not selected (INDUCTOR_FUSIONS_ATTENTION_KERNEL={asked})"
    return f"{CALL}; its mask is {structure.kind}, and {unable}"


def _proved(problem: Problem, fits: tuple[str, ...]) -> str:
    """The kernel where nothing is measured: SDPA is math where no fused kernel of it fits."""
    if "flex" in fits and _preferred(problem):
        return "flex"
    if problem.rounded_bias is not None:
        return fits[0]  # none of them is SDPA
    return "short" if fits == ("short",) else "sdpa"


def _choice(kernel: str, problem: Problem, note: str = "") -> Choice:
    grouped = not known_true(problem.k.shape[1] == problem.q.shape[1])
    if grouped and kernel == "row_bias":
        grouped = row_bias.takes(problem, grouped=True)
    elif grouped and kernel not in ("flex", "decode"):
        grouped = kernel == "sdpa" and bool(available(problem, grouped=True))
    return Choice(kernel, grouped, _text(problem, grouped, kernel) + note)


def _measured(problem: Problem, candidates: tuple[str, ...]) -> decisions.Decision:
    """What the table of the device says: by the class of the mask, else by its shape."""
    suffix = "_grad" if _mask_needs_grad(problem) else ""
    biased = problem.structure is not None and bool(problem.structure.biases)
    names = [problem.flex_kind] if _is_sparse(problem) else []
    if biased and names == ["causal"]:
        names = []  # its rows are of SDPA that is told so, and takes no bias then
    if "row_bias" in candidates and biased:
        names.insert(0, f"alibi {problem.flex_kind}")
    for name in dict.fromkeys([*names, problem.mask_kind]):
        verdict = decisions.attention(
            device=problem.q.value.device,
            dtype=problem.dtype,
            mask=name + suffix,
            train=problem.train,
            batch_heads=hint(problem.q.shape[0] * problem.q.shape[1]),
            q_len=hint(problem.q.shape[2]),
            kv_len=hint(problem.k.shape[2]),
            head_dim=hint(problem.q.shape[3]),
            candidates=candidates,
            tf32=problem.q.value.device.type == "cuda" and may_use_tf32(),
            heads=hint(problem.q.shape[1]),
        )
        if verdict.known:
            break
    return verdict


def _note(decision: decisions.Decision) -> str:
    by = "" if decision.kernel == "sdpa" else f" ({decision.kernel})"
    return f"{by}, {decision.note}"


def _has_row_bias(problem: Problem) -> bool:
    """Whether cuDNN computes it with a causal mask and one row of biases for all queries."""
    return not row_bias.refused(problem) and row_bias.takes(problem, grouped=False)


def _has_mask(problem: Problem) -> bool:
    return bool(problem.terms) or problem.attn_mask is not None


def _drop_structure_that_is_limited(problem: Problem) -> None:
    """What gives rows without a key their value would stand behind flex attention, where it may not be."""
    limited = problem.q.value.device.type in flex.LIMITED
    structure = problem.structure
    if limited and structure is not None and structure.number is not None and not structure.never_empty:
        problem.structure = None


def _flexible(problem: Problem) -> bool:
    """Whether flex attention takes a problem whose mask it can be told."""
    return not flex.takes(problem) and (problem.structure is not None or not _has_mask(problem))


def _preferred(problem: Problem) -> bool:
    return bool(problem.stages) or problem.q.value.device.type not in flex.LIMITED


def _is_sparse(problem: Problem) -> bool:
    """Whether the mask is a structure of which whole blocks may be hidden, and SDPA has no name for it."""
    return problem.structure is not None and problem.structure.visible is not True and not problem.causal


def available(problem: Problem, grouped: bool = False) -> tuple[str, ...]:
    """The kernels ("sdpa", "efficient") that compute the problem without writing out the scores."""
    device = problem.q.value.device.type
    if problem.rounded_bias is not None:
        return ()
    if device == "cuda":
        return _on_cuda(problem, grouped)
    return ("sdpa",) if _on_cpu(problem, grouped) else ()


def _mask_needs_grad(problem: Problem) -> bool:
    nodes = [t.node for t, _ in problem.terms] + ([problem.attn_mask] if problem.attn_mask else [])
    if any((t := torch_ops.tensor(n)) is not None and t.requires_grad for n in nodes):
        return True
    return problem.sink is not None and problem.sink[0].value.requires_grad


def _on_cpu(problem: Problem, grouped: bool) -> bool:
    """Ask SDPA itself, with small tensors of the same kind: sizes do not matter to its choice."""
    if problem.q.value.device.type != "cpu" or problem.dropout > 0:
        return False
    heads, shared = (2, 1) if grouped else (2, 2)

    def small(operand: Any, count: int) -> torch.Tensor:
        dim = hint(operand.shape[-1])
        return torch.empty(1, count, 2, dim, dtype=problem.dtype, requires_grad=False)

    mask = None
    if problem.terms or problem.attn_mask is not None:
        mask = torch.zeros(1, 1, 2, 2, dtype=problem.dtype, requires_grad=_mask_needs_grad(problem))
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        return sdpa_is_fused(
            small(problem.q, heads), small(problem.k, shared), small(problem.v, shared),
            mask, problem.dropout, problem.causal, grouped,
        )  # fmt: skip


def _on_cuda(problem: Problem, grouped: bool) -> tuple[str, ...]:
    backends = torch.backends.cuda
    if _mask_needs_grad(problem) and not any(
        t.value.requires_grad for t in (problem.q, problem.k, problem.v)
    ):
        return ()  # SDPA keeps no logsumexp for its backward then, and that reads one (pytorch#148476)
    if not _copies_pay(problem, grouped):
        return ()
    k, v = (problem.k, problem.v) if grouped else (problem.full_k, problem.full_v)
    q = _in_rows(problem.q.value.to(problem.dtype))
    mask = None
    if problem.terms or problem.attn_mask is not None:
        full = (*problem.q.shape[:3], problem.k.shape[2])
        given = [operand.value for _, operand in problem.terms]
        if problem.attn_mask is not None:
            given.append(torch_ops.value(problem.attn_mask))
        own = torch.broadcast_shapes(*(t.shape for t in given))
        # A mask is expanded, as SDPA does it; one that takes a gradient is whole.
        mask = q.new_empty(full if _mask_needs_grad(problem) else own, dtype=problem.dtype).expand(full)
        if _mask_needs_grad(problem):
            mask.requires_grad_()
    params = backends.SDPAParams(
        q,
        _in_rows(k.value.to(problem.dtype)),
        _in_rows(v.value.to(problem.dtype)),
        mask,
        problem.dropout,
        problem.causal,
        grouped,
    )
    efficient = backends.can_use_efficient_attention(params)
    if not (
        efficient or backends.can_use_flash_attention(params) or backends.can_use_cudnn_attention(params)
    ):
        return ()
    # Its backward is no deterministic one; SDPA chooses another where that is asked for.
    by_name = efficient and not grouped and not torch.are_deterministic_algorithms_enabled()
    return ("sdpa", "efficient") if by_name and torch.backends.cuda.mem_efficient_sdp_enabled() else ("sdpa",)


def _in_rows(value: torch.Tensor) -> torch.Tensor:
    """A fake operand as it is given to SDPA: copied where its last dim is not in order in memory."""
    return value if is_in_rows(value) else value.contiguous()


def _copies_pay(problem: Problem, grouped: bool) -> bool:
    """Whether copies for SDPA, read and written, move less than the scores, written and read."""
    k, v = (problem.k, problem.v) if grouped else (problem.full_k, problem.full_v)
    copied = sum(hint(t.value.numel()) for t in (problem.q, k, v) if not is_in_rows(t.value))
    if not copied or config.policy == "always":
        return True
    batch, heads, queries, _ = problem.q.shape
    return bool(hint(batch * heads * queries * problem.k.shape[2]) >= copied)


def _why_math(problem: Problem) -> str:
    if problem.rounded_bias is not None:
        wide, narrow = (tables.dtype_name(each) for each in (problem.rounded_bias, problem.dtype))
        return f"a bias of dtype {wide}, which SDPA would round to {narrow}"
    if modes.is_restricted():
        return "its dtype, head dim or strides, or the SDPA backends that are enabled"
    if problem.dropout > 0 and problem.q.value.device.type == "cpu":
        return "dropout on a CPU"
    if _mask_needs_grad(problem):
        return "a bias that requires a gradient"
    if not known_true(problem.q.shape[-1] == problem.v.shape[-1]):
        return "different head dims of q and v"
    if problem.q.value.device.type == "cuda" and not _copies_pay(problem, grouped=False):
        return "its head dim, which is not contiguous: copies would move more than the scores"
    return "its dtype, head dim or strides"


def _text(problem: Problem, grouped: bool, kernel: str) -> str:
    parts = [kernel if kernel in ("flex", "short", "row_bias", "decode") else "sdpa"]
    parts += [stage.function for stage, _, _ in problem.stages]
    structure = problem.structure
    if kernel == "flex":
        if structure is not None and structure.visible is not True:
            parts.append(f"block mask: {structure.kind}")
        if structure is None and _has_mask(problem):
            parts.append("dense mask")
        if structure is not None and structure.biases:
            parts.append("bias in score_mod")
    elif kernel == "row_bias":
        parts.append("is_causal through cuDNN")
    elif problem.causal:
        parts.append("is_causal")
    elif _has_mask(problem):
        parts.append(f"mask: {problem.mask_kind}")
    if problem.sink is not None:
        parts.append("sink")
    if grouped:
        parts.append("enable_gqa")
    return ", ".join(parts)
