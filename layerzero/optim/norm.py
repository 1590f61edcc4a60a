"""Norms of tensors that are sharded over ranks, with one small collective for each group; and how
gradients are clipped by them.

If several ranks hold copies of the same elements, each contributes 1/copies of their power. So no
element counts twice, each axis needs one gather of one number, and every rank of the mesh gets the
same norm.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.amp.grad_scaler import OptState
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

from layerzero.comm.exchanges import gather_along, gather_small
from layerzero.flat.parameter_info import get_info
from layerzero.flat.placement import Placement, sum_dtype
from layerzero.optim.sharded_params import by_tensor, name_of, owner_of_each
from layerzero.step.operations import remembers_failure
from layerzero.step.root import RootState
from layerzero.step.unit import Unit

if TYPE_CHECKING:
    from layerzero.optim.flat_state import FlatState

_NOBODY = nn.Parameter(torch.empty(0, device="cpu"), requires_grad=False)
_MARK = "_layerzero_global"
_SQUARED = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes whose squares are finite in float64."""


class Part(NamedTuple):
    """A tensor sharded like a parameter: its gradient, its value, or an optimizer's moment."""

    parameter: nn.Parameter
    tensor: torch.Tensor


def global_norm(
    tensors_or_model: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    *,
    like: Iterable[nn.Parameter] | None = None,
) -> torch.Tensor:
    """The norm over all ranks of gradients, parameters, or tensors sharded like them.

    `torch.nn.utils.get_total_norm` for sharded parameters, equal to `p.norm()` of a full parameter:
    for logging, SAM's perturbation, or gradient statistics. Collective over the ranks of each model
    that the tensors belong to, including the mesh of its DTensors. Every rank must pass tensors of
    the same parameters, including those of which it has no elements. Does not block the host on a
    device with streams.

    Args:
        tensors_or_model: a module, for the norm of its gradients as `clip_grad_norm_` returns it
            (parameters without a gradient contribute nothing). Or one or many parameters, for the
            norm of their values, or their `.grad`. A parameter that is not sharded must be the
            same on every rank.
        norm_type: p > 0, or infinity.
        like: one parameter for each tensor, if tensors have the shapes of parameters but are
            neither parameters nor their `.grad`, such as the moments of an optimizer.

    Returns:
        A scalar tensor, float32 (float64 if any tensor is), the same on all ranks.

    Raises:
        ValueError: `norm_type` is neither > 0 nor infinity; there are no tensors; or a tensor
            belongs to no known parameter, and could be a part or a copy.
        NotImplementedError: a tensor is a DTensor that ZeRO3 does not shard.
    """
    norm_type = checked_norm_type(norm_type, "global_norm")
    dtype = torch.float32
    known = owner_of_each()
    sharded: dict[RootState, list[Part]] = {}
    whole: list[Part] = []
    for parameter, tensor in _entries(tensors_or_model, like):
        owner = known.get(id(parameter))
        dtype = sum_dtype(dtype, parameter.dtype)
        parts = whole if owner is None else sharded.setdefault(owner.root, [])
        if tensor is None:
            continue
        if isinstance(tensor, DTensor):
            raise NotImplementedError(
                "global_norm: got a DTensor of no ZeRO3 module; take the norm of its full_tensor()"
            )
        if owner is not None and tensor.shape != parameter.shape:
            raise ValueError(
                f"global_norm: expected a tensor like this rank's shard of {name_of(parameter)}, "
                f"shape {tuple(parameter.shape)}, got {tuple(tensor.shape)}"
            )
        dtype = sum_dtype(dtype, tensor.dtype)
        if tensor.numel():
            parts.append(Part(parameter, tensor.detach()))
    if not sharded:
        return root_of_power(_power([part.tensor for part in whole], norm_type, dtype), norm_type)
    total = None
    for root, parts in sharded.items():
        root.before_call("global_norm")
        tensor_of = {part.parameter: part.tensor for part in parts}
        given = sharded_parts(root.units, tensor_of.get)
        power = global_power(root, given, whole, norm_type, dtype, "norm")
        total = power if total is None else _sum(total, power.to(total.device), norm_type)
        whole = []
    assert total is not None
    return root_of_power(total, norm_type)


