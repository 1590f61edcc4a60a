"""Packed patches: what is written is read, and nothing that is half-written, damaged or a link."""

from __future__ import annotations

import json
import os
import zlib
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

from layerzero.checkpoint import (
    DeltaError,
    DeltaReader,
    Patch,
    receive_patches,
    send_patches,
    vllm_patch,
)
from layerzero.checkpoint.delta import folder_file
from layerzero.checkpoint.delta.folder_names import DeltaFile, set_current
from layerzero.checkpoint.delta.packing import chain_of, pack, row_of, unpack
from tests.unit.test_delta_receiver import patch

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


def test_patches_survive_packing_in_as_few_bytes_as_their_gaps_need() -> None:
    for given, width in zip(PATCHES, WIDTHS, strict=True):
        row, data = pack(given)
        assert row.width == width
        assert len(data) == width * (len(given.indices) - 1) + given.values.nbytes
        found = unpack(row_of(json.loads(json.dumps(row))), chain_of(given), memoryview(data))
        assert same(found, given) or found.values.isnan().all()


@pytest.mark.parametrize(
    "forged",
    [
        {"first": 1 << 63},
        {"numel": 10**40},
        {"shape": [1 << 62, 1 << 62]},
        {"shape": [1] * 65},
        {"after": -1},
        {"before": 1 << 70},
        {"aliases": "ab"},
        {"number": True},
    ],
    ids=str,
)
def test_a_forged_row_is_none(forged: dict[str, Any]) -> None:
    row, _ = pack(PATCHES[0])
    assert row_of(list(row)) == row
    with pytest.raises(ValueError, match="not the row of a patch"):
        row_of(list(row._replace(**forged)))


@pytest.mark.parametrize("share", [0.001, 0.01, 0.02, 0.03])
def test_packed_bytes_are_few(share: float) -> None:
    chosen = torch.rand(10**6) < share
    given = patch(1, indices=chosen.nonzero().view(-1).tolist(), shape=(10**6,))
    row, data = pack(given)
    assert len(data) + len(json.dumps(row)) <= 4 * share * 1.1 / 2 * 2 * 10**6


def test_a_pipe_carries_a_round() -> None:
    ours, theirs = Pipe()
    nbytes = send_patches(iter(PATCHES[:6]), ours)
    send_patches([], ours)
    assert [p.link.number for p in receive_patches(theirs)] == [1, 2, 3, 4, 5, 6]
    assert not list(receive_patches(theirs)) and nbytes > 500
    ours.send_bytes(b"E[3]")
    with pytest.raises(DeltaError, match="0 patches arrived of 3"):
        list(receive_patches(theirs))
    for message in (b"", b"P", b"X[]", b"C[1]", b"C", b"E", b"E[[", b'C["a","b","c",["d"]]'):
        ours.send_bytes(message)
        with pytest.raises(DeltaError, match="damaged message"):
            list(receive_patches(theirs))
    ours.close()
    with pytest.raises(EOFError):
        list(receive_patches(theirs))


def test_a_damaged_message_is_refused() -> None:
    sent: list[bytes] = []

    class Wire:
        def send_bytes(self, buf: bytes, /) -> None:
            sent.append(bytes(buf))

        def recv_bytes(self) -> bytes:
            return sent.pop(0)

    send_patches(PATCHES[4:5], Wire())
    for at in range(1, len(sent[1])):
        damaged = bytearray(sent[1])
        damaged[at] ^= 1
        kept = list(sent)
        sent[1] = bytes(damaged)
        try:
            (found,) = receive_patches(Wire())
        except DeltaError:
            pass
        else:  # A bit of the name, a number of the chain: no bytes of indices or values.
            assert torch.equal(found.values, PATCHES[4].values)
        sent[:] = kept


def link(number: int, sender: int = 0, **options: Any) -> Patch:
    return patch(number, stream=STREAM, sender=sender, chain=f"c{sender}", **options)


def write(root: Path, step: int, kind: str, sender: int, patches: list[Patch], **name: Any) -> Path:
    folder = root / STREAM
    folder.mkdir(parents=True, exist_ok=True)
    set_current(root, STREAM, sender)
    file = DeltaFile(step, kind, sender, name.get("part", 0), name.get("is_last", True))
    path = folder / file.name
    chain = chain_of(patches[0]) if patches else None
    folder_file.write_file(path, [pack(each) for each in patches], chain, [0, 1])
    return path


def fresh() -> dict[str, Tensor]:
    return {"a": torch.zeros(3, 4, dtype=BF16)}


