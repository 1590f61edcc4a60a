"""apply_delta: the receiver of patches, in plain torch, without a process group.

A receiver is a dict of tensors, and has no object of ours. `model.state_dict()` makes new tensor
objects at each call, but they share their storage, which torch keeps as one object: so that is
where positions are. A copy of a tensor has none.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from layerzero.checkpoint.delta.patch import DeltaError, Link, Patch

_ATTRIBUTE = "_layerzero_delta"


def apply_delta(tensors: Mapping[str, torch.Tensor], patch: Patch) -> None:
    """Write the values of a patch into the tensor that it names, in place. Not collective.

    Patches of one sender are applied in the order in which its stream yielded them. Those of
    several senders may be mixed within a round, and no round begins before the last one is done.
    A receiver starts with `DeltaStream.full()` of every rank, or with the weights that the model
    had when the stream was made. Nothing is written if an error is raised.

    Args:
        tensors: by the names of `named_parameters`; each of the original shape, or flattened, on
            any device, contiguous or not; in the patch's dtype, or in one that holds all its
            values. A tied parameter needs one of its names, and tensors under all of them are
            written.
        patch: as `DeltaStream` yielded it, on any device.

    Raises:
        DeltaError: the name is unknown, an index is outside of the tensor, the tensor has another
            shape or too narrow a dtype, a patch was lost or comes again, or it is of another
            stream.
    """
    targets = _named(tensors, patch.names, patch)
    anchors = _named(tensors, patch.link.anchor, patch)
    for name, target in targets:
        _check_target(name, target, patch)
    _check_indices(targets[0][1], patch)
    mark, anchor = _mark_of(targets[0][1]), _mark_of(anchors[0][1])
    starts_here = _check_link(patch, mark, anchor)
    if starts_here and patch.before is not None:
        _check_before(targets[0][1], patch)
    # One of each that share their memory.
    distinct = {(each.device, each.data_ptr(), each.stride()): each for _, each in targets}
    link = patch.link
    for memory in distinct.values():
        values = patch.values.to(memory.device, memory.dtype)
        # Tensors made in inference mode may be written only there, and others only outside.
        with torch.inference_mode(memory.is_inference()), torch.no_grad():
            memory.put_(patch.indices.to(memory.device), values)
        _mark_of(memory).follow(link.stream)
    anchor.follow(link.stream)
    anchor.applied[link.sender] = link


def _named(
    tensors: Mapping[str, torch.Tensor], names: Sequence[str], patch: Patch
) -> list[tuple[str, torch.Tensor]]:
    found = [(name, tensors[name]) for name in names if name in tensors]
    if not found:
        raise DeltaError(
            f"{patch.where}: unknown name, none of the {len(tensors)} tensors is called "
            f"{' or '.join(map(repr, names))}; expected the names of named_parameters()"
        )
    return found


def _check_target(name: str, target: torch.Tensor, patch: Patch) -> None:
    where = f"{patch.where}: the receiver's tensor {name!r}"
    shape, dtype = tuple(target.shape), patch.values.dtype
    if shape != tuple(patch.shape) and shape != (torch.Size(patch.shape).numel(),):
        raise DeltaError(f"{where} has shape {shape}, and the original {tuple(patch.shape)}")
    is_wide = torch.promote_types(target.dtype, dtype) == target.dtype
    if not is_wide or target.is_floating_point() != dtype.is_floating_point:
        raise DeltaError(f"{where} is {target.dtype}, which cannot hold every {dtype} of the patch")


def _check_indices(target: torch.Tensor, patch: Patch) -> None:
    indices, values = patch.indices, patch.values
    if indices.dtype != torch.int64 or indices.ndim != 1 or values.shape != indices.shape:
        raise DeltaError(
            f"{patch.where}: expected 1-D int64 indices and as many values, got "
            f"{indices.dtype} {tuple(indices.shape)} and {tuple(values.shape)}"
        )
    if not indices.numel():
        return
    first, last = (int(end) for end in indices.aminmax())
    if first < 0 or last >= target.numel():
        outside = first if first < 0 else last
        raise DeltaError(
            f"{patch.where}: index {outside} is outside of a tensor of {target.numel()} elements"
        )


def _check_before(target: torch.Tensor, patch: Patch) -> None:
    present = target.detach().take(patch.indices.to(target.device)).to(patch.values.dtype)
    if crc_of(present) != patch.before:
        raise DeltaError(
            f"{patch.where}: no patch was applied to these tensors yet, and they do not hold the "
            "values that the model had when the stream was made; apply full() of every rank first"
        )


def crc_of(values: torch.Tensor) -> int:
    """CRC-32 of the bytes of a 1-D tensor."""
    return zlib.crc32(values.detach().cpu().contiguous().view(torch.uint8).numpy().data)


@dataclass
class _Mark:
    """What is known about one tensor of a receiver."""

    stream: str | None = None
    """The stream whose values it holds."""
    applied: dict[int, Link] = field(default_factory=dict)
    """That of the last patch of each sender whose anchor it is."""

    def follow(self, stream: str) -> None:
        """From now on it holds values of `stream`; forgets chains of another one."""
        if self.stream != stream:
            self.stream = stream
            self.applied.clear()


def _mark_of(tensor: torch.Tensor) -> _Mark:
    storage = tensor.untyped_storage()
    marks: dict[int, _Mark] | None = getattr(storage, _ATTRIBUTE, None)
    if marks is None:
        marks = {}
        setattr(storage, _ATTRIBUTE, marks)
    return marks.setdefault(int(tensor.storage_offset()), _Mark())


def _check_link(patch: Patch, mark: _Mark, anchor: _Mark) -> bool:
    """Check that a patch comes next; returns whether it is the first one of its sender here.

    Args:
        mark: of the patch's tensor.
        anchor: of the tensor that its link names.

    Raises:
        DeltaError: it is of another stream, or a patch was lost, or it was applied before.
    """
    link, found = patch.link, anchor.applied.get(patch.link.sender)
    if link.parts:
        if link.part and found != link._replace(part=link.part - 1):
            raise DeltaError(
                f"{patch.where}: a part was lost or repeated; apply all parts of one full(), in "
                "order"
            )
        return False
    is_of_stream = mark.stream in (None, link.stream)
    if is_of_stream and found is None and link.after == 0:
        return True
    if is_of_stream and found is not None and found.chain == link.chain and found.is_last:
        if link.after <= found.number < link.number:
            return False
        problem = "is repeated" if found.number >= link.number else "patches before it were lost"
        problem += f": the tensors are at patch {found.number}"
    else:
        problem = "these tensors have not followed the sender's stream"
    raise DeltaError(f"{patch.where}: {problem}; apply full() of every rank to begin again")
