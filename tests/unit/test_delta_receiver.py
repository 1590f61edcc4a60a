"""apply_delta: it writes in place, or raises and writes nothing."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layerzero.checkpoint import CheckpointError, DeltaError, Patch, apply_delta
from layerzero.checkpoint.delta.patch import Link

BF16 = torch.bfloat16
START = Link("s", "c", 0, ("a",), number=1, after=0)
SHAPE = (3, 4)


def patch(
    number: int = 1,
    after: int | None = None,
    name: str = "a",
    indices: Any = (1, 7),
    values: Any = None,
    shape: tuple[int, ...] = SHAPE,
    aliases: tuple[str, ...] = (),
    **link: Any,
) -> Patch:
    if values is None:
        values = torch.arange(1, len(indices) + 1).to(BF16) * number
    own = START._replace(number=number, after=number - 1 if after is None else after, **link)
    return Patch(name, torch.tensor(indices, dtype=torch.int64), values, shape, aliases, own)


def expanded(base: Tensor) -> Tensor:
    return base[:1].expand(SHAPE)


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.zeros(SHAPE, dtype=BF16),
    "flat": lambda: torch.zeros(12, dtype=BF16),
    "transposed": lambda: torch.zeros(4, 3, dtype=BF16).t(),
    "strided": lambda: torch.zeros(6, 8, dtype=BF16)[1::2, ::2],
    "offset": lambda: torch.zeros(20, dtype=BF16)[5:17].view(SHAPE),
    "parameter": lambda: nn.Parameter(torch.zeros(SHAPE, dtype=BF16)),
    "inference": lambda: inference(),
    "float32": lambda: torch.zeros(SHAPE),
    "float64": lambda: torch.zeros(SHAPE, dtype=torch.float64),
}


def inference() -> Tensor:
    with torch.inference_mode():
        return torch.zeros(SHAPE, dtype=BF16)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_go_to_their_places_in_any_layout(layout: str) -> None:
    tensor = LAYOUTS[layout]()
    address = tensor.data_ptr()
    apply_delta({"a": tensor}, patch())
    wanted = torch.zeros(12)
    wanted[1], wanted[7] = 1, 2
    assert tensor.data_ptr() == address and tensor.reshape(-1).tolist() == wanted.tolist()


def test_a_scalar_and_an_empty_patch() -> None:
    scalar = torch.zeros((), dtype=BF16)
    apply_delta({"a": scalar}, patch(indices=[0], shape=()))
    assert scalar.item() == 1
    apply_delta({"a": scalar}, patch(2, indices=[], shape=()))
    assert scalar.item() == 1


BAD: dict[str, tuple[Callable[[], Any], Patch, str]] = {
    "unknown name": (lambda: torch.zeros(SHAPE, dtype=BF16), patch(name="b"), "'b' .*unknown name"),
    "index too large": (LAYOUTS["contiguous"], patch(indices=(1, 12)), "index 12 is outside"),
    "negative index": (LAYOUTS["contiguous"], patch(indices=(-1, 3)), "index -1 is outside"),
    "other shape": (lambda: torch.zeros(4, 3, dtype=BF16), patch(), r"\(4, 3\), and the original"),
    "narrow dtype": (lambda: torch.zeros(SHAPE, dtype=torch.float16), patch(), "cannot hold every"),
    "integers": (lambda: torch.zeros(SHAPE, dtype=torch.int64), patch(), "cannot hold every"),
    "shared memory": (lambda: expanded(torch.zeros(1, 4, dtype=BF16)), patch(), "share memory"),
    "windows": (
        lambda: torch.zeros(9, dtype=BF16).as_strided(SHAPE, (1, 2)),
        patch(),
        "share memory",
    ),
    "meta": (lambda: torch.zeros(SHAPE, dtype=BF16, device="meta"), patch(), "plain memory"),
    "sparse": (lambda: torch.zeros(SHAPE, dtype=BF16).to_sparse(), patch(), "plain memory"),
    "too few values": (
        LAYOUTS["contiguous"],
        patch(values=torch.ones(3, dtype=BF16)),
        "as many values",
    ),
    "float indices": (
        LAYOUTS["contiguous"],
        dataclasses.replace(patch(), indices=torch.zeros(2)),
        "1-D int64",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused_before_anything_is_written(case: str) -> None:
    make, given, text = BAD[case]
    tensor = make()
    with pytest.raises(DeltaError, match=text) as error:
        apply_delta({"a": tensor}, given)
    assert isinstance(error.value, (ValueError, CheckpointError)) and "rank 0" in str(error.value)
    if tensor.layout is torch.strided and not tensor.is_meta:
        assert not tensor.any()


def test_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match="expected a Patch, got dict"):
        apply_delta({}, {})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'a' is no tensor, but list"):
        apply_delta({"a": [0.0] * 12}, patch())  # type: ignore[dict-item]


def state(tensors: dict[str, Tensor]) -> dict[str, list[float]]:
    return {name: tensor.flatten().tolist() for name, tensor in tensors.items()}


def refused(tensors: dict[str, Tensor], given: Patch, text: str) -> None:
    before = state(tensors)
    with pytest.raises(DeltaError, match=text):
        apply_delta(tensors, given)
    assert state(tensors) == before


def fresh() -> dict[str, Tensor]:
    return {name: torch.zeros(SHAPE, dtype=BF16) for name in ("a", "b")}


def test_lost_and_repeated_patches_are_errors() -> None:
    tensors = fresh()
    refused(tensors, patch(2), "comes after patch 1, and none of rank 0")
    apply_delta(tensors, patch(1))
    refused(tensors, patch(1), "repeated, the tensors are at patch 1")
    refused(tensors, patch(3, name="b"), "patches were lost, the tensors are at patch 1")
    apply_delta(tensors, patch(2, name="b"))
    apply_delta(tensors, patch(3))
    # Another rank's patches have a chain of their own.
    apply_delta(tensors, patch(1, sender=1, chain="d", anchor=("b",)))
    refused(tensors, patch(2, name="b"), "repeated, the tensors are at patch 3")


def test_the_patch_after_an_interruption_fits_with_and_without_the_one_before() -> None:
    for arrived in (True, False):
        tensors = fresh()
        apply_delta(tensors, patch(1))
        if arrived:
            apply_delta(tensors, patch(2))
        apply_delta(tensors, patch(3, after=1))
        refused(tensors, patch(2), "repeated")
        apply_delta(tensors, patch(4))


def test_full_comes_whole_and_in_order() -> None:
    def part(number: int, at: int = 7, of: int = 3, **link: Any) -> Patch:
        return patch(at, after=at, part=number, parts=of, **link)

    tensors = fresh()
    refused(tensors, part(1), "the last one applied is none")
    apply_delta(tensors, part(0))
    refused(tensors, patch(8), "up to part 1 only")
    refused(tensors, part(2), "the last one applied is part 1")
    apply_delta(tensors, part(1))
    refused(tensors, part(1), "lost or repeated")
    refused(tensors, part(2, at=9), "all parts of one full")
    apply_delta(tensors, part(2))
    refused(tensors, patch(7), "repeated")
    refused(tensors, patch(9), "lost")
    apply_delta(tensors, patch(8))
    # Another stream takes the tensors over, all or nothing.
    refused(tensors, patch(1, stream="t", chain="e"), "holds values of another stream, s")
    refused(tensors, patch(9, chain="e"), "of another stream than the patches of rank 0 before")
    apply_delta(tensors, part(0, stream="t", chain="e", of=1))
    refused(tensors, patch(9), "holds values of another stream, t")
    apply_delta(tensors, patch(8, stream="t", chain="e"))


def test_a_receiver_that_starts_without_full_must_hold_the_first_values() -> None:
    from layerzero.checkpoint.delta.apply import crc_of

    start = torch.arange(12.0).to(BF16)
    given = dataclasses.replace(patch(), before=crc_of(start[[1, 7]]))
    refused(fresh(), given, "do not hold the values that the model had")
    for dtype in (BF16, torch.float32):
        tensors = {"a": start.to(dtype).view(SHAPE).clone()}
        apply_delta(tensors, given)
        assert tensors["a"].view(-1)[[1, 7]].tolist() == [1, 2]


def test_positions_stay_with_the_memory() -> None:
    model = nn.Linear(4, 3, bias=False, dtype=BF16)
    model.a = model.weight
    apply_delta(model.state_dict(), patch())
    with pytest.raises(DeltaError, match="repeated"):
        apply_delta(dict(model.named_parameters(remove_duplicate=False)), patch())
    apply_delta(model.state_dict(), patch(2))
    copied = {"a": model.weight.detach().clone()}
    with pytest.raises(DeltaError, match="none of rank 0 was applied"):
        apply_delta(copied, patch(3))


def test_all_names_of_a_tied_tensor_are_written() -> None:
    tensors = fresh()
    apply_delta(tensors, patch(aliases=("b",)))
    assert torch.equal(tensors["a"], tensors["b"]) and tensors["a"].any()
    only = {"b": torch.zeros(SHAPE, dtype=BF16)}
    apply_delta(only, patch(aliases=("b",), anchor=("a", "b")))
    assert torch.equal(only["b"], tensors["b"])
    one = torch.zeros(SHAPE, dtype=BF16)
    apply_delta({"a": one, "b": one}, patch(aliases=("b",)))


def test_a_patch_can_be_pickled() -> None:
    given = patch(aliases=("b",))
    found = pickle.loads(pickle.dumps(given))
    assert found.link == given.link and found.names == given.names
    assert torch.equal(found.indices, given.indices) and torch.equal(found.values, given.values)
    assert found.nbytes == given.nbytes == 2 * 10