def _entries(
    tensors_or_model: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    like: Iterable[nn.Parameter] | None,
) -> list[tuple[nn.Parameter, torch.Tensor | None]]:
    """Each tensor with the parameter it is sharded like."""
    if isinstance(tensors_or_model, nn.Module):
        if like is not None:
            raise ValueError("global_norm: like= needs tensors as first argument, got a module")
        return [(parameter, parameter.grad) for parameter in tensors_or_model.parameters()]
    if isinstance(tensors_or_model, torch.Tensor):
        tensors_or_model = [tensors_or_model]
    tensors = list(tensors_or_model)
    if not tensors:
        raise ValueError("global_norm: expected tensors, got none; pass the model, or empty ones")
    if like is not None:
        parameters = [like] if isinstance(like, nn.Parameter) else list(like)
        return [*zip(parameters, tensors, strict=True)]
    known = by_tensor()
    found: list[tuple[nn.Parameter, torch.Tensor | None]] = []
    for tensor in tensors:
        parameter = tensor if isinstance(tensor, nn.Parameter) else known.get(id(tensor))
        if parameter is None:
            raise ValueError(
                f"global_norm: a {type(tensor).__name__} is neither a parameter nor the .grad of a "
                "sharded parameter, so it may be sharded or whole; pass like=[parameter, ...] with "
                "the parameter that each tensor belongs to"
            )
        found.append((parameter, tensor))
    return found


def make_torchs_global() -> None:
    """Make torch's `clip_grad_norm_` and `get_total_norm` right for sharded parameters.

    Both compute their norm by one helper, which torch looks up in its module at each call. It is
    replaced once per process: of gradients (or values) of sharded parameters it returns the norm
    over all ranks, as `fully_shard`'s DTensors do; anything else goes to torch's own helper. See
    docs/internals/decisions/0024-torchs-gradient-norm-is-the-global-one.md.
    """
    former = clip_grad._get_total_norm
    if hasattr(former, _MARK):
        return

    @functools.wraps(former)
    def total_norm(
        tensors: Any,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        # A compiled caller traces torch's own code; Dynamo cannot look up who owns a tensor.
        known = {} if torch.compiler.is_compiling() else by_tensor()
        if not any(id(tensor) in known for tensor in tensors):
            return former(tensors, norm_type, error_if_nonfinite, foreach)
        like = [known.get(id(tensor), tensor) for tensor in tensors]
        norm = global_norm(tensors, norm_type, like=like)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"the norm of order {float(norm_type)} over all ranks is {norm.item()}; to clip "
                "by it all the same, pass error_if_nonfinite=False"
            )
        return norm

    setattr(total_norm, _MARK, True)
    clip_grad._get_total_norm = total_norm
    torch.nn.utils.get_total_norm = total_norm


def checked_norm_type(norm_type: float, where: str) -> float:
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"{where}: expected norm_type > 0 or inf, got {norm_type}")
    return norm_type


def sharded_parts(
    units: Iterable[Unit], tensor_of: Callable[[nn.Parameter], torch.Tensor | None]
) -> list[tuple[Placement, list[Part]]]:
    """The tensors of sharded parameters in units, by placement; of every placement, also one
    without a tensor here, so that all ranks run the same gathers."""
    found: dict[int, tuple[Placement, list[Part]]] = {}
    for handle in [handle for unit in units for handle in unit.handles]:
        _, own = found.setdefault(id(handle.placement), (handle.placement, []))
        own += [
            Part(parameter, tensor)
            for parameter in handle.sharded_params
            if (tensor := tensor_of(parameter)) is not None and tensor.numel()
        ]
    return list(found.values())


