"""Which submodules become units, and which parameters each unit owns."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from layerzero.flat.flatten import OriginalParameter, Slot
from layerzero.flat.names import WRAPPER_NAMES, and_wrapped
from layerzero.flat.parameter_info import get_info, info_of, sharded_param_of
from layerzero.step.methods import shown_by
from layerzero.step.unit import Unit, get_unit

Choice = bool | Mapping[str, Any]
"""Whether a module is a unit; a mapping, even an empty one, makes it one with these arguments."""


@dataclass(frozen=True)
class ModelPolicy:
    """A policy that looks at a whole model at once: one of FSDP."""

    choose: Callable[[nn.Module, Iterable[nn.Module], Iterable[nn.Parameter]], Mapping[int, Choice]]
    """Takes the model, ignored modules and ignored parameters; returns the choice for each module
    that it selects, keyed by id(module)."""
    classes: tuple[type[nn.Module], ...]
    """The module classes that it lists; empty if it is a function."""


WrapPolicy = Iterable[type[nn.Module]] | Callable[..., Choice] | ModelPolicy | None


def make_chooser(
    policy: WrapPolicy,
    root: nn.Module,
    ignored_modules: Iterable[nn.Module] = (),
    ignored_parameters: Iterable[nn.Parameter] = (),
) -> Callable[[nn.Module, str], Choice]:
    """Turn the `auto_wrap_policy` argument into a function of (module, fqn).

    Args:
        root: the module to be wrapped.

    Raises:
        TypeError: `policy` has none of these types.
    """
    if policy is None:
        return lambda module, fqn: False
    if isinstance(policy, ModelPolicy):
        chosen = policy.choose(root, ignored_modules, ignored_parameters)
        return lambda module, fqn: chosen.get(id(module), False)
    if callable(policy) and not isinstance(policy, (type, nn.Module)):
        return policy
    is_one = isinstance(policy, (type, str, Mapping, nn.Module)) or not isinstance(policy, Iterable)
    classes: tuple[Any, ...] = (policy,) if is_one else tuple(policy)  # type: ignore[arg-type]
    for cls in classes:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise TypeError(
                "auto_wrap_policy: expected a set of nn.Module classes, a callable(module, fqn), "
                f"a policy of torch.distributed.fsdp.wrap or None, got {cls!r}"
                + ("" if cls is policy else f" in {policy!r}")
            )
    return lambda module, fqn: isinstance(module, classes)


def classes_of(policy: Any) -> tuple[type[nn.Module], ...]:
    """The module classes that a policy lists; empty if it is a function."""
    if isinstance(policy, type):
        return (policy,)
    if isinstance(policy, ModelPolicy):
        return policy.classes
    return tuple(policy) if isinstance(policy, Iterable) else ()


@dataclass
class UnitPlan:
    """A module that will become a unit, or already is one, and what it will own."""

    fqn: str
    module: nn.Module
    chosen: nn.Module
    """The module that the policy chose: `module`, or one that `module` is a wrapper around."""
    parent: UnitPlan | None
    existing: Unit | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    originals: list[OriginalParameter] = field(default_factory=list)
    tied_owners: list[UnitPlan] = field(default_factory=list)

    @property
    def label(self) -> str:
        return self.fqn or "the root unit"

    def ancestors(self) -> Iterator[UnitPlan]:
        """This plan, then the units around it, innermost first."""
        plan: UnitPlan | None = self
        while plan is not None:
            yield plan
            plan = plan.parent


class Visit(NamedTuple):
    """A module, its name, and the innermost unit around it."""

    plan: UnitPlan
    fqn: str
    module: nn.Module


def plan_units(
    root: nn.Module,
    policy: WrapPolicy,
    ignored_modules: Iterable[nn.Module],
    ignored_parameters: Iterable[nn.Parameter],
) -> tuple[list[UnitPlan], list[Visit]]:
    """Decide the units of `root` and what each owns.

    Returns the units, outermost first, and every module that is not ignored, in module order.

    A parameter belongs to the innermost unit that contains all its uses: one shared by two units
    goes to the nearest unit around both.

    The unit of a module in wrappers (torch.compile, `checkpoint_wrapper`) is the outermost of them,
    so that the compiled code or the checkpoint runs inside calls of the unit.

    Raises:
        ValueError: a parameter is shared between an already wrapped module and another one, or a
            module is a DistributedDataParallel.
    """
    ignored_modules, ignored_parameters = tuple(ignored_modules), tuple(ignored_parameters)
    choose = make_chooser(policy, root, ignored_modules, ignored_parameters)
    walk = _Walk(root, choose, ignored_modules, ignored_parameters)
    walk.visit(root, "", None)
    wrapped = [(plan, plan.existing) for plan in walk.plans if plan.existing is not None]
    unit_of = {id(p): plan for plan, existing in wrapped for p in existing.sharded_params}
    for original, _ in walk.owners.values():
        sharded = sharded_param_of(original.parameter)
        if sharded is not None and id(sharded) in unit_of:
            raise ValueError(
                f"parameter {original.fqn!r} was tied to {info_of(sharded).fqn!r} of "
                f"{unit_of[id(sharded)].label!r}, which was wrapped alone: they would no longer be "
                "tied; wrap both by one ZeRO3(..., auto_wrap_policy=...), which keeps them in a "
                "unit around both"
            )
    for original, users in walk.owners.values():
        around = [{id(each) for each in user.ancestors()} for user in users]
        owner = next(each for each in users[0].ancestors() if all(id(each) in a for a in around))
        if owner.existing is not None:
            raise ValueError(
                f"parameter {original.fqn!r} was added to {owner.label!r} after wrapping; add "
                "parameters before wrapping, or call layerzero.rewrap of the inner model first"
            )
        owner.originals.append(original)
        for user in users:
            if user is not owner and owner not in user.tied_owners:
                user.tied_owners.append(owner)
    return walk.plans, walk.visits


class _Walk:
    """One walk through a module tree, outermost first."""

    def __init__(
        self,
        root: nn.Module,
        choose: Callable[[nn.Module, str], Choice],
        ignored_modules: Iterable[nn.Module],
        ignored_parameters: Iterable[nn.Parameter],
    ) -> None:
        self.plans: list[UnitPlan] = []
        self.visits: list[Visit] = []
        self.owners: dict[int, tuple[OriginalParameter, list[UnitPlan]]] = {}
        self._choose = choose
        self._ignored = {id(module) for top in ignored_modules for module in top.modules()}
        self._ignored_parameters = {id(parameter) for parameter in ignored_parameters}
        self._seen: dict[int, UnitPlan] = {}
        self._root = root

    @functools.cached_property
    def _num_places(self) -> Counter[int]:
        """Number of places of each module in the tree, keyed by id. Read for wrappers alone."""
        children = (child for part in self._root.modules() for child in part._modules.values())
        return Counter(map(id, children))

    def visit(
        self, module: nn.Module, fqn: str, parent: UnitPlan | None, may_choose: bool = True
    ) -> None:
        """Visit a module and those inside it.

        Args:
            may_choose: False inside a wrapper whose choice covers this module.
        """
        if id(module) in self._ignored:
            return
        if id(module) in self._seen:
            self._visit_again(module, parent)
            return
        if isinstance(module, DistributedDataParallel):
            raise ValueError(
                f"{fqn or 'the root module'} is a DistributedDataParallel, which waits for "
                "gradients of parameters that sharding replaces: ZeRO3 reduces gradients itself; "
                "put its .module in its place"
            )
        existing = get_unit(module)
        plan = parent
        # The root is always a unit, with the arguments of `ZeRO3`; an existing unit keeps its own.
        chosen: nn.Module | None = module
        arguments: Mapping[str, Any] = {}
        if parent is not None and existing is None:
            chosen, arguments = self._choice(module, fqn) if may_choose else (None, {})
        if chosen is not None:
            plan = UnitPlan(fqn, module, chosen, parent, existing, arguments)
            self.plans.append(plan)
        assert plan is not None
        self._seen[id(module)] = plan
        self.visits.append(Visit(plan, fqn, module))
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in self._ignored_parameters:
                self._visit_parameter(parameter, Slot(module, name), fqn, plan)
        for name, child in module._modules.items():
            if child is None:
                continue
            if name in WRAPPER_NAMES:
                is_unit = plan.fqn == fqn
                self.visit(child, fqn, plan, not is_unit and self._num_places[id(child)] > 1)
            else:
                self.visit(child, f"{fqn}.{name}" if fqn else name, plan)

    def _choice(self, module: nn.Module, fqn: str) -> tuple[nn.Module | None, Mapping[str, Any]]:
        """Which of `module` and the modules that it wraps the policy chooses, and its arguments.

        Ends at a module that is used elsewhere, too: there, its wrapper would not run.
        """
        for each in and_wrapped(module):
            is_elsewhere = each is not module and self._num_places[id(each)] > 1
            if is_elsewhere or id(each) in self._ignored or get_unit(each) is not None:
                break
            choice = self._choose(each, fqn)
            # An empty mapping is falsy, but makes the module a unit.
            if choice or isinstance(choice, Mapping):
                return each, choice if isinstance(choice, Mapping) else {}
        return None, {}

    def _visit_parameter(
        self, parameter: nn.Parameter, slot: Slot, fqn: str, plan: UnitPlan
    ) -> None:
        if get_info(parameter) is not None:
            return  # A sharded parameter: it belongs to an existing unit.
        name = f"{fqn}.{slot.name}" if fqn else slot.name
        original, users = self.owners.setdefault(
            id(parameter), (OriginalParameter(name, parameter, []), [])
        )
        original.slots.append(slot)
        users.append(plan)

    def _visit_again(self, module: nn.Module, parent: UnitPlan | None) -> None:
        """A module that occurs twice: add the second unit around it as a user of its parameters."""
        if parent is None or self._seen[id(module)].module is module:
            return
        for part in module.modules():
            for parameter in part._parameters.values():
                if id(parameter) in self.owners:
                    self.owners[id(parameter)][1].append(parent)


def modules_of(module: nn.Module) -> Iterator[nn.Module]:
    """Every module inside `module`, including those inside wrappers."""
    for part in module.modules():
        yield part
        unit = get_unit(part)
        if unit is not None and unit.module is not part:
            yield unit.module


def units_inside(module: nn.Module) -> list[Unit]:
    """Units, of any model, of the modules inside `module` or of parameters they show.

    Outermost first.
    """
    found = (
        unit for part in modules_of(module) for unit in (get_unit(part), *shown_by(part).values())
    )
    return sorted(dict.fromkeys(filter(None, found)), key=lambda unit: unit.index)
