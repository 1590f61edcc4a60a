"""layerzero beside the reference: wrap a toy model, train both, compare at every step."""

import copy
import linecache
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from layerzero import ZeRO3
from layerzero.optim.waiting_gradients import WaitingGradient
from tests.harness.checks import (
    assert_bitwise,
    assert_close_in_float64,
    assert_norm,
    assert_same_on_all_ranks,
    assert_same_parameters,
)
from tests.harness.models import CASES, Case
from tests.harness.reference import (
    OPTIMIZERS,
    RunFn,
    Terms,
    backward_of_all_ranks,
    batches_of,
    forward_backward,
    full_gradients,
    full_parameters,
    seeded,
)


def sharded(case: Case, **options: Any) -> ZeRO3:
    """The case's model from seed 0, its units wrapped. Collective over the default group."""
    return zero3(case.build, *case.units, **options)


def zero3(build: Callable[[], nn.Module], *units: type[nn.Module], **options: Any) -> ZeRO3:
    """A model built from seed 0, with `units` (or `auto_wrap_policy`) wrapped.

    Its timeout is below that of a test, so that ranks that wait for each other tell what for.
    """
    options.setdefault("auto_wrap_policy", set(units) or None)
    options.setdefault("timeout", timedelta(seconds=25))
    return ZeRO3(seeded(build), **options)


def linears(count: int, width: int, bias: bool = False, **options: Any) -> ZeRO3:
    """Layers of one size from seed 0, each a unit."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(width, width, bias) for _ in range(count)))
    return ZeRO3(layers, auto_wrap_policy={nn.Linear}, **options)


def warnings_of(module: Any, *args: Any, **options: Any) -> list[str]:
    """What this rank is warned of when it wraps a module; each shows the line that wraps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ZeRO3(module, *args, **options)
    lines = {linecache.getline(each.filename, each.lineno).strip() for each in caught}
    assert lines <= {"ZeRO3(module, *args, **options)"}, "it shows the caller's line"
    return [str(each.message) for each in caught]


class Shared:
    """One reference for several models, trained alike: what it computed for one serves all others
    that come to the same step with the same bits."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.known: dict[tuple[int, bool, bytes], Step] = {}


class Step(NamedTuple):
    """What one step of the reference gave, before its optimizer."""

    loss: Tensor
    """Of this rank's batch."""
    gradients: dict[str, Tensor | None]
    bounds: dict[str, Tensor | float] | None
    """Of gradients whose terms are added in another order; None: in this one."""


