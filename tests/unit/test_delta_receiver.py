"""Patches: applied in place or refused, and packed."""

import dataclasses
import json
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
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


def test_values_go_to_their_places_in_any_layout() -> None:
    for layout, make in LAYOUTS.items():
        tensor = make()
        address = tensor.data_ptr()
        apply_delta({"a": tensor}, patch())
        wanted = torch.zeros(12)
        wanted[1], wanted[7] = 1, 2
        assert tensor.data_ptr() == address, layout
        assert tensor.reshape(-1).tolist() == wanted.tolist(), layout
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


def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    for case, (make, given, text) in BAD.items():
        tensor = make()
        with pytest.raises(CheckpointError, match=text) as error:
            apply_delta({"a": tensor}, given)
        assert isinstance(error.value, ValueError) and "rank 0" in str(error.value), case
        assert not tensor.any(), case


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
    refused(tensors, patch(2), "have not followed the sender's stream")
    apply_delta(tensors, patch(1))
    refused(tensors, patch(1), "is repeated: the tensors are at patch 1")
    refused(tensors, patch(3, name="b"), "before it were lost: the tensors are at patch 1")
    apply_delta(tensors, patch(2, name="b"))
    apply_delta(tensors, patch(3))
    # Another rank's patches have a chain of their own.
    apply_delta(tensors, patch(1, sender=1, chain="d", anchor=("b",)))
    refused(tensors, patch(2, name="b"), "is repeated: the tensors are at patch 3")


def test_full_comes_whole_and_in_order() -> None:
    def part(number: int, at: int = 7, of: int = 3, **link: Any) -> Patch:
        return patch(at, after=at, part=number, parts=of, **link)

    tensors = fresh()
    refused(tensors, part(1), "a part was lost or repeated")
    apply_delta(tensors, part(0))
    refused(tensors, patch(8), "have not followed")
    refused(tensors, part(2), "a part was lost or repeated")
    apply_delta(tensors, part(1))
    refused(tensors, part(1), "lost or repeated")
    refused(tensors, part(2, at=9), "all parts of one full")
    apply_delta(tensors, part(2))
    refused(tensors, patch(7), "repeated")
    refused(tensors, patch(9), "lost")
    apply_delta(tensors, patch(8))
    # Another stream takes the tensors over, all or nothing.
    refused(tensors, patch(1, stream="t", chain="e"), "have not followed")
    refused(tensors, patch(9, chain="e"), "have not followed")
    apply_delta(tensors, part(0, stream="t", chain="e", of=1))
    refused(tensors, patch(9), "have not followed")
    apply_delta(tensors, patch(8, stream="t", chain="e"))


def test_positions_stay_with_the_memory() -> None:
    model = nn.Linear(4, 3, bias=False, dtype=BF16)
    model.a = model.weight
    apply_delta(model.state_dict(), patch())
    with pytest.raises(DeltaError, match="repeated"):
        apply_delta(dict(model.named_parameters(remove_duplicate=False)), patch())
    apply_delta(model.state_dict(), patch(2))
    copied = {"a": model.weight.detach().clone()}
    with pytest.raises(DeltaError, match="have not followed"):
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


def same(a: Patch, b: Patch) -> bool:
    fields = ("name", "shape", "aliases", "link", "before")
    return all(getattr(a, f) == getattr(b, f) for f in fields) and all(
        x.dtype == y.dtype and torch.equal(x, y)
        for x, y in ((a.indices, b.indices), (a.values, b.values))
    )


PATCHES = [
    patch(1, aliases=("b",)),
    patch(2, indices=[5]),
    patch(3, indices=range(20, 300), shape=(300,), after=1),
    patch(4, indices=[0, 255, 510], shape=(600,)),
    patch(5, indices=[0, 256, 65_792, 65_793], shape=(10**6,)),
    patch(6, indices=[0, 2**16, 2**40], shape=(2**41,)),
    patch(7, indices=[0, 2**33], shape=(2**41,), part=1, parts=3, anchor=("a", "b")),
    patch(8, indices=[1, 2], values=torch.tensor([1 + 2j, 3], dtype=torch.complex128)),
    patch(9, indices=[1, 2], values=torch.tensor([True, False])),
    patch(10, name="ü.☃", indices=[3], values=torch.tensor([torch.nan])),
]
WIDTHS = [1, 0, 0, 1, 4, 8, 8, 0, 0, 0]


def test_patches_survive_packing_in_as_few_bytes_as_their_gaps_need() -> None:
    """Read as well with json and numpy alone, as docs/reference/delta_format.md says."""
    for given, width in zip(PATCHES, WIDTHS, strict=True):
        data = given.to_bytes()
        length, crc = struct.unpack_from("<II", data)
        end, numel = 8 + length, len(given.indices)
        assert crc == zlib.crc32(data[8:])
        name, _, _, _, first, *_ = head = json.loads(data[8:end])
        assert (name, head[5], head[6]) == (given.name, numel, width)
        gaps = np.frombuffer(data[end : end + width * (numel - 1)], f"<u{width or 1}")
        gaps = gaps.astype(np.int64) if width else np.ones(numel - 1, np.int64)
        assert [first, *(first + np.cumsum(gaps))] == given.indices.tolist()
        assert data[end + width * (numel - 1) :] == bytes(given.values.view(torch.uint8).numpy())
        found = Patch.from_bytes(data)
        assert same(found, given) or found.values.isnan().all()


def test_any_damage_of_a_packed_patch_is_found() -> None:
    data = PATCHES[4].to_bytes()
    damaged = [flipped(data, at) for at in range(len(data))]
    damaged += [data[:n] for n in range(len(data))] + [data + b"\0"]
    for each in damaged:
        with pytest.raises(DeltaError, match="damaged"):
            Patch.from_bytes(each)


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
