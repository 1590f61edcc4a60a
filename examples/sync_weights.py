"""See another process generate text with the weights of two ranks while these train.

    python examples/sync_weights.py --steps 20 --picture out/sync_weights.png

    rank 0: step | changes of its shard ---.        .--- apply | generate | apply | generate
    rank 1: step | changes of its shard ----+ TCP --+    (the consumer, in bfloat16, without a
                                                         process group)

The text is this repository's documentation and the learning rate one of reinforcement learning, at
which a few percent of the bfloat16 weights change in a step. The consumer applies a round between
two of its texts, once it has arrived from both ranks. At the end it must hold the bits of the
trainer's weights. The picture shows bytes and seconds of each round beside those of full weights.
"""

import argparse
import hashlib
import json
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from lm_model import Block, ByteTransformer
from torch import Tensor, nn

from layerzero import ZeRO3
from layerzero.checkpoint import DeltaStream, Patch, apply_delta, stream_full

RANKS = 2
DOCS = Path(__file__).resolve().parents[1] / "docs"
COLOURS = ("#8172b3", "#64b5cd", "#ccb974")


def make_model(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    return ByteTransformer(options.layers, options.width, options.seq)


def digest(tensors: dict[str, Tensor]) -> str:
    """Of the names and bits."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(tensors[name].detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


# A channel is anything with send_bytes and recv_bytes that keeps messages whole and in order ----


def send_patches(patches: Iterable[Patch], channel: Connection) -> int:
    """Send a round, one message for each patch and an empty one at the end; returns its bytes."""
    nbytes = 0
    for patch in patches:  # A patch counts as sent when the next one is asked for.
        data = patch.to_bytes()
        channel.send_bytes(data)
        nbytes += len(data)
    channel.send_bytes(b"")
    return nbytes


def receive_patches(channel: Connection) -> Iterator[Patch]:
    """Yield the patches of a round as they arrive."""
    while message := channel.recv_bytes():
        yield Patch.from_bytes(message)


def train(rank: int, options: argparse.Namespace, address: Any, key: bytes, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    model = ZeRO3(make_model(options), auto_wrap_policy={Block})
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    stream = DeltaStream(model, dtype=torch.bfloat16)
    text = b"".join(page.read_bytes() for page in sorted(DOCS.rglob("*.md")))
    corpus = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(rank)
    rounds = []
    with Client(address, authkey=key) as channel:
        channel.send_bytes(b"full")
        send_patches(stream.full(), channel)
        for _ in range(options.steps):
            begins = torch.randint(len(corpus) - options.seq - 1, (4,), generator=generator)
            rows = torch.stack([corpus[at : at + options.seq + 1].long() for at in begins])
            logits = model(rows[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()

            dist.barrier()  # so that the times are those of this work alone
            begin = time.perf_counter()
            nbytes = send_patches(stream.changes(), channel)
            seconds = time.perf_counter() - begin
            begin = time.perf_counter()
            full = {n: t.clone() for n, t in stream_full(model, dtype=torch.bfloat16)}
            full_seconds = time.perf_counter() - begin
            rounds.append(
                {
                    "bytes": nbytes,
                    "seconds": seconds,
                    "full_bytes": sum(tensor.nbytes for tensor in full.values()),
                    "full_seconds": full_seconds,
                }
            )
        end = {"rounds": rounds, "digest": digest(full)}
        channel.send_bytes(json.dumps(end).encode())
    dist.destroy_process_group()


def receive(channel: Connection, rounds: Queue, ends: Queue, options: argparse.Namespace) -> None:
    """Take the rounds of one rank from its connection, in a thread."""
    assert channel.recv_bytes() == b"full"
    for _ in range(1 + options.steps):
        rounds.put(list(receive_patches(channel)))
    ends.put(json.loads(channel.recv_bytes()))


@torch.no_grad()
def generate(model: nn.Module, options: argparse.Namespace) -> str:
    """Continue a prompt by its most likely bytes."""
    tokens = torch.tensor([list(b"A unit is ")])
    for _ in range(options.tokens):
        logits = model(tokens[:, -options.seq :])
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def consume(options: argparse.Namespace, key: bytes, parent: Connection) -> None:
    torch.set_num_threads(1)
    assert not dist.is_initialized()
    model = make_model(options).bfloat16()
    tensors = dict(model.named_parameters())
    ends: Queue = Queue()
    arrived: list[Queue[list[Patch]]] = [Queue() for _ in range(RANKS)]
    with Listener(("localhost", 0), authkey=key) as listener:
        parent.send(listener.address)
        for rounds in arrived:
            receiver = threading.Thread(
                target=receive, args=(listener.accept(), rounds, ends, options), daemon=True
            )
            receiver.start()
    applied, texts, apply_seconds = 0, 0, []
    while applied <= options.steps:
        if applied:  # The round of full() came.
            sample = generate(model, options)
            texts += 1
        try:
            parts = [rounds.get(timeout=60 if not applied else 0.05) for rounds in arrived[:1]]
        except Empty:
            continue
        parts += [rounds.get(timeout=60) for rounds in arrived[1:]]
        begin = time.perf_counter()
        for part in parts:
            for patch in part:
                apply_delta(tensors, patch)
        apply_seconds.append(time.perf_counter() - begin)
        applied += 1
    trainers = [ends.get(timeout=60) for _ in range(RANKS)]
    parent.send(
        {
            "rounds": [
                {
                    "bytes": sum(each["bytes"] for each in ranks),
                    "full_bytes": ranks[0]["full_bytes"],
                    "seconds": max(each["seconds"] for each in ranks),
                    "full_seconds": max(each["full_seconds"] for each in ranks),
                    "apply_seconds": took,
                }
                for ranks, took in zip(
                    zip(*(trainer["rounds"] for trainer in trainers), strict=True),
                    apply_seconds[1:],
                    strict=True,
                )
            ],
            "equal": all(trainer["digest"] == digest(tensors) for trainer in trainers),
            "texts": texts,
            "sample": sample,
        }
    )


def draw(rounds: list[dict[str, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["font.size"] = 11
    figure, axes = plt.subplots(2, figsize=(7, 5.4), dpi=150, layout="constrained", sharex=True)
    steps = range(1, len(rounds) + 1)
    panels = [
        ("bytes", 1e6, "MB a round", {"full_bytes": "full weights", "bytes": "patches"}),
        (
            "seconds",
            1e-3,
            "ms a round",
            {
                "full_seconds": "gather full weights",
                "seconds": "compare, pack and send",
                "apply_seconds": "apply",
            },
        ),
    ]
    for axis, (_, unit, label, lines) in zip(axes, panels, strict=True):
        for (key, name), colour in zip(lines.items(), COLOURS, strict=False):
            values = [each[key] / unit for each in rounds]
            axis.plot(steps, values, color=colour, marker=".", label=name)
        axis.set_ylim(bottom=0)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set_ylabel(label)
        axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def run(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Start the consumer and the ranks; returns what the consumer found."""
    context = torch.multiprocessing.get_context("spawn")
    key = secrets.token_bytes(16)
    ours, theirs = context.Pipe()
    consumer = context.Process(target=consume, args=(options, key, theirs), daemon=True)
    consumer.start()
    theirs.close()  # so that the pipe ends when the consumer does
    address = ours.recv()
    torch.multiprocessing.spawn(
        train, (options, address, key, f"{folder}/store"), nprocs=RANKS, join=True
    )
    found: dict[str, Any] = ours.recv()
    consumer.join()
    return found


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Weights out as deltas, while training goes on.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16, help="that a generated text adds")
    parser.add_argument("--picture", type=Path, help="file to draw bytes and seconds into")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    import tempfile

    options = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = run(options, folder)
    if not found["equal"]:
        raise SystemExit("the consumer's weights are not the trainer's")
    rounds = found["rounds"]
    share = sum(each["bytes"] for each in rounds) / sum(each["full_bytes"] for each in rounds)
    print(f"{len(rounds)} rounds: {share:.4f} of the full bytes; equal bit for bit")
    print(f"the consumer generated {found['texts']} texts meanwhile; the last: {found['sample']!r}")
    if options.picture:
        draw(rounds, options.picture)
        print(f"wrote {options.picture}")
    return found


if __name__ == "__main__":
    main()
