"""Patches: applied in place or refused; packed; in files, of which nothing half-written is read."""

import dataclasses
import json
import os
import pickle
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from layerzero.checkpoint import CheckpointError, DeltaError, Patch, apply_delta
from layerzero.checkpoint.delta.patch import Link

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from delta_folder import DeltaReader, framed, replace

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
        apply_delta({}, {})
    with pytest.raises(TypeError, match="'a' is no tensor, but list"):
        apply_delta({"a": [0.0] * 12}, patch())


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


STREAM = "0123456789ab"


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


def head_of(data: bytes) -> tuple[list[Any], int]:
    """The head of a packed patch, and where it ends; as docs/reference/delta_format.md says."""
    length, crc = struct.unpack_from("<II", data)
    assert crc == zlib.crc32(data[8:])
    return json.loads(data[8 : 8 + length]), 8 + length


def with_head(data: bytes, head: bytes) -> bytes:
    """The packed patch with another head, and the checksum that fits."""
    body = head + data[head_of(data)[1] :]
    return struct.pack("<II", len(head), zlib.crc32(body)) + body


def test_patches_survive_packing_in_as_few_bytes_as_their_gaps_need() -> None:
    for given, width in zip(PATCHES, WIDTHS, strict=True):
        data = given.to_bytes()
        head, end = head_of(data)
        assert head[6] == width
        assert len(data) - end == width * (len(given.indices) - 1) + given.values.nbytes
        found = Patch.from_bytes(data)
        assert same(found, given) or found.values.isnan().all()


@pytest.mark.parametrize(
    ("at", "forged"),
    [
        (4, 1 << 63),
        (5, 10**40),
        (5, 3),
        (2, [1 << 62, 1 << 62]),
        (2, [1] * 65),
        (3, "F4"),
        (7, 1 << 70),
        (1, "ab"),
        (8, ["s", "c", 0, ["a"], 1, -1, 0, 0]),
        (8, ["s", "c", 0, ["a"], True, 0, 0, 0]),
        (8, ["s", "c", 0, "a", 1, 0, 0, 0]),
        (8, ["s", "c"]),
    ],
    ids=str,
)
def test_a_forged_head_is_refused(at: int, forged: Any) -> None:
    data = PATCHES[0].to_bytes()
    head, _ = head_of(data)
    assert same(Patch.from_bytes(with_head(data, json.dumps(head).encode())), PATCHES[0])
    head[at] = forged
    with pytest.raises(DeltaError, match="no packed patch"):
        Patch.from_bytes(with_head(data, json.dumps(head).encode()))


@pytest.mark.parametrize("share", [0.001, 0.01, 0.02, 0.03])
def test_packed_bytes_are_few(share: float) -> None:
    chosen = torch.rand(10**6) < share
    given = patch(1, indices=chosen.nonzero().view(-1).tolist(), shape=(10**6,))
    assert len(given.to_bytes()) <= 4 * share * 1.1 / 2 * 2 * 10**6


def test_any_damage_of_a_packed_patch_is_found() -> None:
    data = PATCHES[4].to_bytes()
    damaged = [flipped(data, at) for at in range(len(data))]
    damaged += [data[:n] for n in range(len(data))] + [data + b"\0"]
    for each in damaged:
        with pytest.raises(DeltaError, match="damaged"):
            Patch.from_bytes(each)


def test_a_packed_patch_can_be_read_with_json_and_numpy_alone() -> None:
    for given in PATCHES[:5]:
        data = given.to_bytes()
        (name, _, _, dtype, first, numel, width, *_), end = head_of(data)
        gaps = data[end : end + width * (numel - 1)]
        steps_ = np.frombuffer(gaps, f"<u{width}") if width else np.ones(numel - 1, np.int64)
        indices = np.concatenate([[first], first + np.cumsum(steps_.astype(np.int64))])
        assert indices.tolist() == given.indices.tolist() and (name, dtype) == ("a", "BF16")
        assert data[end + len(gaps) :] == given.values.view(torch.uint8).numpy().tobytes()


def link(number: int, sender: int = 0, **options: Any) -> Patch:
    return patch(number, stream=STREAM, sender=sender, chain=f"c{sender}", **options)


def write(root: Path, step: int, kind: str, sender: int, patches: list[Patch]) -> Path:
    folder = root / STREAM
    folder.mkdir(parents=True, exist_ok=True)
    rank = f"r{sender:05d}-of-00002"
    path = folder / f"{step:010d}-{kind}-{rank}"
    replace(path, framed(patches), rank)
    replace(root / "current", [STREAM.encode()], rank)
    return path


