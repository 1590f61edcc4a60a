"""Follows a program that gives sharded parameters other memory: swapped weights, another device."""

from __future__ import annotations

import torch

from layerzero.flat.flat_param import FlatParam


def adopt(flat: FlatParam, unit: str) -> None:
    """Copy the values of the sharded parameters into a new main shard, of which they become views.

    The former memory keeps its values: a program that swaps weights (an average for an
    evaluation) took `.data` before, and will assign that again.

    Raises:
        ValueError: a tensor was assigned that has another shape, dtype or device.
    """
    values = [parameter.detach() for parameter in flat.sharded_params]
    for index, new in enumerate(values):
        own = flat.part_of(flat.main_shard, index)
        if _kind_of(new) != _kind_of(own):
            raise ValueError(
                f"{unit} (rank {flat.placement.rank}): the data of parameter "
                f"{flat.fqns[index]!r} was replaced after wrapping: expected this rank's "
                f"shard, {_kind_of(own)}, got {_kind_of(new)}; cast or move the module before "
                "wrapping it, and change full values inside summon_full_params()"
            )
    # A tensor made in inference mode could not be written in place outside it.
    with torch.inference_mode(False), torch.no_grad():
        if not flat.is_main_memory or not any(flat.splits):
            numel, dtype = flat.layout.shard_numel, flat.main_shard.dtype
            if flat.params_on is None:
                moved = torch.empty(numel, dtype=dtype, device=flat.main_shard.device)
            else:
                moved = flat.params_on.lasting(numel, dtype)
            put_shard(flat, moved.copy_(flat.main_shard.data))
        for index, parameter in enumerate(flat.sharded_params):
            # Through `.data`: assigning counts as no write, as in torch.
            own = flat.part_of(flat.main_shard.data, index)
            own.copy_(values[index])
            parameter.data = own
    flat.note_rewrite(by_assignment=True)
    flat.expect()


def _kind_of(tensor: torch.Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}"


def put_shard(flat: FlatParam, moved: torch.Tensor) -> None:
    """Have the main shard, and what shares its memory, lie in `moved`."""
    # The objects stay: optimizers hold them.
    flat.main_shard.data = moved
    if flat.has_compute_shard or flat.casts_in_place:
        return
    if flat.is_whole:
        flat.move_full(moved)
    flat.make_compute_shard()
