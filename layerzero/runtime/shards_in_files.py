"""Warns of `torch.save` of a rank's parts of parameters, as if they were whole.

    torch.save({n: p for n, p in model.named_parameters() if p.requires_grad}, "adapter.pt")

So scripts save what they trained, mostly on the first rank alone. The file would then hold that
rank's part and nothing of the others, which shows when it is too late. Values of `state_dict()`
know what they are a part of, and are refused by name where they do not fit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from layerzero.core.parameter_info import get_info
from layerzero.notices import outside, warn_once, was_issued
from layerzero.runtime.shards_in_collectives import owners_of_part

_KEY = "shards in a file"
_MARK = "_layerzero_looks_for_shards"


def look_for_shards_in_files() -> None:
    """Have `torch.save` warn of shards in what it is given, once."""
    plain = torch.save
    if not hasattr(plain, _MARK):
        torch.save = _looking(plain)


def _looking(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def save(obj: object, *args: Any, **kwargs: Any) -> None:
        # Lone tensors are what writers of distributed checkpoints save: the parts of each rank.
        if not was_issued(_KEY) and not isinstance(obj, torch.Tensor):
            fqn = next((fqn for each in _tensors(obj) if (fqn := _part_of(each))), None)
            if fqn is not None:
                warn_once(
                    _KEY,
                    f"torch.save was given this rank's part of {fqn!r}, which is sharded: the file "
                    "has nothing of other ranks. Save layerzero.checkpoint.get_model_state_dict("
                    "model, full=True), which every rank calls, or use layerzero.checkpoint.save. "
                    "If each rank writes a file of its own, save model.state_dict() there, whose "
                    "values are checked when they are loaded",
                    stacklevel=outside(),
                )
        plain(obj, *args, **kwargs)

    setattr(save, _MARK, True)
    return save


def _tensors(obj: object) -> Iterator[torch.Tensor]:
    """Those in nested containers; state dicts of models and optimizers are such."""
    if isinstance(obj, torch.Tensor):
        yield obj
    elif isinstance(obj, (Mapping, list, tuple)):
        for each in obj.values() if isinstance(obj, Mapping) else obj:
            yield from _tensors(each)


def _part_of(tensor: torch.Tensor) -> str | None:
    # Exactly these: a `ParameterShard` says what it is.
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.dim() != 1:
        return None
    for owner in owners_of_part(tensor):
        info = get_info(owner.sharded_param)
        if tensor.numel() and info is not None and owner.placement.num_main_shards > 1:
            return info.fqn
    return None