def assert_trains_alike(
    model: nn.Module,
    reference: nn.Module | Shared,
    batches: Sequence[Sequence[Any]] | None = None,
    optimizer: str = "sgd_momentum",
    run: RunFn = forward_backward,
    reference_run: RunFn | None = None,
    regrouped: bool = False,
    reduction: str = "mean",
    group: dist.ProcessGroup | None = None,
) -> list[Tensor]:
    """Train both; each loss, gradient and parameter is compared at each step. Collective.

    Bitwise, but for gradients that are `regrouped`: these are as close as the order of a sum
    allows, and the reference goes on with those of the model. Each rank compares its own parts, and
    what `summon_full_params` shows once, at the end: so nothing comes between two steps.

    Args:
        model: wrapped; trained on this rank's part of `batches` [step][rank].
        batches: None: two steps, each of a [4, WIDTH] for each rank.
        reference: the same model, plain; trained on all of them.
        optimizer: a name in `OPTIMIZERS`.
        run: forward and backward of one batch, see `backward_of_all_ranks`.
        reference_run: of the reference, where it differs.
        regrouped: the model does not add up the gradients of each rank's passes, and then those of
            ranks in their order: it adds over ranks first, or over groups of them.
        reduction: what `gradient_reduction` the model has.
        group: the ranks that share the model, in the order of `batches`; None: all.

    Returns:
        This rank's losses.
    """
    rank = dist.get_rank(group)
    if batches is None:
        batches = batches_of(CASES["mlp"], dist.get_world_size(group), steps=2)
    known: dict[tuple[int, bool, bytes], Step] = {}
    if isinstance(reference, Shared):
        reference, known = copy.deepcopy(reference.model), reference.known
    optimizers = [OPTIMIZERS[optimizer](each.parameters()) for each in (model, reference)]
    assert_same_values(model, reference, "before the first step: parameter")
    losses = []
    for index, step in enumerate(batches):
        for each in optimizers:
            each.zero_grad()
        losses.append(run(model, step[rank]))
        key = index, regrouped, _bits(reference)
        if key not in known:
            known[key] = _step(reference, step, reference_run or run, reduction, regrouped, group)
        truth = known[key]
        assert_bitwise(losses[-1], truth.loss, f"step {index}: loss")
        what = f"step {index}: gradient of"
        gradients = truth.gradients
        if regrouped:
            gradients = full_gradients(model)
            assert_same_parameters(gradients, truth.gradients, truth.bounds, what)
        _assert_own_gradients(model, gradients, what=what)
        for name, parameter in reference.named_parameters():
            parameter.grad = gradients[name]
        for each in optimizers:
            each.step()
        assert_same_values(model, reference, f"after step {index}: parameter")
    for shown, what in ((full_parameters, "parameter"), (full_gradients, "gradient of")):
        assert_same_parameters(shown(model), shown(reference), what=f"at the end, {what}")
    return losses


def assert_follows(
    model: nn.Module,
    reference: nn.Module,
    batches: Sequence[Sequence[Any]],
    place: int | None = None,
    run: RunFn = forward_backward,
    clip: float | None = None,
    what: str = "",
) -> torch.optim.Optimizer:
    """Train both in float64, for a model whose products or sums have other parts than the plain
    one's. Collective. Losses, norms and gradients at each step; parameters bitwise those that the
    model's own gradients make. Of experts, those that this rank has.

    Args:
        batches: [step][data-parallel rank].
        place: this rank among these; None: its rank.
        clip: the norm to clip by.

    Returns:
        The model's optimizer.
    """
    optimizer, expected = (
        OPTIMIZERS["sgd_momentum"](each.parameters()) for each in (model, reference)
    )
    place = dist.get_rank() if place is None else place
    for index, step in enumerate(batches):
        where = f"{what} step {index}:"
        optimizer.zero_grad()
        expected.zero_grad()
        loss = run(model, step[place])
        losses = backward_of_all_ranks(reference, step, run)
        assert_close_in_float64(loss, losses[place], f"{where} loss")
        if clip is not None:
            norm = model.clip_grad_norm_(clip)
            whole = nn.utils.clip_grad_norm_(reference.parameters(), clip)
            assert whole > 1.1 * clip, "else nothing is scaled"
            assert_close_in_float64(norm, whole, f"{where} norm")
            assert_same_on_all_ranks(norm, "norm")
        gradients = full_gradients(model)
        assert_same_where_present(gradients, full_gradients(reference), f"{where} gradient of")
        for name, gradient in gradients.items():
            reference.get_parameter(name).grad = gradient
        optimizer.step()
        expected.step()
        own, all_values = full_parameters(model), full_parameters(reference)
        assert_same_parameters(
            own, {name: all_values[name] for name in own}, what=f"{where} parameter"
        )
    return optimizer


def assert_same_where_present(
    own: Mapping[str, Any], everything: Mapping[str, Any], what: str
) -> None:
    """In float64. Other ranks may have more experts, and nothing else."""
    assert all("experts." in name for name in everything.keys() - own.keys())
    expected = {name: value for name, value in everything.items() if name in own}
    assert_close_in_float64(own, expected, what)