def steps(root: Path) -> None:
    """full() after step 3 from two ranks, then steps 4 and 5; rank 1 has not finished step 5."""
    for sender in (0, 1):
        for part in (0, 1):
            places = range(6 * sender + 3 * part, 6 * sender + 3 * part + 3)
            full = link(7, sender, after=7, indices=places, part=part, parts=2)
            write(root, 3, "full", sender, [full], part=part, is_last=part == 1)
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

    def fails(path: Path, data: bytes) -> None:
        path.write_bytes(data[: len(data) // 2])
        raise OSError("no space left")

    before = sorted(os.listdir(tmp_path / STREAM))
    monkeypatch.setattr(folder_file, "write_durably", fails)
    with pytest.raises(OSError, match="no space"):
        write(tmp_path, 5, "changes", 1, [link(9, 1, indices=[7])])
    assert sorted(os.listdir(tmp_path / STREAM)) == before
    # A process that was killed leaves the hidden file.
    (tmp_path / STREAM / f"{folder_file.HIDDEN}0000000005-changes-r00001-0000.last").write_bytes(
        b""
    )
    assert DeltaReader(tmp_path).apply(fresh()) == 4


def test_any_damage_is_found_before_anything_is_written(tmp_path: Path) -> None:
    steps(tmp_path)
    paths = sorted((tmp_path / STREAM).glob("*00000[34]-*"))
    for path in (paths[0], paths[-1]):
        whole = path.read_bytes()
        for damaged in (
            *(flipped(whole, at) for at in range(0, len(whole), 7)),
            *(whole[:n] for n in (0, 7, 8, 100, len(whole) - 1)),
            whole + b"\0",
        ):
            path.write_bytes(damaged)
            tensors = fresh()
            try:
                DeltaReader(tmp_path).apply(tensors)
            except DeltaError as error:
                assert path.name in str(error)
                assert not tensors["a"].any(), "something was written"
            else:  # Spaces behind the header.
                assert damaged[:8] == whole[:8] and whole.find(b"   ") > 0
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
        with pytest.raises(DeltaError, match="expected the name of a stream"):
            DeltaReader(root).apply(fresh())
    (root / "current").unlink()
    (root / "current").symlink_to(victim)
    with pytest.raises(DeltaError, match="symbolic link"):
        DeltaReader(root).apply(fresh())
    (root / "current").unlink()
    set_current(root, STREAM, 0)
    (root / STREAM).rename(tmp_path / STREAM)
    (root / STREAM).symlink_to(tmp_path / STREAM)
    with pytest.raises(DeltaError, match="symbolic link"):
        DeltaReader(root).apply(fresh())


def test_files_of_other_ranks_or_streams_under_a_name_are_refused(tmp_path: Path) -> None:
    steps(tmp_path)
    path = write(tmp_path, 5, "changes", 1, [link(9, 0)])
    with pytest.raises(DeltaError, match=r"r00001-0000.last.* has patches of rank 0"):
        DeltaReader(tmp_path).apply(fresh())
    path.unlink()
    with pytest.raises(FileExistsError, match="every step is written once"):
        write(tmp_path, 4, "changes", 1, [link(8, 1)])
    (tmp_path / STREAM / "0000000003-full-r00001-0000.safetensors").unlink()
    with pytest.raises(DeltaError, match=r"full of step 3, rank 1: has parts \[1\]"):
        DeltaReader(tmp_path).apply(fresh())


def test_the_file_can_be_read_with_safetensors_and_numpy_alone(tmp_path: Path) -> None:
    """As docs/reference/delta_format.md describes it."""
    given = [link(1, indices=[1, 4, 9]), link(2, indices=range(2, 6))]
    path = write(tmp_path, 1, "changes", 0, given)
    tensors = safetensors.torch.load_file(path)
    with safetensors.safe_open(path, "pt") as opened:
        metadata = opened.metadata()
    gaps, values = (tensors[name].numpy().tobytes() for name in ("gaps", "values"))
    for row, patch_ in zip(json.loads(metadata["patches"]), given, strict=True):
        name, _, _, dtype, first, numel, width, crc = row[:8]
        own, gaps = gaps[: width * (numel - 1)], gaps[width * (numel - 1) :]
        mine, values = values[: 2 * numel], values[2 * numel :]
        assert zlib.crc32(own + mine) == crc and dtype == "BF16" and name == "a"
        steps_ = np.frombuffer(own, f"<u{width}") if width else np.ones(numel - 1, np.int64)
        indices = np.concatenate([[first], first + np.cumsum(steps_.astype(np.int64))])
        assert indices.tolist() == patch_.indices.tolist()
        assert mine == patch_.values.view(torch.uint8).numpy().tobytes()
    assert not gaps and not values


def test_vllm_takes_names_and_32_bit_flat_indices() -> None:
    name, indices, values = vllm_patch(PATCHES[0], lambda name: f"model.{name}")
    assert name == "model.a" and indices.dtype == torch.int32 and indices.tolist() == [1, 7]
    assert torch.equal(values, PATCHES[0].values) and vllm_patch(PATCHES[0]).name == "a"
    with pytest.raises(DeltaError, match="32-bit"):
        vllm_patch(PATCHES[5])
