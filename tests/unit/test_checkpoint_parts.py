"""The parts of checkpoints that need no ranks: runs, boxes, checksums, heads, values, folders."""

import contextlib
import copy
import dataclasses
import itertools
import json
import math
import os
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from layerzero.checkpoint import CheckpointError
from layerzero.checkpoint.format import folder
from layerzero.checkpoint.format.crc import combine, placed
from layerzero.checkpoint.format.manifest import FileRecord, Manifest, check_file_name
from layerzero.checkpoint.format.safetensors_file import head_nbytes, make_head, parse_head
from layerzero.checkpoint.source import open_source
from layerzero.state_dict.dtype_names import DTYPES
from layerzero.state_dict.json_codec import decode, encode
from layerzero.state_dict.parameter_shard import RankLocal, rank_local
from layerzero.state_dict.ranges import Extent, boxes, runs
from tests.harness.recording import observed

WHOLES = [(), (1,), (7,), (4, 5), (1, 5), (3, 1), (2, 3, 4), (2, 1, 3, 2), (0, 3)]
BLOCKS = [
    Extent((6, 5), (2, 5), (4, 0)),
    Extent((6, 5), (6, 2), (0, 3)),
    Extent((6, 5), (3, 2), (2, 1)),
    Extent((3, 4, 5), (3, 2, 5), (0, 1, 0)),
    Extent((3, 4, 5), (2, 4, 3), (1, 0, 2)),
    Extent((7,), (3,), (4,)),
]
EXTENTS = [*map(Extent.whole, WHOLES), *BLOCKS]


@pytest.mark.parametrize("extent", EXTENTS, ids=str)
def test_runs_and_boxes_cover_every_range_once(extent: Extent) -> None:
    numel = math.prod(extent.local_shape)
    whole = torch.arange(math.prod(extent.shape)).view(extent.shape)
    ends = zip(extent.offsets, extent.local_shape, strict=True)
    block = whole[tuple(slice(at, at + size) for at, size in ends)].reshape(-1)
    for start, stop in itertools.combinations_with_replacement(range(numel + 1), 2):
        sharded_param = block[start:stop].tolist()
        by_run = [-1] * len(sharded_param)
        for run in runs(extent, start, stop):
            assert run.numel > 0
            by_run[run.local : run.local + run.numel] = range(run.start, run.start + run.numel)
        assert by_run == sharded_param
        by_box = [-1] * len(sharded_param)
        for box in boxes(extent, start, stop):
            ends = zip(box.offsets, box.sizes, strict=True)
            inside = whole[tuple(slice(at, at + size) for at, size in ends)].reshape(-1).tolist()
            by_box[box.local : box.local + len(inside)] = inside
        assert by_box == sharded_param


def test_checksums_of_parts_make_that_of_the_whole() -> None:
    generator = random.Random(0)
    data = generator.randbytes(100_003)
    cuts = [0, *sorted(generator.sample(range(1, len(data)), 60)), len(data)]
    parts = [data[begin:end] for begin, end in itertools.pairwise(cuts)]
    assert combine([zlib.crc32(part) for part in parts], list(map(len, parts))) == zlib.crc32(data)
    order = list(range(len(parts)))
    generator.shuffle(order)  # as ranks write them
    crcs = placed([zlib.crc32(parts[i]) for i in order], [len(data) - cuts[i + 1] for i in order])
    assert int(np.bitwise_xor.reduce(crcs)) == zlib.crc32(data)
    assert combine([], []) == zlib.crc32(b"") == 0
    assert combine([zlib.crc32(b""), zlib.crc32(b"a")], [0, 1]) == zlib.crc32(b"a")


def test_a_part_may_lie_terabytes_from_the_end() -> None:
    # The powers of x repeat after 2 ** 32 - 1 bits: the same rest, the same value.
    far, near = 3 + (2**32 - 1) * 1000, 3
    assert placed([0x12345678], [far]) == placed([0x12345678], [near])
    assert placed([0x12345678], [far + 1]) != placed([0x12345678], [near])


def test_a_head_is_read_back_as_it_was_planned() -> None:
    tensors = [(f"t.{name}", dtype, (2, 3)) for name, dtype in DTYPES.items()]
    tensors += [
        ("scalar", torch.float32, ()),
        ("empty", torch.int8, (0, 4)),
        ("ä", torch.bool, (1,)),
    ]
    tensors.sort(key=lambda each: -each[1].itemsize)
    head, planned = make_head(tensors, {"format": "pt"})
    nbytes = len(head) + sum(entry.nbytes for entry in planned.values())
    assert head_nbytes(head[:8], nbytes) == len(head)
    assert parse_head(head, nbytes) == (planned, {"format": "pt"})
    assert len(head) % 64 == 0
    assert all(entry.begin % entry.dtype.itemsize == 0 for entry in planned.values())


