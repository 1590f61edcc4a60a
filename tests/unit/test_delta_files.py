"""Packed patches, and examples/delta_folder.py: nothing half-written, damaged or a link is read."""

from __future__ import annotations

import json
import os
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from layerzero.checkpoint import DeltaError, Patch
from tests.unit.test_delta_receiver import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from delta_folder import DeltaReader, framed, replace

BF16 = torch.bfloat16
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


def fresh() -> dict[str, Tensor]:
    return {"a": torch.zeros(3, 4, dtype=BF16)}


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
