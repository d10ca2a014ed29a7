"""Buffer reuse: kernels that overwrite an input which nothing reads afterwards."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

from .loading import inductor_config

log = logging.getLogger(__name__)


def write_over(template: Any, value: Any) -> None:
    """Let the kernel of a template write its output over an input, if it is the last reader of the input.

    Inductor does so with its loops (`decide_inplace_update` in torch/_inductor/scheduler.py), not with
    templates. The same conditions are checked here, when the kernel is rendered: only then it is known what
    is fused behind it.

    Args:
        template: a TritonTemplateBuffer. Each program has what it needs of the input before it writes, and
            no other program needs what it writes over.
    """
    template.make_kernel_render = _over(template.make_kernel_render, template, value)


def _over(make: Callable[..., Any], template: Any, value: Any) -> Callable[..., Any]:
    def make_kernel_render(*args: Any, **kwargs: Any) -> tuple[Any, Callable[[], Any]]:
        kernel, render = make(*args, **kwargs)
        try:
            may = _may_write(template, value)
        except Exception as error:
            # A torch of other names than these: memory of its own is right as well.
            log.warning("cannot determine whether a kernel may overwrite its input: %r", error)
            may = False
        if may:
            _rename(kernel, value.get_name(), template.get_name())
        return kernel, render

    return make_kernel_render


def _rename(kernel: Any, before: str, after: str) -> None:
    """Let the memory of a buffer be another one's from a kernel on.

    The wrapper drops the first name as it takes the second, in front of the call.
    """
    graph = importlib.import_module("torch._inductor.virtualized").V.graph
    kernel.inplace_update_buffers[after] = before
    call = kernel.call_kernel

    def call_kernel(*args: Any, **kwargs: Any) -> Any:
        if graph.wrapper_code.reuses.get(after) == before:
            read = kernel.args.input_buffers
            kernel.args.input_buffers = {after if name == before else name: read[name] for name in read}
        return call(*args, **kwargs)

    kernel.call_kernel = call_kernel


def _may_write(template: Any, value: Any) -> bool:
    """Whether nothing reads an input after a kernel, and its memory has the layout of the output."""
    graph = importlib.import_module("torch._inductor.virtualized").V.graph
    wrapper = importlib.import_module("torch._inductor.codegen.wrapper")
    scheduler = graph.scheduler
    # An input of the graph, which is the caller's, has no such entry.
    read = scheduler.name_to_buf.get(value.get_name())
    if not inductor_config().inplace_buffers or read is None or read.node is not _buffer(value):
        return False
    node = scheduler.name_to_node[template.get_operation_name()]
    # What is fused behind the kernel has a result of its own.
    if len(scheduler.get_fused_node(node).get_nodes()) > 1:
        return False
    return (
        _is_read_once(template, value.get_name(), scheduler)
        and _only_reader(read, node, graph)
        and _agree(read.node.get_output_spec(), template.get_output_spec())
        and graph.wrapper_code.can_reuse(read, node)
        and wrapper.can_match_buffer_size(read.node, template)
        and _stays(scheduler, value.get_name(), node)
    )


def _is_read_once(template: Any, name: str, scheduler: Any) -> bool:
    """Whether no other input of a kernel is in the memory of one."""
    others = [each.get_name() for each in template.inputs]
    others.remove(name)
    buffers = [scheduler.name_to_buf[other].node for other in others if other in scheduler.name_to_buf]
    # A view that an operation has made has a name of its own; whose view it is may take several steps.
    return name not in others and not any(each.get_inputs_that_alias_output() for each in buffers)


def _only_reader(read: Any, node: Any, graph: Any) -> bool:
    """Whether a node is the last that reads a buffer, which is no view of another one."""
    nop = importlib.import_module("torch._inductor.scheduler").NopKernelSchedulerNode
    if read.node.get_inputs_that_alias_output() or read.node.get_mutation_names():
        return False
    if isinstance(read.defining_op, nop):
        return False
    done = node.ancestors | graph.removed_operations | graph.scheduler.completed_operations
    return [use.node.get_name() for use in read.users if use.node.get_name() not in done] == [node.get_name()]


def _stays(scheduler: Any, name: str, node: Any) -> bool:
    """Whether a buffer is of the stream and of the memory pool that a node runs in."""
    # From torch 2.13 on, and from 2.15 on.
    crosses = getattr(scheduler, "has_cross_stream_hazard", None)
    pool = getattr(scheduler, "get_buf_mempool", None)
    if crosses is not None and crosses(name, node):
        return False
    return pool is None or pool(name) == scheduler.node_to_mempool.get(node)


def _buffer(value: Any) -> Any:
    """The buffer that a value is the whole of; of a view that is the view."""
    ir = importlib.import_module("torch._inductor.ir")
    while isinstance(value, ir.MutableBox):
        value = value.data
    return value


def _agree(one: Any, other: Any) -> bool:
    """Whether two layouts place the same elements alike, for good."""
    fixed = importlib.import_module("torch._inductor.ir").FixedLayout
    if not isinstance(one, fixed) or not isinstance(other, fixed):
        return False
    return (
        (one.device, one.dtype, one.offset) == (other.device, other.dtype, other.offset)
        and [str(n) for n in one.size] == [str(n) for n in other.size]
        and [str(n) for n in one.stride] == [str(n) for n in other.stride]
    )