def _described(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        json.dumps({"a": 3}).encode(),
        json.dumps({"a": _described(dtype=["F32"])}).encode(),
        json.dumps({"a": _described(shape=[-2])}).encode(),
        json.dumps({"a": _described(shape=[2.0])}).encode(),
        json.dumps({"a": _described(data_offsets=[0, 4])}).encode(),
        json.dumps({"a": _described(), "b": _described()}).encode(),
        json.dumps({"a": _described(shape=[3], data_offsets=[0, 12])}).encode(),
        b"[" * 100_000,
    ],
)
def test_a_damaged_head_is_refused(header: bytes) -> None:
    with pytest.raises(ValueError, match="header"):
        parse_head(len(header).to_bytes(8, "little") + header, 8 + len(header) + 8)


def test_a_dtype_of_a_later_format_is_named(tmp_path: Path) -> None:
    header = json.dumps({"a": _described(dtype="F4")}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointError, match=r"model\.saf.* has the unsupported dtype F4; .* F64"):
        open_source(path)


def test_a_file_of_another_kind_is_refused() -> None:
    for start in (b"", b"\x80\x02\x63", b"\xff" * 8, (10**9).to_bytes(8, "little")):
        with pytest.raises(ValueError, match="not a safetensors file"):
            head_nbytes(start, 10**6)


VALUES = [
    None,
    True,
    3,
    -(2**70),
    0.1,
    float("inf"),
    "text",
    "$tuple",
    b"\x00\xff",
    1 + 2j,
    [1, [2, (3,)]],
    (),
    {"a": {"b": (1, 2)}},
    {1: "one", (2, 3): "pair", None: 0},
    {"$tensor": 1},
    {"$x": 1, "y": 2},
    {3, 1},
    torch.bfloat16,
]


def test_values_tensors_arrays_and_random_states_come_back_as_they_were() -> None:
    for value in VALUES:
        back = decode(json.loads(json.dumps(encode(value, "it"), allow_nan=False)))
        assert back == value and type(back) is type(value), repr(value)
    tensors = [
        torch.get_rng_state(),
        torch.tensor(1.5),
        torch.empty(0, 3),
        torch.ones(2, 2, dtype=torch.bfloat16).t(),
        torch.tensor([True, False]),
    ]
    for tensor, back in zip(
        tensors, decode(json.loads(json.dumps(encode(tensors, "it")))), strict=True
    ):
        assert torch.equal(tensor, back)
        assert tensor.dtype == back.dtype
        back.zero_()  # writable
    state = (random.getstate(), np.random.default_rng(0).bit_generator.state, np.random.get_state())
    back = decode(json.loads(json.dumps(encode(state, "it"))))
    random.setstate(back[0])
    generator = np.random.default_rng(1)
    generator.bit_generator.state = back[1]
    assert generator.random() == np.random.default_rng(0).random()
    assert (back[2][1] == state[2][1]).all()
    assert math.isnan(decode(json.loads(json.dumps(encode(math.nan, "it")))))


def test_what_needs_pickle_or_is_large_is_refused_by_name() -> None:
    for value in (object(), {"a": [lambda: 0]}, torch.empty(1 << 25, dtype=torch.int8)):
        with pytest.raises(CheckpointError, match="extra"):
            encode(value, "extra")


def _manifest() -> Manifest:
    return Manifest(
        step=3, world_size=2, files={"a": FileRecord(1, 2)}, tensors={"model": {"w": 5}}
    )


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: (v,), lambda v: {"7": v}])
def test_values_as_deep_as_a_save_takes_them_load(wrap: Callable[[object], object]) -> None:
    def saved(value: object) -> bytes:
        return dataclasses.replace(_manifest(), extras=[encode(value, "it")]).to_bytes()

    values: list[object] = [0]
    with contextlib.suppress(RecursionError):
        while saved(values[-1]):
            values.append(wrap(values[-1]))
    assert len(values) > 100
    found = decode(Manifest.from_bytes(saved(values[-2]), "here").extras[0])
    assert repr(found) == repr(values[-2])


