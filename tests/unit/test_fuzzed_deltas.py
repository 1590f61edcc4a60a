"""Damaged and forged patches, in folders and on a wire: DeltaError, soon, and no file changes."""

from __future__ import annotations

import json
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from layerzero.checkpoint import DeltaReader, Patch, apply_delta, receive_patches, send_patches
from layerzero.checkpoint.delta import folder_file
from layerzero.checkpoint.delta.folder_names import DeltaFile, set_current
from layerzero.checkpoint.delta.packing import chain_of, pack
from tests.harness import mutate
from tests.harness.bounds import ALLOWED, MOST_NBYTES, limited_memory, outcome, peak_nbytes
from tests.unit.test_delta_receiver import patch

FEW = 100
STREAM = "0123456789ab"
SENDERS = (0, 1)


def patches(sender: int, kind: str) -> list[Patch]:
    link = {"stream": STREAM, "chain": f"c{sender}", "sender": sender, "anchor": ("a",)}
    if kind == "full":
        part = range(12)[sender * 6 : sender * 6 + 6]
        return [patch(0, after=0, indices=part, part=0, parts=1, **link)]
    return [
        patch(1, indices=[sender, 5], **link),
        patch(2, indices=[3], aliases=("b",), **link),
        patch(3, name="c", indices=[0, 300, 66_000], shape=(70_000,), **link),
    ]


def make(root: Path) -> None:
    folder = root / STREAM
    folder.mkdir(parents=True)
    set_current(root, STREAM, 0)
    for sender in SENDERS:
        for step, kind in ((0, "full"), (1, "changes")):
            found = patches(sender, kind)
            path = folder / DeltaFile(step, kind, sender, 0, True).name
            packed = [pack(each) for each in found]
            folder_file.write_file(path, packed, chain_of(found[0]), SENDERS)


def forge(rng: random.Random, path: Path) -> None:
    """Change what the metadata say; their checksum is right."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    texts = header["__metadata__"]
    name = rng.choice(("patches", "patches", "chain", "senders"))
    texts[name] = mutate.dump(mutate.mutate_json(rng, json.loads(texts[name]))).decode()
    joined = "\n".join(texts[each] for each in ("patches", "chain", "senders"))
    texts["crc"] = str(zlib.crc32(joined.encode()))
    text = mutate.dump(header)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def damage(rng: random.Random, root: Path, elsewhere: Path) -> str:
    path = rng.choice(sorted((root / STREAM).iterdir()))
    way = rng.choice(
        ("forged", "forged", "forged", "bytes", "head", "replaced", "named", "current")
    )
    if way == "forged":
        forge(rng, path)
    elif way == "bytes":
        path.write_bytes(mutate.mutate_bytes(rng, path.read_bytes()))
    elif way == "head":
        mutate.mutate_head(rng, path)
    elif way == "replaced":
        mutate.replace_file(rng, path, elsewhere)
    elif way == "named":
        file = DeltaFile(rng.choice((0, 1, 9)), rng.choice(("full", "changes")), 1, 0, True)
        path.rename(path.with_name(file.name))
    elif rng.random() < 0.5:
        mutate.replace_file(rng, root / "current", elsewhere)
    else:
        text = rng.choice((*mutate.NAMES, "0" * 64, STREAM + "\n\n", "../" + STREAM))
        (root / "current").write_text(text)
    return way


def tensors() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(3, 4, dtype=torch.bfloat16) for name in "ab"} | {
        "c": torch.zeros(70_000, dtype=torch.bfloat16)
    }


def times_of(root: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.lstat().st_mtime_ns) for path in root.rglob("*"))


def folder_case(seed: int, template: Path, root: Path) -> str | None:
    rng = random.Random(seed)
    shutil.copytree(template, root)
    way = damage(rng, root, template / "current")
    before = times_of(root)
    reader = DeltaReader(root)
    _, problem = outcome(lambda: reader.apply(tensors(), from_full=rng.random() < 0.5))
    if problem is None and times_of(root) != before:
        problem = "files were written"
    shutil.rmtree(root)
    return problem and f"case {seed} ({way}): {problem}"


class Wire:
    def __init__(self) -> None:
        self.messages: list[bytes] = []

    def send_bytes(self, buf: bytes, /) -> None:
        self.messages.append(bytes(buf))

    def recv_bytes(self) -> bytes:
        if not self.messages:
            raise EOFError
        return self.messages.pop(0)


def wire_case(seed: int) -> str | None:
    rng = random.Random(seed)
    wire = Wire()
    send_patches(patches(0, "changes"), wire)
    number = rng.randrange(len(wire.messages))
    message = wire.messages[number]
    if rng.random() < 0.3:
        message = mutate.mutate_bytes(rng, message)
    elif message[:1] == b"P":
        end = 5 + int.from_bytes(message[1:5], "little")
        text = mutate.dump(mutate.mutate_json(rng, json.loads(message[5:end])))
        message = b"P" + len(text).to_bytes(4, "little") + text + message[end:]
    else:
        message = message[:1] + mutate.dump(mutate.mutate_json(rng, json.loads(message[1:])))
    wire.messages[number] = message
    targets = tensors()

    def receive() -> None:
        for each in receive_patches(wire):
            apply_delta(targets, each)

    _, problem = outcome(receive, (*ALLOWED, EOFError))
    return problem and f"message {seed}: {problem}"


def test_forged_patches_are_refused(tmp_path: Path, seeds_or: Callable[[int], range]) -> None:
    template = tmp_path / "template"
    make(template)
    targets = tensors()
    assert DeltaReader(template).apply(targets) == 1 and targets["c"][66_000] == 9
    before = peak_nbytes()
    problems: list[Any] = []
    with limited_memory():
        for seed in seeds_or(FEW):
            problems += [folder_case(seed, template, tmp_path / "case"), wire_case(seed)]
    problems = [problem for problem in problems if problem is not None]
    assert not problems, "\n".join(problems[:20])
    assert peak_nbytes() - before < MOST_NBYTES