@remembers_failure
def global_power(
    root: RootState,
    sharded: Sequence[tuple[Placement, Sequence[Part]]],
    replicated: Sequence[Part],
    norm_type: float,
    dtype: torch.dtype,
    what: str,
) -> torch.Tensor:
    """The sum of |x|^p over all elements on all ranks; for infinity their maximum. Collective.

    Args:
        sharded: this rank's tensors for each placement of the model's units; every rank must pass
            the same placements.
        replicated: tensors of which every rank has a full copy.

    Returns:
        A scalar tensor, the same on all ranks, tensor-parallel ones included.
    """
    is_max = math.isinf(norm_type)
    total = torch.zeros((), dtype=dtype, device=root.device)
    name = partial(root.operations.next, what, "the model")
    for placement, parts_here in sharded:
        part = _share(root, parts_here, norm_type, dtype)
        if not is_max:
            part = part / placement.num_copies
        if placement is sharded[0][0] and replicated:
            own = _share(root, replicated, norm_type, dtype)
            count = math.prod(group.size for group in placement.norm_groups)
            part = torch.maximum(part, own) if is_max else part + own / count
        # Gathered, and reduced locally: the sum then runs in the order of the flat buffer, which
        # does not depend on how ranks are grouped, and a NaN survives a maximum.
        parts = gather_along(part, placement.norm_groups, name)
        total = _sum(total, parts.amax() if is_max else parts.flatten().sum(), norm_type)
    for group in root.tensor_parallel_groups:
        parts = gather_small(total, group, name(group))
        total = parts.amax() if is_max else parts.sum()
    return total


def root_of_power(power: torch.Tensor, norm_type: float) -> torch.Tensor:
    """The norm from its p-th power, or from the maximum."""
    return power if math.isinf(norm_type) else power.pow(1.0 / norm_type)


def _share(
    root: RootState, parts: Sequence[Part], norm_type: float, dtype: torch.dtype
) -> torch.Tensor:
    """This rank's contribution to the power over tensor-parallel ranks, as a scalar."""
    num_ranks = math.prod(group.size for group in root.tensor_parallel_groups)
    if num_ranks == 1:
        return _power([part.tensor for part in parts], norm_type, dtype, root.device)
    by_copies: dict[int, list[torch.Tensor]] = {}
    for parameter, tensor in parts:
        info = get_info(parameter)
        split = None if info is None else info.tensor_parallel
        by_copies.setdefault(num_ranks if split is None else split.num_copies, []).append(tensor)
    total = torch.zeros((), dtype=dtype, device=root.device)
    for copies, tensors in by_copies.items():
        power = _power(tensors, norm_type, dtype, root.device)
        total = _sum(total, power if math.isinf(norm_type) else power / copies, norm_type)
    return total


def _sum(left: torch.Tensor, right: torch.Tensor, norm_type: float) -> torch.Tensor:
    return torch.maximum(left, right) if math.isinf(norm_type) else left + right