def test_every_flipped_bit_of_a_manifest_is_noticed() -> None:
    text = _manifest().to_bytes()
    assert json.loads(text)["step"] == 3  # ordinary JSON
    assert Manifest.from_bytes(text, "here") == _manifest()
    for bit in range(8 * len(text)):
        damaged = bytearray(text)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointError, match="here: damaged"):
            Manifest.from_bytes(bytes(damaged), "here")
    for nbytes in range(len(text)):
        with pytest.raises(CheckpointError, match="here: damaged"):
            Manifest.from_bytes(text[:nbytes], "here")


def test_a_file_elsewhere_or_of_another_kind_is_never_opened() -> None:
    for name in ("../w.safetensors", "/etc/w.json", "pytorch_model.bin", "a/b.json", ""):
        with pytest.raises(CheckpointError, match="names a file"):
            check_file_name(name, Path("index.json"))


def _committed(root: Path, step: int | None, content: str = "") -> Path:
    _, partial = folder.prepare(root, step)
    (partial / folder.MANIFEST).write_text(content)
    return folder.commit(partial)


def test_the_latest_commit_is_found_and_old_ones_go(tmp_path: Path) -> None:
    for step in (5, None, 20):
        _committed(tmp_path, step)
    assert list(folder.committed_steps(tmp_path)) == [5, 6, 20]
    assert (tmp_path / "latest").read_text() == "step-00000020\n"
    back = _committed(tmp_path, 6, "again")  # went back to an earlier step
    assert folder.resolve(tmp_path) == back
    assert (back / folder.MANIFEST).read_text() == "again"
    folder.prune(tmp_path, 2, back)
    assert list(folder.committed_steps(tmp_path)) == [6, 20]
    folder.prune(tmp_path, 1, back)
    assert list(folder.committed_steps(tmp_path)) == [6]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000006"]


def test_names_of_new_folders_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(folder, "sync_folder", synced.append)
    root = tmp_path / "runs" / "a"
    with folder.locked(root):
        assert set(synced) == {tmp_path, tmp_path / "runs"}
        folder.prepare(root, 0)
    assert len(synced) == 2, "what was there before is not synced again"


def test_a_folder_of_ours_without_a_manifest_is_no_folder_of_weights(tmp_path: Path) -> None:
    """A save begins with heads and full lengths: its files look whole, with zeros for values."""
    weights = tmp_path / "weights"
    weights.mkdir()
    head, entries = make_head([("w", torch.float32, (3,))], {})
    folder.write_durably(weights / "model.safetensors", head, entries["w"].end)
    assert list(open_source(weights).tensors["model"]) == ["w"]
    for state in ("writing", "replaced", "removed"):
        weights = weights.rename(tmp_path / f".{state}-step-00000002")
        with pytest.raises(CheckpointError, match=r"has no checkpoint\.json: its save or removal"):
            open_source(weights)


def test_a_checkpoint_that_was_being_replaced_is_still_found(tmp_path: Path) -> None:
    path = _committed(tmp_path, 1, "old")
    _, partial = folder.prepare(tmp_path, 1)

    def kill(old: Path, new: Path) -> None:
        if old == partial:
            raise KeyboardInterrupt  # Between the two renames.

    with observed(os, "rename", kill), pytest.raises(KeyboardInterrupt):
        folder.commit(partial)
    assert (folder.resolve(tmp_path) / folder.MANIFEST).read_text() == "old"
    folder.prepare(tmp_path, 2)
    assert (path / folder.MANIFEST).read_text() == "old"


def test_a_place_without_a_checkpoint_is_refused_with_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        folder.resolve(tmp_path / "nowhere")
    for name, content, text in (
        ("weights.pt", "", r"found weights\.pt$"),
        (".metadata", "", r"load that by torch\.distributed\.checkpoint"),
        ("latest", "../elsewhere", "expected a name such as"),
        ("latest", "step-00000009", "names step-00000009, which does not exist"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(CheckpointError, match=text):
            folder.resolve(tmp_path)


def test_a_copy_of_a_tensor_of_one_rank_is_one_too() -> None:
    moment = rank_local(torch.ones(2), "a moment")
    copied = copy.deepcopy({"moment": moment, "same": moment})
    assert isinstance(copied["moment"], RankLocal) and copied["moment"].what == "a moment"
    assert copied["moment"] is copied["same"]
    moment.plain().zero_()
    assert torch.equal(copied["moment"].plain(), torch.ones(2))