def trained_alike(
    build: Callable[[], nn.Module],
    *units: type[nn.Module],
    batches: Sequence[Sequence[Any]] | None = None,
    optimizer: str = "sgd_momentum",
    run: RunFn = forward_backward,
    reference_run: RunFn | None = None,
    regrouped: bool = False,
    reduction: str = "mean",
    **options: Any,
) -> ZeRO3:
    """Wrap what `build` returns (see `zero3`), and train it beside that (`assert_trains_alike`)."""
    model, given = zero3(build, *units, **options), (optimizer, run, reference_run, regrouped)
    assert_trains_alike(model, seeded(build), batches, *given, reduction)
    return model


def _step(
    model: nn.Module,
    batches: Sequence[Any],
    run: RunFn,
    reduction: str,
    regrouped: bool,
    group: dist.ProcessGroup | None,
) -> Step:
    terms = Terms() if regrouped else None
    losses = backward_of_all_ranks(model, batches, run, reduction, terms)
    bounds = None if terms is None else terms.bounds(model)
    return Step(losses[dist.get_rank(group)], full_gradients(model), bounds)


def _bits(model: nn.Module) -> bytes:
    return b"".join(
        parameter.detach().cpu().flatten().view(torch.uint8).numpy().tobytes()
        for parameter in model.parameters()
    )


def assert_same_gradients(
    model: nn.Module, reference: nn.Module, terms: Terms | None = None, what: str = "gradient of"
) -> None:
    """This rank's parts; with the `terms` of the reference as close as their sum in another order.
    None where the reference has None, or a micro-batch waits for others."""
    bounds = None if terms is None else terms.bounds(reference)
    _assert_own_gradients(model, full_gradients(reference), bounds, what)


def assert_same_values(model: nn.Module, reference: nn.Module, what: str = "parameter") -> None:
    """This rank's parts of the parameters, by name, bitwise."""
    own = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert_same_parameters(own, _parts(model, full_parameters(reference)), what=what)


def _assert_own_gradients(
    model: nn.Module,
    expected: Mapping[str, Tensor | None],
    bounds: Mapping[str, Tensor | float] | None = None,
    what: str = "gradient of",
) -> None:
    own = {
        name: None if isinstance(parameter.grad, WaitingGradient) else parameter.grad
        for name, parameter in model.named_parameters()
    }
    limits = None if bounds is None else _parts(model, bounds)
    assert_same_parameters(own, _parts(model, expected), limits, what)


def _parts(model: nn.Module, whole: Mapping[str, Any]) -> dict[str, Any]:
    """What this rank has of each tensor of `whole`; of an ignored parameter all, None of None."""
    parts = dict(whole)
    for name, parameter in model.named_parameters():
        info, value = getattr(parameter, "layerzero", None), parts.get(name)
        if info is not None and isinstance(value, Tensor):
            assert value.shape == info.shape, f"{name}: {value.shape}, {info.shape}"
            parts[name] = value.reshape(-1)[slice(*info.range)].view_as(parameter)
    return parts


def assert_norm_of_gradients(
    norm: Tensor, model: nn.Module, norm_type: float = 2.0, what: str = "norm"
) -> None:
    """Collective. `norm` is that of the model's own full gradients."""
    gradients = [each for each in full_gradients(model).values() if each is not None]
    assert_norm(norm, gradients, norm_type, what)


def assert_clips(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clip the gradients; their norm is right, and scales them bitwise. Collective."""
    before = full_gradients(model)
    norm: Tensor = model.clip_grad_norm_(max_norm, norm_type)
    assert norm.dim() == 0
    assert_norm(norm, [each for each in before.values() if each is not None], norm_type)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    scaled = {name: None if each is None else each * factor for name, each in before.items()}
    assert_same_parameters(full_gradients(model), scaled, what="clipped gradient of")
    return norm


def follow(model: nn.Module, reference: nn.Module) -> None:
    """Give a plain model the full gradients of `model`, after both were compared. Collective."""
    gradients = full_gradients(model)
    for name, parameter in reference.named_parameters():
        parameter.grad = gradients[name]
