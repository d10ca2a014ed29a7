"""A small Llama in whose compile each pass of ours can be watched.

Widths are tiny and every candidate is let through, so that a pass has as much to do as it can have. Graphs
behind autograd seem to be on a GPU; nothing is lowered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx, nn

import inductor_fusions
from devtools import cuda_codegen
from inductor_fusions import fusions, reporting
from inductor_fusions.driver import passes
from tests.support.on_a_gpu import on_a_gpu

ARCH = 90
SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
#: Names of cases: whether linears have adapters, and whether it is trained.
CASES = {
    "inference": (False, False),
    "training": (False, True),
    "adapters, inference": (True, False),
    "adapters, training": (True, True),
}


class Llama(nn.Module):
    """The last hidden state of a small Llama, whose attention is written out.

    Args:
        adapters: whether PEFT gives each linear float32 adapters.
    """

    def __init__(self, layers: int, adapters: bool = False) -> None:
        super().__init__()
        import transformers

        config = transformers.LlamaConfig(**SIZES, num_hidden_layers=layers, attn_implementation="eager")
        model = transformers.LlamaModel(config).bfloat16().eval()
        if adapters:
            import peft

            wanted = peft.LoraConfig(target_modules="all-linear", r=8, init_lora_weights=False)
            model = peft.get_peft_model(model, wanted)
        self.model = model

    def forward(self, x: torch.Tensor) -> Any:
        return self.model(input_ids=x, use_cache=False).last_hidden_state


@contextlib.contextmanager
def passed(run: Callable[[Any, fx.Graph], None]) -> Iterator[Callable[..., Any]]:
    """A backend under which `run` calls every pass of ours on its graph; what they give is run on the CPU."""
    from functorch.compile import make_boxed_func
    from torch._inductor import compile_fx
    from torch._inductor import config as inductor_config

    behind = passes.FusionPass("post_grad", tuple(f for f in fusions.ALL if f.stage == "post_grad"))

    def inner(gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        moved, _ = cuda_codegen.on_cuda(gm, example_inputs)
        with cuda_codegen.pretended(cuda_codegen.DEVICES[ARCH]):
            behind(moved.graph)
        return make_boxed_func(gm.forward)

    call = passes.FusionPass.__call__
    with contextlib.ExitStack() as stack:
        stack.enter_context(on_a_gpu())
        stack.enter_context(
            mock.patch.object(
                passes.FusionPass, "__call__", lambda self, graph: run(lambda g: call(self, g), graph)
            )
        )
        stack.enter_context(inductor_config.patch(force_disable_caches=True))
        stack.enter_context(inductor_fusions.config.patch(enabled=True, policy="always"))
        stack.enter_context(reporting.isolated(keep=False))
        torch._dynamo.reset()
        try:
            yield lambda gm, inputs: compile_fx.compile_fx(gm, inputs, inner_compile=inner)
        finally:
            torch._dynamo.reset()


def compile_case(case: str, layers: int, run: Callable[[Any, fx.Graph], None]) -> None:
    """Compile one case, with `run` around each pass of ours."""
    adapters, train = CASES[case]
    torch.manual_seed(0)
    model = Llama(layers, adapters)
    with passed(run) as backend, torch.set_grad_enabled(train):
        out = torch.compile(model, backend=backend, dynamic=False)(torch.randint(3, 128, (2, 48)))
        if train:
            out.float().pow(2).mean().backward()
