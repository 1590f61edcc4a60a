"""WholeTensorOptimizer: any torch optimizer, on whole tensors with one owner rank each.

    gradients of shards --all-to-all--> whole gradients --the user's optimizer--> whole values
    shards <--all-to-all-- whole values

Note [Shards are the truth]
    An owner keeps its whole tensors between steps, so that a step sends each element once each way.
    Before a step, tensors whose shards were written since the last one (loaded weights, edits by
    hand) are sent to their owners again. A tensor that lies in its owner's shard as a whole is a
    view of it and needs neither memory nor messages.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from layerzero.config import parse_nbytes
from layerzero.flat.placement import Placement
from layerzero.optim.sharded_params import refuse_in_graph
from layerzero.optim.whole_tensor import inner, stepping
from layerzero.optim.whole_tensor.inner import Factory, Given, Group, options_of, stand_in_for
from layerzero.optim.whole_tensor.owners import Cost, Member, OwnerGroup, choose_owners
from layerzero.step.handle import FlatParamHandle
from layerzero.step.root import RootState, root_of
from layerzero.step.unit import TrainingState

_NAME = "WholeTensorOptimizer"
_LAYOUT = "whole_tensors"
"""Key of a state dict under which the layout of the rank is."""


class WholeTensorOptimizer(torch.optim.Optimizer):
    """Runs any torch optimizer on whole tensors, each of which has one owner rank.

    Parameters of a sharded model are shards, which only element-wise optimizers can use. This one
    sends gradients to the owners of whole tensors, steps the given optimizer there, and returns the
    values to the shards. So Muon, Shampoo, SOAP, Adafactor and 8-bit states work unmodified.

    Use it like any torch optimizer: `param_groups` hold the sharded parameters, schedulers change
    options there, and the changes reach the inner optimizer at the next step.

    Attributes:
        inner: the given optimizer over the whole tensors that this rank owns; None if it owns none.
        owned: the whole tensors of this rank, by FQN, in the original shapes. Shards are the truth:
            change weights in the model, not here.
        state: the whole states of the tensors that this rank owns, by sharded parameter; the same
            dicts as in `inner.state`.

    Construction, `add_param_group` and `step` are collective over the ranks that share the model;
    construction blocks the host.
    """

    inner: torch.optim.Optimizer | None
    _inner: torch.optim.Optimizer
    owned: dict[str, nn.Parameter]
    needs_all_units = True
    """Refused by `step_in_backward`."""
    counts_writes = True
    """Increments versions where it writes; see optim/steps.py."""

    def __init__(
        self,
        params: Any,
        optimizer_class: type[torch.optim.Optimizer],
        *,
        cost: Cost | None = None,
        bucket_bytes: int | str = "64MB",
        **options: Any,
    ) -> None:
        """
        Args:
            params: parameters of one wrapped model, (name, parameter) pairs, or groups, the same on
                every rank.
            optimizer_class: a class derived from torch.optim.Optimizer that treats each tensor by
                itself.
            cost: returns the cost of a tensor from its shape (a torch.Size); owners are balanced
                by it. None: the number of elements.
            bucket_bytes: bound on what a rank sends, and on what it receives, at a time; an int or
                a string such as "64MB". A larger tensor travels alone.
            options: passed to `optimizer_class`.

        Raises:
            TypeError, ValueError: on every rank: a parameter or the class does not fit, or ranks
                were given different ones.
            RuntimeError: inside forward or backward.
            CollectiveError: a rank did not take part.
        """
        given = inner.read(params)
        self._is_made = False
        self._factory = Factory(optimizer_class, options, given.is_flat)
        self._cost: Cost = torch.Size.numel if cost is None else cost
        self._members: dict[nn.Parameter, Member] = {}
        self._groups: dict[Placement, OwnerGroup] = {}
        self._contents: dict[FlatParamHandle, tuple[list[int], int]] = {}
        self._buckets: dict[tuple[int, ...], stepping.Buckets] = {}
        self.inner = None
        self.owned = {}
        prototype, self._limit = self._agree_on(given, bucket_bytes)
        super().__init__(given.groups, prototype.defaults)
        self._extend(given, self.param_groups)
        self._is_made = True

    def owner_of(self, parameter: nn.Parameter) -> int:
        """The data-parallel rank that owns the whole tensor of a sharded parameter.

        Data-parallel ranks count the ranks that share the parameter, by rising global rank.

        Raises:
            KeyError: the optimizer does not have the parameter.
        """
        return self._members[parameter].whole.owner

    def owns(self, parameter: nn.Parameter) -> bool:
        """Whether this rank owns the whole tensor of a sharded parameter; KeyError as `owner_of`.

        Unlike a look into `owned`, it does not depend on the parameter's name, which changes when
        the model becomes part of a larger one.
        """
        return self._members[parameter].tensor is not None

    def _agree_on(self, given: Given, bucket_bytes: int | str) -> tuple[torch.optim.Optimizer, int]:
        """Check the arguments on all ranks. Collective. Returns also bucket_bytes, as a number."""
        factory = self._factory._replace(is_flat=given.is_flat)
        error: Exception | None = None
        prototype: torch.optim.Optimizer | None = None
        limit, rows = 0, list[str]()
        try:
            factory.check((torch.optim.LBFGS, WholeTensorOptimizer))
            limit = parse_nbytes(bucket_bytes, f"{_NAME}: bucket_bytes")
            given.check(self._members)
            # Over stand-ins alone: for its checks, defaults and options.
            groups = [{**g, "params": [*map(stand_in_for, g["params"])]} for g in given.groups]
            prototype = factory.make(groups)
            first = f"{factory.cls.__qualname__}, bucket_bytes={limit}"
            rows = [first, *given.rows(self._cost, factory.options)]
        except Exception as caught:
            error = caught
        if given.root is None:
            assert error is not None, "parameters of no model are refused"
            raise error
        inner.raise_together(given.root, error, rows)
        assert prototype is not None, "else there is an error"
        return prototype, limit

    def _extend(self, given: Given, groups: Sequence[Group]) -> None:
        """Give the parameters of new groups owners, and owners the values. Collective."""
        root = given.root
        assert root is not None, "checked"
        parameters = [p for group in groups for p in group["params"]]
        added = choose_owners(root, parameters, self._cost, self._groups)
        self._buckets.clear()
        self._members |= {member.parameter: member for member in added}
        self.owned |= {member.fqn: each for member in added if (each := member.tensor) is not None}
        self._fetch(root, range(len(self._members)))  # Earlier ones may have been written.
        self._contents = self._contents_now(root)
        error: Exception | None = None
        try:
            self._extend_inner(groups)
        except Exception as caught:
            error = caught
        inner.raise_together(root, error)

    @torch.no_grad()
    def _fetch(self, root: RootState, numbers: Iterable[int]) -> None:
        members = list(self._members.values())
        buckets = stepping.buckets_of(members, numbers, self._limit)
        stepping.exchange_all(root, members, buckets, "values to owners")

    def _extend_inner(self, groups: Sequence[Group]) -> None:
        whole: list[Group] = []
        some = next(iter(self._members))
        for group in groups:
            tensors = (self._members[parameter].tensor for parameter in group["params"])
            owned = [each for each in tensors if each is not None]
            stand_in = stand_in_for(next(iter(group["params"]), some))
            whole.append({**options_of(group), "params": owned or [stand_in]})
        if self._is_made:
            for group in whole:
                self._inner.add_param_group(group)
        else:
            self._inner = self._factory.make(whole)
        for group, own in zip(groups, self._inner.param_groups[-len(groups) :], strict=True):
            group.update(options_of(own))  # A class may have converted them.
        self.inner = self._inner if self.owned else None
        self._show_state()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. Collective, once the optimizer is made; raises as the constructor."""
        if not self._is_made:
            super().add_param_group(param_group)
            return
        given = inner.read([param_group])
        self._agree_on(given, self._limit)
        super().add_param_group(given.groups[0])
        before = dict(self._members), dict(self.owned)
        try:
            self._extend(given, self.param_groups[-1:])
        except BaseException:
            self.param_groups.pop()
            self._members, self.owned = before
            del self._inner.param_groups[len(self.param_groups) :]
            raise

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient. Collective over the ranks of the model.

        Blocks the host on CPU. If the inner optimizer raises on one rank, that rank raises after it
        has taken part in the exchanges, and the other ranks go on.

        Args:
            closure: called once, before the step.

        Returns:
            What `closure` returns.

        Raises:
            RuntimeError: inside forward, backward or a CUDA graph; or a parameter has a gradient
                on some ranks only.
            CollectiveError: a rank did not take part.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        root = self._model_between_steps()
        with torch.no_grad():
            self._step(root)
        return loss

    def refresh(self) -> None:
        """Have the next step read all shards again. Enough on one rank; not collective.

        On a device with streams, for writes through `.data`; all other writes are noticed.
        """
        self._contents.clear()

    def _step(self, root: RootState) -> None:
        members = list(self._members.values())
        present, written = stepping.agree(root, members, self._find_written(root))
        if written:
            self._fetch(root, written)
        if present not in self._buckets:
            self._buckets = {present: stepping.buckets_of(members, present, self._limit)}
        buckets = self._buckets[present]
        stepping.exchange_all(root, members, buckets, "gradients to owners")
        error = inner.step(self._inner, self.param_groups)
        stepping.exchange_all(root, members, buckets, "values from owners")
        # Also where this rank has no element: all ranks refuse a graph of weights that changed.
        torch.autograd.graph.increment_version([members[n].parameter for n in present])
        self._contents = self._contents_now(root)
        for own, group in zip(self.param_groups, self._inner.param_groups, strict=True):
            own.update(options_of(group))
        self._show_state()
        if error is not None:
            raise error

    def _model_between_steps(self) -> RootState:
        """The root state of the model; it changes when the model becomes part of another."""
        units = {member.unit: member.handle for member in self._members.values()}
        roots = {root_of(unit) for unit in units}
        is_same = all(handle in unit.handles for unit, handle in units.items())
        if len(roots) != 1 or not is_same:
            raise RuntimeError(
                f"{_NAME}.step: the model was wrapped again; make another one from its parameters"
            )
        (root,) = roots
        when = f"{_NAME}.step: called inside forward or backward"
        held = [parameter for group in self.param_groups for parameter in group["params"]]
        if len(held) != len(self._members) or any(p not in self._members for p in held):
            raise RuntimeError(
                f"{_NAME}.step: the lists of parameters in its groups were changed; use "
                "add_param_group, freeze parameters with requires_grad_(False), or make another"
            )
        root.check_between_steps(f"{when}; call it after backward has returned")
        refuse_in_graph(_NAME, root)
        if any(unit.training_state is TrainingState.SUMMON_FULL_PARAMS for unit in root.units):
            raise RuntimeError(f"{_NAME}.step: called inside summon_full_params; call it outside")
        return root

    def _find_written(self, root: RootState) -> list[bool]:
        """For each member, whether its flat parameter was written since the last step."""
        for handle, member in self._handles().items():
            handle.reset_sharded_params(member.fqn)
        now, before = self._contents_now(root), self._contents
        return [now[each.handle] != before.get(each.handle) for each in self._members.values()]

    def _contents_now(self, root: RootState) -> dict[FlatParamHandle, tuple[list[int], int]]:
        return {handle: each.contents(root) for handle, each in self._handles().items()}

    def _handles(self) -> dict[FlatParamHandle, Member]:
        """All flat parameters, with one of the members in each."""
        return {member.handle: member for member in self._members.values()}

    def _show_state(self) -> None:
        """Show the states of the inner optimizer as those of the sharded parameters."""
        states: Any = self._inner.state
        for parameter, member in self._members.items():
            if member.tensor is not None and member.tensor in states:
                self.state[parameter] = states[member.tensor]

    def state_dict(self) -> dict[str, Any]:
        """This rank's part: whole states of the tensors that it owns, and all groups.

        Not collective. Only the same rank of the same layout can load it; for another number of
        ranks use layerzero.checkpoint.save and load.
        """
        return {**super().state_dict(), _LAYOUT: self._layout()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's `state_dict()`. Not collective.

        Raises:
            ValueError: it has another layout (another rank, number of ranks, or parameters);
                nothing has changed.
        """
        given = {**state_dict}
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            given = hook(self, given) or given
        self._refuse_other_layout(given.get(_LAYOUT))
        held = (parameter for group in self.param_groups for parameter in group["params"])
        inner.load(self._inner, given, [self._members[parameter].tensor for parameter in held])
        for group, saved in zip(self.param_groups, given["param_groups"], strict=True):
            group.update(copy.deepcopy(options_of(saved)))
        self.state.clear()
        self._show_state()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _layout(self) -> dict[str, Any]:
        owners = next(iter(self._members.values())).owners
        members = [
            self._members[parameter] for group in self.param_groups for parameter in group["params"]
        ]
        return {
            "rank": owners.group.rank,
            "num_ranks": owners.group.size,
            "owners": {member.fqn: member.whole.owner for member in members},
            "group_sizes": [len(group["params"]) for group in self.param_groups],
        }

    def _refuse_other_layout(self, given: dict[str, Any] | None) -> None:
        own = self._layout()
        # Their order, too: states are numbered by it.
        if given == own and list(given["owners"]) == list(own["owners"]):
            return
        found = "a torch optimizer" if given is None else "rank {rank} of {num_ranks}"
        raise ValueError(
            f"{_NAME}.load_state_dict: expected the state dict of rank {own['rank']} of "
            f"{own['num_ranks']}, with the same parameters, groups and owners, got one of "
            f"{found.format_map(given or {})}. A state dict fits only its own rank and layout; use "
            "layerzero.checkpoint.save and load to resume on other ranks"
        )

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"{_NAME} cannot be copied or pickled; save its state_dict(), or make another"
        )
