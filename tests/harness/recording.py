"""What an engine did: its collectives in order, what it logged, which full buffers exist, and the
regions of its optional units."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from layerzero import ZeRO3
from layerzero.optional.exchange import Exchange
from layerzero.wrapping import zero3
from tests.harness.internals import (
    GradientSums,
    Operation,
    RootState,
    ShardGroup,
    inner_units,
    root_state,
)


def _nothing(*_: Any, **__: Any) -> None: ...


@contextmanager
def observed(
    owner: Any,
    name: str,
    before: Callable[..., object] = _nothing,
    after: Callable[..., object] = _nothing,
) -> Iterator[None]:
    """Each call of a function inside is seen: its arguments, and then its result and these."""
    original = getattr(owner, name)

    def calling(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        result = original(*args, **kwargs)
        after(result, *args, **kwargs)
        return result

    with mock.patch.object(owner, name, calling):
        yield


@contextmanager
def recorded_operations(model: ZeRO3) -> Iterator[list[Operation]]:
    """Collectives that `model` starts inside, in order of issue, on this rank; those between
    tensor-parallel ranks apart."""
    root = root_state(model)
    operations: list[Operation] = []

    def record(operation: Operation, verb: str, unit: str, group: ShardGroup) -> None:
        if group not in root.tensor_parallel_groups:
            operations.append(operation)

    with observed(root.operations, "next", after=record):
        yield operations


@contextmanager
def logged(logger_name: str, level: int = logging.INFO) -> Iterator[list[str]]:
    """Messages that one of layerzero's loggers gets inside, on this rank."""
    messages: list[str] = []
    logger, handler = logging.getLogger(logger_name), logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    former = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(former)


def gathered(operations: list[Operation]) -> list[str]:
    """Names of the units that were gathered, in order."""
    return [operation.unit for operation in operations if operation.verb == "all-gather"]


def reduced(operations: list[Operation]) -> list[str]:
    """Names of the units whose gradients were reduced, in order."""
    return [operation.unit for operation in operations if operation.verb == "reduce-scatter"]


def full_nbytes(model: ZeRO3) -> dict[str, int]:
    """Bytes of the full parameter storage of each unit now."""
    return {
        unit.fqn: sum(handle.full.untyped_storage().nbytes() for handle in unit.handles)
        for unit in inner_units(model)
    }


def waiting_nbytes(gradients: GradientSums) -> int:
    """Bytes on the device of gradients that wait, or are reduced."""
    earlier = gradients._earlier
    held = [*gradients.buffers, gradients.shard_sum, earlier.shard_sum]
    held += [each for pending in gradients._pending for each in pending]
    held += [] if earlier.area is None else [earlier.area.tensor]
    storages = [each.untyped_storage() for each in held if each is not None]
    return sum({each._cdata: each.nbytes() for each in storages}.values())


def gradient_nbytes(model: ZeRO3) -> dict[str, int]:
    """Bytes of unreduced gradients of each unit now, buffers and leaves."""
    return {
        unit.fqn: sum(
            waiting_nbytes(handle.gradients)
            + sum(
                unsharded.grad.nbytes
                for unsharded in handle.unsharded_params
                if unsharded.grad is not None
            )
            for handle in unit.handles
        )
        for unit in inner_units(model)
    }


Regions = tuple[dict[str, str], str] | None
"""The region of each optional unit by FQN, and the mean; None: no rank may skip any."""


def regions_of(root: RootState) -> Regions:
    optional = root.optional
    if optional is None:
        return None
    by_fqn = {root.units[index].fqn: name for index, name in optional.region_of.items()}
    return by_fqn, optional.mean


@contextmanager
def recorded_regions() -> Iterator[list[Regions]]:
    """Inside, the regions of each model that is wrapped are added to the list that this yields."""
    found: list[Regions] = []
    with observed(zero3, "build", after=lambda root, *_: found.append(regions_of(root))):
        yield found


@contextmanager
def counted_exchanges() -> Iterator[list[int]]:
    """Bytes that this rank brings to each exchange inside."""
    sizes: list[int] = []
    with observed(Exchange, "_gather", lambda _, own, what: sizes.append(own.nbytes)):
        yield sizes
