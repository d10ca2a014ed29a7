"""Models for the commands: a Hugging Face configuration with random weights, or `module:callable`."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from ..sites import error_text
from .common import UserError, imports_from


class Attention(str, Enum):
    """The attention of a Hugging Face model."""

    eager = "eager"
    sdpa = "sdpa"


class Precision(str, Enum):
    """A dtype of weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def need_transformers() -> Any:
    """The package transformers."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise UserError("transformers is not installed: pip install 'inductor_fusions[models]'") from error


def from_callable(name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """What `module:callable` returns."""
    module_name, _, attribute = name.partition(":")
    with imports_from(Path.cwd()):
        try:
            make: Any = importlib.import_module(module_name)
            for part in attribute.split("."):
                make = getattr(make, part)
        except (ImportError, AttributeError, ValueError) as error:
            raise UserError(f"cannot import {name}: {error}") from error
        except Exception as error:
            raise UserError(f"importing {module_name} raised {error_text(error)}") from error
        try:
            made = make()
        except Exception as error:
            raise UserError(f"{name}() raised {error_text(error)}") from error
    match made:
        case (torch.nn.Module() as model, dict(kwargs)):
            return model, kwargs
    raise UserError(f"{name}() must return (a torch.nn.Module, a dict of keyword arguments)")


_LAYER_COUNTS = (
    "num_hidden_layers num_layers num_decoder_layers encoder_layers decoder_layers n_layer n_layers".split()
)


def from_hugging_face(
    name: str,
    attn: Attention | None,
    batch: int,
    seq: int | None,
    padded: bool,
    layers: int | None,
    is_run: bool,
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model and its inputs, by the name of a configuration or a folder.

    Args:
        seq: the number of tokens; by default 128, or the most that the model takes.
        is_run: whether the model gets random weights; else they are on the meta device, and take no memory.
    """
    transformers = need_transformers()
    try:
        model_config = _configuration(transformers, name)
        if layers is not None:
            shrink(model_config, layers)
        limit = _most_tokens(model_config)
        if seq is not None and seq > limit:
            raise UserError(f"--seq {seq}: {name} supports at most {limit} tokens")
        options = {"attn_implementation": attn.value} if attn is not None else {}
        if is_run:
            _check_size(transformers, model_config, name)
        torch.manual_seed(0)
        with contextlib.nullcontext() if is_run else torch.device("meta"):
            model: Any = transformers.AutoModel.from_config(model_config, **options)
        return model, hugging_face_inputs(model, batch, seq or min(128, limit), padded)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{name}: transformers cannot build it: {error_text(error)}") from error


def _most_tokens(model_config: Any) -> int:
    """How many tokens a model takes, by its configuration and by that of its text model."""
    both = (model_config, model_config.get_text_config())
    found = [getattr(each, "max_position_embeddings", None) for each in both]
    return min((limit for limit in found if isinstance(limit, int) and limit > 0), default=sys.maxsize)


def _configuration(transformers: Any, name: str) -> Any:
    """The configuration that a name means; nothing is downloaded."""
    if Path(name).exists():
        return transformers.AutoConfig.from_pretrained(name, local_files_only=True)
    if name.endswith("Config") and hasattr(transformers, name):
        return getattr(transformers, name)()
    if name in transformers.CONFIG_MAPPING:
        return transformers.AutoConfig.for_model(name)
    try:  # a model whose configuration is in the local cache
        return transformers.AutoConfig.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError):
        raise UserError(
            f"{name} is neither a configuration class of transformers {transformers.__version__} "
            "(such as BertConfig), nor a model type (bert), nor a folder with config.json, nor in the local "
            "cache, nor module:callable"
        ) from None


def _check_size(transformers: Any, model_config: Any, name: str) -> None:
    """Refuse a model that does not fit into memory."""
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(model_config)
    count = sum(parameter.numel() for parameter in model.parameters())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if 4 * count > 0.6 * memory:
        raise UserError(
            f"{name} has {count / 1e9:.1f} billion parameters, {4 * count / 2**30:.0f} GiB: give --layers 2"
        )


def shrink(model_config: Any, layers: int) -> None:
    """Cut each stack of layers of a configuration, and of those inside it, to this many."""
    for name in _LAYER_COUNTS:
        count = getattr(model_config, name, None)
        if isinstance(count, int) and count > layers:
            setattr(model_config, name, layers)
    for name in ("layer_types", "mlp_layer_types", "depths"):
        value = getattr(model_config, name, None)
        if isinstance(value, (list, tuple)) and name == "depths":
            model_config.depths = type(value)(min(depth, layers) for depth in value)
        elif isinstance(value, (list, tuple)):
            with contextlib.suppress(AttributeError):  # computed from the number of layers, as Mamba's is
                setattr(model_config, name, value[:layers])
    for value in list(vars(model_config).values()):
        if hasattr(value, "to_diff_dict"):  # a configuration inside, such as the text part's
            shrink(value, layers)


def hugging_face_inputs(model: Any, batch: int, seq: int, padded: bool) -> dict[str, Any]:
    """Random inputs of a Hugging Face model, by what it reads: tokens, pixels or sound.

    Where images stand in place of tokens, as in LLaVA, there is text alone.

    Args:
        model: as `AutoModel` makes it.
        padded: whether a padding mask leaves between half and all of the tokens.

    Raises:
        UserError: it reads something else.
    """
    model_config, name = model.config, model.main_input_name
    text = model_config.get_text_config()
    vision = getattr(model_config, "vision_config", model_config)
    inputs: dict[str, Any] = {}
    if name == "input_ids":
        inputs["input_ids"] = torch.randint(3, text.vocab_size, (batch, seq))
        if padded:
            lengths = torch.linspace((seq + 1) // 2, seq, batch).long()
            inputs["attention_mask"] = (torch.arange(seq) < lengths[:, None]).long()
    in_text = any(hasattr(model_config, f"image_token_{what}") for what in ("id", "index"))
    if name == "pixel_values" or (hasattr(model_config, "vision_config") and not in_text):
        size = getattr(vision, "image_size", None) or 224  # a convolution takes any size
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        inputs["pixel_values"] = torch.randn(batch, getattr(vision, "num_channels", 3), height, width)
    if name == "input_features":
        inputs[name] = torch.randn(batch, model_config.num_mel_bins, 2 * model_config.max_source_positions)
    if name == "input_values":
        inputs[name] = torch.randn(batch, 400 * seq)
    if getattr(model_config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = torch.randint(3, text.vocab_size, (batch, seq))
    if not inputs:
        raise UserError(f"{name} needs inputs that this command cannot create: use module:callable")
    return inputs


def to_dtype(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
