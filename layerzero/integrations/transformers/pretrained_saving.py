"""save_pretrained for a sharded model: the first rank gets full tensors, and the model's own method
writes them. Of a model with adapters, only these are gathered."""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from layerzero import ZeRO3
from layerzero.checkpoint import stream_full
from layerzero.checkpoint.adapters import (
    MODEL,
    Names,
    checkpoint_group_of,
    named_buffers,
    refuse_experts,
    root_states_of,
)
from layerzero.integrations.engine import get_info, summoned

Tensors = dict[str, torch.Tensor]
_Named = Sequence[tuple[torch.Tensor, tuple[str, ...]]]
"""Tensors with all their names in the state dict."""


def save_pretrained(
    model: ZeRO3,
    folder: str | os.PathLike[str],
    *,
    max_file_size: int | str = "5GB",
    weights_from: str | os.PathLike[str] | None = None,
    **options: Any,
) -> None:
    """Write what the model's own `save_pretrained` would, for `from_pretrained`. Collective.

    Full tensors are gathered unit by unit into the first rank's host memory, which then has the
    whole model; of a model with adapters (peft), these alone.

    Args:
        model: a ZeRO3 module around any model, or the model in it, between steps.
        folder: created if missing; only the first rank's is used.
        max_file_size: largest size of a file of weights; a larger tensor gets a file of its own.
        weights_from: a checkpoint's folder that `layerzero.checkpoint.save` has just written from
            this model. If it has all weights under the names that `from_pretrained` expects, and
            the file system supports hard links, its files are linked instead of gathering and
            writing.
        options: of the model's own `save_pretrained`.

    Raises:
        CheckpointError: on all ranks: the first rank could not write; says why.
        CollectiveError: a rank died or did not take part.
        NotImplementedError: ranks have experts of different names.
    """
    state = root_states_of(model, "save_pretrained")[0]
    refuse_experts(state, "save_pretrained")
    wrapper = state.wrapper_ref()
    if isinstance(wrapper, ZeRO3) and model is wrapper.module:
        model = wrapper
    together = checkpoint_group_of(state, None)
    path, module = Path(folder), model.module
    is_peft = is_peft_model(module)
    own: Any = getattr(type(module), "save_pretrained", None)
    if own is not None and not is_peft and not isinstance(module, PreTrainedModel):
        # Takes no state dict (SentenceTransformer, diffusers): it writes what the module shows.
        def save() -> None:
            own(module, path, **options)

        with model.summon_full_params(writeback=False, rank0_only=True, offload_to_cpu=True):
            together.from_first(f"files in {path}", save)
        return
    stand_ins = _stand_ins(model)
    full: Tensors = {}

    def link() -> bool:
        path.mkdir(parents=True, exist_ok=True)
        if own is not None:  # Writes the config, generation config and code of the model.
            own(module, path, state_dict={}, **options)
        for pattern in ("model.safetensors*", "model-*-of-*.safetensors"):
            for file in path.glob(pattern):
                file.unlink()
        try:
            for file in Path(weights_from or "").glob(f"{MODEL}*.safetensors*"):
                os.link(file, path / file.name)
        except OSError:  # Not every file system has hard links.
            return False
        return True

    def write() -> None:
        path.mkdir(parents=True, exist_ok=True)
        if own is not None:
            options.setdefault("max_shard_size", max_file_size)
            own(module, path, state_dict=full, **options)
            return
        once = {names[0]: full[names[0]].contiguous() for _, names in stand_ins}
        importlib.import_module("safetensors.torch").save_file(once, path / "model.safetensors")

    if (
        weights_from is not None
        and not is_peft
        and _has_names_of_checkpoints(module, stand_ins)
        and together.from_first(f"links in {path}", link)
    ):
        return
    wanted = _adapters(module, stand_ins) if is_peft else None
    names_of = {names[0]: names for _, names in stand_ins}
    for name, tensor in stream_full(model, only=wanted):
        if together.is_first:
            full |= dict.fromkeys(names_of[name], tensor.to("cpu", copy=True))
    nbytes = sum(math.prod(each.shape) * each.itemsize for each, _ in stand_ins)
    with _prompts_shown(module) if is_peft else torch.no_grad():
        written = write if together.is_first else lambda: None
        together.exchange(f"the result of writing {path}", written, nbytes)


def is_peft_model(module: nn.Module) -> bool:
    """Whether it is a model of peft; does not import peft."""
    peft: Any = sys.modules.get("peft")
    return peft is not None and isinstance(module, peft.PeftModel)


def _stand_ins(model: ZeRO3) -> _Named:
    """A tensor of one element's memory for each in the state dict, of its full shape and dtype."""
    stand_ins = []
    for tensor, names in [*Names(model).parameters, *named_buffers(model)]:
        info = get_info(tensor) if isinstance(tensor, nn.Parameter) else None
        shape = tensor.shape if info is None else info.shape
        one = torch.empty(1, dtype=tensor.dtype, device="cpu")
        stand_ins.append((one.as_strided(shape, (0,) * len(shape)), names))
    return stand_ins


def _has_names_of_checkpoints(module: nn.Module, stand_ins: _Named) -> bool:
    """Whether `save_pretrained` writes each tensor unchanged, and under its first name."""
    if not isinstance(module, PreTrainedModel):
        return True
    ignored = module._keys_to_ignore_on_save or ()
    kept = {name: each for each, names in stand_ins for name in names if name not in ignored}
    kept = remove_tied_weights_from_state_dict(kept, module)
    meta = {name: torch.empty_like(tensor, device="meta") for name, tensor in kept.items()}
    written: Tensors = revert_weight_conversion(module, dict(meta))
    return written.keys() == {names[0] for _, names in stand_ins} and all(
        tensor is meta.get(name) for name, tensor in written.items()
    )


def _adapters(module: Any, stand_ins: _Named) -> set[str] | None:
    """First names of the tensors that peft saves; None for all, if it computes some from others."""
    get_adapters: Any = importlib.import_module("peft").get_peft_model_state_dict
    state_dict = {name: tensor for tensor, names in stand_ins for name in names}
    first_of = {id(tensor): names[0] for tensor, names in stand_ins}
    with _prompts_shown(module):
        found = {
            first_of.get(id(tensor))
            for adapter in module.peft_config
            for tensor in get_adapters(module, dict(state_dict), adapter).values()
        }
    if None in found and not module.active_peft_config.is_prompt_learning:
        return None
    return {name for name in found if name is not None}


@contextmanager
def _prompts_shown(module: Any) -> Iterator[None]:
    """Show full parameters of what computes prompts. Collective if there are prompts."""
    with torch.no_grad():
        if not module.active_peft_config.is_prompt_learning:
            yield
            return
        with summoned(module.prompt_encoder, "save_pretrained", writeback=False):
            yield
