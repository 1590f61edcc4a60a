"""Sinks of a DeltaStream on real ranks, as in the examples: a folder, and a wire that breaks."""

from __future__ import annotations

import os
import sys
import threading
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from layerzero import ZeRO3
from layerzero.checkpoint import DeltaError, DeltaStream, apply_delta
from tests.distributed.test_delta import expected
from tests.harness.checks import assert_bitwise
from tests.harness.models import Block, Mlp
from tests.harness.ranks import KeptRanks, on_ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from delta_folder import DeltaReader, DeltaWriter
from sync_weights import receive_patches, send_patches

Tensors = dict[str, torch.Tensor]


def model_and_stream(width: int = 5, **options: Any) -> tuple[ZeRO3, DeltaStream]:
    torch.manual_seed(0)
    model = ZeRO3(Mlp(width=width), auto_wrap_policy={Block})
    return model, DeltaStream(model, **options)


def change(model: ZeRO3, share: float = 0.3) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            chosen = torch.rand(parameter.shape, generator=generator) < share
            parameter[chosen] *= 1.5


def zeros_like(tensors: Tensors) -> Tensors:
    return {name: torch.zeros_like(value) for name, value in tensors.items()}


def check(tensors: Tensors, model: ZeRO3, what: str) -> None:
    for name, value in expected(model).items():
        assert_bitwise(tensors[name], value, f"{what}: {name}")


def _folder(root: str) -> None:
    fsync = os.fsync
    os.fsync = lambda _: None  # type: ignore[assignment]  # Disks differ; not what is tested here.
    model, stream = model_and_stream()
    writer = DeltaWriter(root, stream)
    reader, tensors = DeltaReader(root), zeros_like(expected(model))
    begun = expected(model)  # with the weights of the start: no full()
    follower = DeltaReader(root)

    def everyone_read(step: int | None, what: str) -> None:
        dist.barrier()
        assert reader.apply(tensors) == step
        check(tensors, model, what)
        dist.barrier()

    change(model)
    writer.write(1)
    dist.barrier()
    assert follower.apply(begun) == 1
    check(begun, model, "without full()")
    dist.barrier()
    writer.write_full(1)
    everyone_read(1, "full")
    for step in (2, 5):
        change(model)
        writer.write(step)
        everyone_read(step, f"step {step}")
    with pytest.raises(DeltaError, match="changes of step 5 is there; steps rise"):
        writer.write(5)
    # One rank fails: its round is repeated as a whole, and nobody reads a step of some ranks.
    change(model)
    if dist.get_rank() == 1:

        def fails(_: int) -> None:
            raise OSError("no space left on device")

        works, os.fsync = os.fsync, fails  # type: ignore[assignment]
        with pytest.raises(OSError, match="no space"):
            writer.write(6)
        os.fsync = works
    else:
        writer.write(6)
    dist.barrier()
    before = {name: value.clone() for name, value in tensors.items()}
    assert reader.apply(tensors) is None
    assert all(torch.equal(before[name], value) for name, value in tensors.items())
    dist.barrier()
    change(model)
    writer.write(7)
    everyone_read(7, "after a failure")
    assert follower.apply(begun) == 7
    check(begun, model, "follower")
    writer.write_full(7)
    writer.prune(7)
    dist.barrier()
    late = zeros_like(tensors)
    assert DeltaReader(root).apply(late) == 7
    check(late, model, "pruned")
    dist.barrier()
    # A resumed run has another stream, and readers begin with its full().
    stream = DeltaStream(model)
    writer = DeltaWriter(root, stream)
    change(model)
    writer.write_full(0)
    everyone_read(0, "another stream")
    change(model)
    writer.write(1)
    everyone_read(1, "another stream, step 1")
    os.fsync = fsync


def test_readers_of_a_folder_hold_what_the_model_has(tmp_path: Path, ranks: KeptRanks) -> None:
    ranks(2, _folder, str(tmp_path / "deep" / "root"))


@on_ranks(2)
def test_a_folder_takes_few_bytes(tmp_path: Path) -> None:
    model, stream = model_and_stream(width=400, patch_bytes="1MB")
    full = sum(2 * value.numel() for value in expected(model).values())
    writer = DeltaWriter(tmp_path, stream)
    for share in (0.02, 0.02):
        change(model, share)
        written = writer.write(stream.round + 1)
        on_disk = sum(
            os.path.getsize(os.path.join(folder, name))
            for folder, _, names in os.walk(tmp_path)
            for name in names
            if f"r{dist.get_rank():05d}" in name and name.startswith(f"{stream.round:010d}")
        )
        assert written == on_disk
        total = torch.tensor([written])
        dist.all_reduce(total)
        assert 0.03 * full < total.item() <= 0.08 * full


@on_ranks(1)
def test_a_broken_wire_interrupts_the_round(tmp_path: Path) -> None:
    """The consumer closes in the middle: the round is interrupted, and the next one repeats it."""
    model, stream = model_and_stream(patch_bytes=50)
    tensors = zeros_like(expected(model))
    for patch in stream.full():
        apply_delta(tensors, patch)
    change(model)
    with Listener(f"{tmp_path}/s", "AF_UNIX") as listener:
        wires: list[Any] = []
        thread = threading.Thread(target=lambda: wires.append(Client(f"{tmp_path}/s", "AF_UNIX")))
        thread.start()
        sender = listener.accept()
        thread.join()

        class Breaks:
            sent = 0

            def send_bytes(self, buf: bytes, /) -> None:
                self.sent += 1
                if self.sent == 5:
                    sender.close()
                sender.send_bytes(buf)

            def recv_bytes(self) -> bytes:
                raise AssertionError

        with pytest.raises(OSError, match="closed"):
            send_patches(stream.changes(), Breaks())
        with pytest.raises(EOFError):
            for patch in receive_patches(wires[0]):
                apply_delta(tensors, patch)
    for patch in stream.changes():
        apply_delta(tensors, patch)
    check(tensors, model, "after a broken wire")