def steps(root: Path) -> None:
    """full() after step 3 from two ranks, then steps 4 and 5; rank 1 has not finished step 5."""
    for sender in (0, 1):
        parts = [
            link(7, sender, after=7, indices=range(at, at + 3), part=part, parts=2)
            for part, at in enumerate((6 * sender, 6 * sender + 3))
        ]
        write(root, 3, "full", sender, parts)
        write(root, 4, "changes", sender, [link(8, sender, indices=[6 * sender])])
    write(root, 5, "changes", 0, [link(9, indices=[1]), link(10, indices=[2])])


def test_a_step_is_read_once_all_ranks_have_written_it(tmp_path: Path) -> None:
    reader, tensors = DeltaReader(tmp_path / "root"), fresh()
    assert reader.apply(tensors) is None, "nothing is there yet"
    steps(tmp_path / "root")
    assert reader.apply(tensors) == reader.step == 4
    assert tensors["a"].flatten()[[0, 1, 2, 6]].tolist() == [8, 14, 21, 8]
    assert reader.apply(tensors) is None
    write(tmp_path / "root", 6, "changes", 0, [])
    assert reader.apply(tensors) is None
    write(tmp_path / "root", 6, "changes", 1, [])  # nothing changed there; step 5 failed
    assert reader.apply(tensors) == 6
    assert tensors["a"].flatten()[[1, 2]].tolist() == [9, 10]
    late = fresh()
    assert DeltaReader(tmp_path / "root").apply(late) == 6
    assert torch.equal(late["a"], tensors["a"])
    assert reader.apply(late, from_full=True) == 6


def test_a_half_written_file_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps(tmp_path)

    def fails(_: int) -> None:
        raise OSError("no space left")

    before = sorted(os.listdir(tmp_path / STREAM))
    with monkeypatch.context() as patched, pytest.raises(OSError, match="no space"):
        patched.setattr(os, "fsync", fails)
        write(tmp_path, 5, "changes", 1, [link(9, 1, indices=[7])])
    assert sorted(os.listdir(tmp_path / STREAM)) == before
    # A process that was killed leaves the hidden file.
    (tmp_path / STREAM / ".writing-0000000005-changes-r00001-of-00002").write_bytes(b"")
    assert DeltaReader(tmp_path).apply(fresh()) == 4


def test_any_damage_is_found_before_anything_is_written(tmp_path: Path) -> None:
    steps(tmp_path)
    paths = sorted((tmp_path / STREAM).glob("*00000[34]-*"))
    for path in (paths[0], paths[-1]):
        whole = path.read_bytes()
        for damaged in (
            *(flipped(whole, at) for at in range(0, len(whole), 7)),
            *(whole[:n] for n in (7, 8, 60, len(whole) - 1)),
            whole + b"\0",
        ):
            path.write_bytes(damaged)
            tensors = fresh()
            with pytest.raises(DeltaError, match=path.name):
                DeltaReader(tmp_path).apply(tensors)
            assert not tensors["a"].any(), "something was written"
        path.write_bytes(whole)
    assert DeltaReader(tmp_path).apply(fresh()) == 4


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


def test_links_and_ways_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    steps(root)
    victim = next((root / STREAM).glob("*4-changes-r00001*"))
    moved = tmp_path / "elsewhere"
    victim.rename(moved)
    victim.symlink_to(moved)
    with pytest.raises(DeltaError, match=f"{victim.name}: .*symbolic link"):
        DeltaReader(root).apply(fresh())
    victim.unlink()
    os.mkfifo(victim)
    with pytest.raises(DeltaError, match="no regular file"):
        DeltaReader(root).apply(fresh())
    victim.unlink()
    moved.rename(victim)
    for name in ("../root", "..", "/etc", "", f"{STREAM}/.."):
        (root / "current").write_text(name)
        with pytest.raises(DeltaError, match="which is no stream"):
            DeltaReader(root).apply(fresh())
    (root / "current").unlink()
    (root / "current").symlink_to(victim)
    with pytest.raises(DeltaError, match="symbolic link"):
        DeltaReader(root).apply(fresh())
    (root / "current").unlink()
    (root / "current").write_text(STREAM)
    (root / STREAM).rename(tmp_path / STREAM)
    (root / STREAM).symlink_to(tmp_path / STREAM)
    with pytest.raises(DeltaError, match="symbolic link"):
        DeltaReader(root).apply(fresh())


def test_files_of_other_ranks_or_streams_under_a_name_are_refused(tmp_path: Path) -> None:
    steps(tmp_path)
    write(tmp_path, 5, "changes", 1, [link(9, 0)])
    with pytest.raises(DeltaError, match=r"r00001-of-00002: has .*rank 0"):
        DeltaReader(tmp_path).apply(fresh())
