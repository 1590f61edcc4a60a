"""AdamW that steps a whole flat parameter in one pass over its memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from operator import is_, itemgetter
from typing import Any, Literal

import torch
from torch import nn
from torch._compile import _disable_dynamo

from layerzero.flat.parameter_info import get_info
from layerzero.optim import norm as norms
from layerzero.optim.flat_state import FlatState, Pairs, QuantState, Step, places_of, take_steps
from layerzero.optim.in_backward import is_narrowed, whole_groups
from layerzero.optim.sharded_params import (
    check_parameters,
    first_owner,
    name_of,
    refuse_in_graph,
)
from layerzero.step.root import RootState, root_if_alive

StateDtype = Literal["float32", "bfloat16", "8bit"]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "8bit": torch.uint8}
_drop_grad: Callable[[Any, Any], Any] = vars(torch._C.TensorBase)["grad"].__set__
_KEYS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
"""Names of the states, with that of amsgrad last."""
_FIXED = {"capturable": False, "differentiable": False, "decoupled_weight_decay": True}
"""Options of groups that have one value only."""
_OWN = ("_state_dtype", "_seed")
"""Attributes that copies and pickles keep."""


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` for the parameters of one ZeRO3 module, in one pass over memory.

    It has torch's arguments, groups and state dict; in float32 on the CPU its bits are those of
    `torch.optim.AdamW(fused=True)` on the same sharded parameters. It also
    unscales (`GradScaler`) and clips (`clip_grad_norm_`).

    Args:
        params: parameters of one ZeRO3 module, or groups of them.
        lr, betas, eps, weight_decay, amsgrad, maximize: as for `torch.optim.AdamW`.
        foreach, fused: have no effect: there is one implementation, with the bits of torch's fused.
        capturable, differentiable: False.
        state: dtype of the two averages. "float32": 8 bytes an element (float64 for float64
            parameters). "bfloat16": 4 bytes. "8bit": 2 bytes, and a scale for each 256 elements.
            Both round at random, so that small changes add up.
        seed: of the random bits. They depend on it, the parameter's name, the index in the whole
            parameter and the step: for the same gradients, weights and states have the same bits at
            every world size, but for 8-bit states of blocks that a border between shards cuts.

    Raises:
        ValueError: a parameter belongs to no ZeRO3 module, or to another one than the others; or an
            argument is out of range.
        NotImplementedError: `capturable` or `differentiable` is set.
    """

    _state_dtype: str
    _seed: int
    _states: dict[Any, Any]
    next_factor: torch.Tensor | None
    """What the next step multiplies gradients by, of `clip_grad_norm_`: [1] float32; None: 1."""
    _is_shown: bool
    """Whether `state` shows all states; those of 8 bits only if somebody asked."""
    counts_writes = True
    """Increments versions where it writes; see optim/steps.py."""

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state: StateDtype = "float32",
        seed: int = 0,
    ) -> None:
        _check_options([{"capturable": capturable, "differentiable": differentiable}])
        if state not in _DTYPES:
            raise ValueError(
                f"AdamW: expected state to be one of {', '.join(map(repr, _DTYPES))}, got {state!r}"
            )
        if not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
            raise ValueError(f"AdamW: expected seed to be an int64, got {seed!r}")
        self._state_dtype = state
        self._seed = seed
        # `GradScaler.step` then leaves it to this class to unscale and to look at `found_inf`.
        self._step_supports_amp_scaling = True
        self._forget()
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, fused=True
        )

    def _forget(self) -> None:
        self._flats: list[FlatState] | None = None
        self._made_keys: Sequence[str] = ()
        self._given: list[list[Any]] = []
        self.next_factor = None
        self._shown: list[dict[nn.Parameter, dict[str, Any]]] = []
        self._kept: list[Any] = []

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Not collective.

        Raises:
            ValueError: a parameter belongs to no ZeRO3 module or to another one than the others, or
                is complex, or float64 with smaller states. The message names it; the group is not
                added.
            NotImplementedError: an option of the group is not supported.
        """
        super().add_param_group(param_group)
        try:
            self._check(self.param_groups[-1]["params"])
        except (ValueError, NotImplementedError):
            self.param_groups.pop()
            raise

    def _check(self, parameters: list[nn.Parameter]) -> None:
        *earlier, last = self.param_groups
        held = [each for group in earlier for each in group["params"]]
        check_parameters("AdamW", parameters, held)
        for parameter in parameters:
            if not parameter.dtype.is_floating_point:
                raise ValueError(
                    f"AdamW: parameter {name_of(parameter)} is {parameter.dtype}, not a float"
                )
            if parameter.dtype == torch.float64 and self._state_dtype != "float32":
                raise ValueError(
                    f"AdamW: parameter {name_of(parameter)} is float64, which needs "
                    f"state='float32', got {self._state_dtype!r}"
                )
        _check_options([last])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in _OWN}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        given = dict(state)
        if "_state_dtype" in given:
            # A copy or a pickle of an optimizer; otherwise a load into one.
            self._state_dtype = given["_state_dtype"]
            self._step_supports_amp_scaling = True
            self._forget()
        # Not through `__dict__`, which a property of the class hides.
        self.state = given.pop("state", {})
        torch.optim.AdamW.__setstate__(self, given)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but for states as they were saved: torch's have the parameter's dtype."""
        seen: list[dict[str, Any]] = []  # What all hooks have made of it.
        hook = self.register_load_state_dict_pre_hook(lambda _, given: seen.append(given))
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        saved, own = (
            chain.from_iterable(group["params"] for group in groups)
            for groups in (seen[0]["param_groups"], self.param_groups)
        )
        of = seen[0]["state"]
        pairs = zip(saved, own, strict=True)
        self.state = {**self.state, **{p: {**of[number]} for number, p in pairs if number in of}}

    def _rows_of(self, pairs: Pairs) -> torch.Tensor:
        """Rows for `flat_step_`: 8 columns, the sign of the gradient, the flag, and the step."""
        rows = []
        for number, step in pairs:
            group = self.param_groups[number]
            lr, (beta1, beta2) = float(group["lr"]), map(float, group["betas"])
            correction1, correction2 = 1 - beta1**step, 1 - beta2**step
            rows.append(
                [
                    1 - lr * float(group["weight_decay"]),
                    1 - beta1,
                    beta2,
                    1 - beta2,
                    -lr / correction1,
                    math.sqrt(correction2),
                    float(group["eps"]),
                    1 / math.sqrt(correction2),
                    -1.0 if group["maximize"] else 1.0,
                    float(group["amsgrad"]),
                    float(step),
                ]
            )
        return torch.tensor(rows, dtype=torch.float64, device="cpu")

    def _keys(self) -> Sequence[str]:
        return _KEYS if any(group["amsgrad"] for group in self.param_groups) else _KEYS[:2]

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient. Not collective.

        `.grad` is not changed: the factor of `clip_grad_norm_` and the scale of a `GradScaler` are
        applied on the way. With a `GradScaler`, blocks the host to read whether there is an
        overflow.

        Raises:
            RuntimeError: inside a backward pass of the model, or in a CUDA graph.
            NotImplementedError: a group has an option that is not supported.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        root = self._root()
        if root is not None and root.context.in_backward and not is_narrowed(self):
            raise RuntimeError(
                "AdamW.step() inside a backward pass: gradients are complete once "
                "backward() returns. Call it then, or use model.step_in_backward(optimizer)"
            )
        refuse_in_graph("AdamW", root)
        _check_options(self.param_groups)
        found_inf = getattr(self, "found_inf", None)
        factor, self.next_factor = self.next_factor, None
        stops = None if found_inf is None else bool(found_inf.item())
        grad_scale = getattr(self, "grad_scale", None)
        scale = 1.0 if grad_scale is None else float(grad_scale)
        flats = self._all_flats(to_step=True)
        wanted = None
        if is_narrowed(self):
            wanted = {each for group in self.param_groups for each in group["params"]}
            flats = [flat for flat in flats if any(each.parameter in wanted for each in flat.held)]
        rows = functools.cache(self._rows_of)
        taken: list[tuple[FlatState, Step]] = []
        for flat in () if stops else flats:
            step = flat.begin(rows, factor, wanted)
            if step is not None:
                taken.append((flat, step))
                if step.gradient.is_copy:
                    # Not later: the copies of all would take memory.
                    take_steps(taken, scale, self._seed)
        take_steps(taken, scale, self._seed)
        self._show()
        return loss

    def _root(self) -> RootState | None:
        units = (flat.unit for flat in self._flats or ())
        if (unit := next(filter(None, units), None)) is not None:
            return root_if_alive(unit)
        owner = first_owner(chain(*whole_groups(self)))
        return None if owner is None else owner.root

    @property
    def state(self) -> Any:
        """For each parameter that has stepped, what torch's optimizer of this name keeps.

        8-bit states are shown in float32, exactly; writes into what is shown count.
        """
        if self._state_dtype == "8bit" and not self._is_shown:
            self._is_shown = True
            for flat in self._flats or ():
                flat.widen()
            self._show()
        return self._states

    @state.setter
    def state(self, state: Any) -> None:
        self._states = state
        self._flats = None
        self._is_shown = True

    def _all_flats(self, to_step: bool = False) -> list[FlatState]:
        """The flat states, as the parameter groups and the visible state are now; `to_step`:
        parameters have to be where the flat states have them, too."""
        groups = whole_groups(self)
        is_known = (
            self._flats is not None
            and len(self._made_keys) >= len(self._keys())
            and len(groups) == len(self._given)
            and all(map(_are_same, groups, self._given))
            and _are_same(self._present(), self._kept)
            and not (to_step and not all(flat.is_intact() for flat in self._flats))
        )
        if not is_known:
            self._make_flats(groups)
        assert self._flats is not None
        return self._flats

    def _present(self) -> list[Any]:
        """What `state` shows: the dict of each parameter, and the tensors of the states in it."""
        held = self._states.values()
        try:
            return [*held, *chain.from_iterable(map(itemgetter(*self._made_keys), held))]
        except KeyError:
            return [None]  # Somebody took one away.

    def _make_flats(self, groups: list[list[nn.Parameter]]) -> None:
        old = dict(self.state)
        owner = first_owner(chain(*groups))
        self._given = [[*group] for group in groups]
        # A state that no group uses any more stays, as torch's does: its option may come back.
        held = {key for own in old.values() for key in own} | {*self._keys()}
        count = max((i + 1 for i, key in enumerate(_KEYS) if key in held), default=0)
        self._made_keys = _KEYS[:count]
        make = QuantState if self._state_dtype == "8bit" else FlatState
        self._flats = [
            make(held, place, self._made_keys, _DTYPES[self._state_dtype])
            for held, place in places_of(groups, () if owner is None else owner.root.units)
        ]
        for flat in self._flats:
            flat.take(old)
        self._show()

    def _show(self) -> None:
        """Put the states, where they were made again, to where torch's optimizers have them."""
        shown = [flat.shown for flat in self._flats or ()]
        if _are_same(shown, self._shown):
            return
        self._states.clear()
        for each in shown:
            self._states.update(each)
        self._shown, self._kept = shown, self._present()
        # After a step from 8-bit states there is nothing to show before somebody asks.
        self._is_shown = self._state_dtype != "8bit" or any(shown)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; also drops what `clip_grad_norm_` left for the next step."""
        self.next_factor = None
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        for group in self.param_groups:
            # In C: the host's time should not grow with the number of parameters.
            all(map(is_, map(_drop_grad, group["params"], repeat(None)), repeat(None)))

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        scaler: torch.amp.GradScaler | None = None,
    ) -> torch.Tensor:
        """Have the next `step` use gradients scaled down to a global norm of at most `max_norm`.

        `.grad` is not changed. The norm is that of this optimizer's parameters. Collective over the
        model's process group, as `model.clip_grad_norm_`.

        Args:
            norm_type: p > 0, or infinity.
            error_if_nonfinite: raise instead of clipping by an infinite or NaN norm; blocks the
                host.
            scaler: the gradient scaler whose `step` comes next: the norm is that of the unscaled
                gradients, and `step` unscales, so that `scaler.unscale_`, a pass over the
                gradients, is not needed. Allowed after `unscale_`, too.

        Returns:
            The norm before clipping, a scalar tensor, the same on all ranks. A norm of 2 is summed
            in float64: for the same gradients it has the same bits at every world size, but for a
            tie in its last rounding.

        Raises:
            RuntimeError: `step_in_backward` is on; or, on every rank, the norm is not finite and
                `error_if_nonfinite` is set.
        """
        root = self._root()
        assert root is not None, "add_param_group wants parameters of a model"
        norms.refuse_used(root)
        with torch.no_grad():
            norm = self._grad_norm(root, norm_type)
            scale = None if scaler is None else norms.scale_of_gradients(scaler, self)
            if scale is not None:
                norm = norm / scale.to(norm.device, norm.dtype)
            if error_if_nonfinite and not norm.isfinite():
                raise RuntimeError(
                    f"AdamW.clip_grad_norm_: the norm of the gradients is {norm}; "
                    "to clip by it all the same, pass error_if_nonfinite=False"
                )
            self.next_factor = norms.clip_factor(norm, max_norm).to(torch.float32).reshape(1)
        return norm

    def _grad_norm(self, root: RootState, norm_type: float) -> torch.Tensor:
        if norm_type != 2 or root.tensor_parallel_groups:
            own = dict.fromkeys(each for group in self.param_groups for each in group["params"])
            whole = [each for each in own if get_info(each) is None]
            return norms.grad_norm(norms.Clipped(root, root.units, whole, own), norm_type)
        return norms.flat_norm(root, self._all_flats())

    def overflow(self) -> torch.Tensor:
        """Whether a gradient on this rank is infinite or NaN: a float32 scalar, 1 or 0.

        Not collective; does not block the host.
        """
        root = self._root()
        device = torch.device("cpu") if root is None else root.device
        with torch.no_grad():
            found = [grad for flat in self._all_flats() for grad in flat.gradients()]
            return 1.0 - norms.all_finite(found, device).float()


def _check_options(groups: Sequence[dict[str, Any]]) -> None:
    for number, group in enumerate(groups):
        for name, value in _FIXED.items():
            if bool(group.get(name, value)) != value:
                raise NotImplementedError(
                    f"AdamW: group {number} has {name}={group[name]}, which is not supported"
                )


def _are_same(objects: Sequence[Any], known: Sequence[Any]) -> bool:
    return len(objects) == len(known) and all(map(is_, objects, known))