def _power(
    tensors: list[torch.Tensor],
    norm_type: float,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Sum of |x|^p over local elements (their maximum for infinity), as a scalar."""
    if not tensors:
        return torch.zeros((), dtype=dtype, device=device)
    norms = torch.stack(torch._foreach_norm(tensors, norm_type, dtype=dtype))
    power = norms.amax() if math.isinf(norm_type) else norms.pow(norm_type).sum()
    return power.to(device) if device is not None else power


def norms_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """[len(tensors)] norms of tensors on one device, summed in float64."""
    if _is_on_device(tensors[0]):
        # One call reads each tensor once; `vector_norm` would copy it to float64 first.
        return torch.stack(torch._foreach_norm(list(tensors), 2.0, dtype=torch.float64))
    from layerzero.optim.step_ops import sum_squares

    return torch.stack([*map(sum_squares, tensors)]).sqrt()


def _is_on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu"


def all_finite(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Whether all elements are finite: a bool scalar on `device`."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    found = [torch.ones((), dtype=torch.bool, device=device)]
    for each in tensors:
        if each.dtype in _SQUARED and each.numel():
            by_device.setdefault(each.device, []).append(each)
        elif each.numel():
            found.append(each.isfinite().all().to(device))
    found += [norms_of(each).isfinite().all().to(device) for each in by_device.values()]
    return torch.stack(found).all()


class Clipped(NamedTuple):
    """The parameters whose gradients are clipped by one norm."""

    root: RootState
    units: Sequence[Unit]
    """Units with sharded parameters."""
    replicated: Sequence[nn.Parameter]
    """Ignored parameters, of which every rank has a full copy."""
    chosen: Container[nn.Parameter] | None = None
    """The sharded parameters that are meant; None: all of the units'."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        own = (each for unit in self.units for each in unit.sharded_params)
        return [*self.replicated, *filter(self.is_meant, own)]

    def is_meant(self, sharded_param: nn.Parameter) -> bool:
        return self.chosen is None or sharded_param in self.chosen


def refuse_used(root: RootState) -> None:
    if root.extensions.deliver:
        raise RuntimeError(
            "clip_grad_norm_ after step_in_backward: the optimizer has used the gradients already; "
            "call step_in_backward(None), clip after backward, then call optimizer.step()"
        )


def grad_norm(of: Clipped, norm_type: float) -> torch.Tensor:
    """The norm of gradients over all ranks: a float32 scalar tensor (float64 if any parameter is),
    the same on all ranks, including tensor-parallel ones.

    Collective over the groups that own shards, and over each axis of the tensor-parallel mesh. Does
    not block the host on a device with streams.
    """
    norm_type = checked_norm_type(norm_type, "clip_grad_norm_")
    if any(isinstance(parameter.grad, DTensor) for parameter in of.replicated):
        raise NotImplementedError(
            "clip_grad_norm_: an ignored parameter is a DTensor with a gradient, whose share of "
            "the norm is unknown; do not ignore it, or remove its .grad and scale it yourself"
        )
    # From all parameters, not only those with a gradient here: the same on every rank.
    dtype = sum_dtype(*{parameter.dtype for parameter in of.parameters})
    whole = [Part(p, p.grad) for p in of.replicated if p.grad is not None and p.grad.numel()]
    given = sharded_parts(of.units, lambda each: each.grad if of.is_meant(each) else None)
    power = global_power(of.root, given, whole, norm_type, dtype, "gradient norm")
    return root_of_power(power, norm_type)


def flat_norm(root: RootState, flats: Sequence[FlatState]) -> torch.Tensor:
    """`grad_norm` of order 2 of the gradients of flat states, added in float64, in a model without
    tensor-parallel groups."""
    whole: list[torch.Tensor] = []
    # All placements of the model, also without a gradient: every rank runs the same gathers.
    sharded: dict[int, tuple[Placement, list[torch.Tensor]]]
    sharded = {id(each): (each, []) for each in root.placements}
    for flat in flats:
        handle = flat.handle
        found = whole if handle is None else sharded[id(handle.placement)][1]
        found += flat.gradients()
    given = [(placement, _as_part(gradients)) for placement, gradients in sharded.values()]
    power = global_power(root, given, _as_part(whole), 2.0, torch.float64, "gradient norm")
    is_wide = any(flat.main.dtype == torch.float64 for flat in flats)
    return power.sqrt() if is_wide else power.sqrt().float()


def _as_part(gradients: list[torch.Tensor]) -> list[Part]:
    """One tensor whose norm is that of all of these; its parameter does not matter."""
    return [Part(_NOBODY, norms_of(gradients))] if gradients else []


def scale_of_gradients(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer
) -> torch.Tensor | None:
    """What an optimizer's gradients are multiplied by, a scalar tensor; None: by nothing."""
    if not scaler.is_enabled():
        return None
    if scaler._scale is None:
        raise RuntimeError("clip_grad_norm_: the scaler has scaled no loss; call scale(loss) first")
    stage = scaler._per_optimizer_states[id(optimizer)]["stage"]
    return scaler._scale if stage is OptState.READY else None


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The factor that scales gradients of this norm down to `max_norm`; 1 if it is not above."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def scale_gradients_(parameters: Iterable[nn.Parameter], factor: torch.Tensor) -> None:
    """Multiply gradients by a scalar, in place, each on its own device. Not collective."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.numel():
            by_device.setdefault(gradient.device, []).append(gradient)
    for device, gradients in by_device.items():
        torch._foreach_mul_(gradients, factor.to(device))


def clip_grad_norm_(of: Clipped, max_norm: float, norm_type: float) -> torch.Tensor:
    """Scale gradients in place so that their norm is at most `max_norm`. Collective as `grad_norm`.
    Returns the norm before scaling."""
    norm = grad_norm(of, norm_type)
    scale_gradients_(of.parameters, clip_factor(norm, max_norm))
    return norm
