"""Damaged and forged patches, alone or in a folder: DeltaError, soon, and no file changes."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from layerzero.checkpoint import Patch, apply_delta
from tests.harness import mutate
from tests.harness.bounds import MOST_NBYTES, limited_memory, outcome, peak_nbytes
from tests.unit.test_delta_receiver import DeltaReader, head_of, patch, with_head, write

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
    for sender in SENDERS:
        for step, kind in ((0, "full"), (1, "changes")):
            write(root, step, kind, sender, patches(sender, kind))


def forge(rng: random.Random, data: bytes) -> bytes:
    """Change what the head of a packed patch says; its checksum is right."""
    return with_head(data, mutate.dump(mutate.mutate_json(rng, head_of(data)[0])))


def forge_file(rng: random.Random, path: Path) -> None:
    data, parts = path.read_bytes(), []
    while data:
        end = 8 + int.from_bytes(data[:8], "little")
        parts.append(data[8:end])
        data = data[end:]
    chosen = rng.randrange(len(parts))
    parts[chosen] = forge(rng, parts[chosen])
    path.write_bytes(b"".join(len(each).to_bytes(8, "little") + each for each in parts))


def damage(rng: random.Random, root: Path, elsewhere: Path) -> str:
    path = rng.choice(sorted((root / STREAM).iterdir()))
    way = rng.choice(("forged", "forged", "forged", "bytes", "replaced", "named", "current"))
    if way == "forged":
        forge_file(rng, path)
    elif way == "bytes":
        path.write_bytes(mutate.mutate_bytes(rng, path.read_bytes()))
    elif way == "replaced":
        mutate.replace_file(rng, path, elsewhere)
    elif way == "named":
        step, kind = rng.choice((0, 1, 9)), rng.choice(("full", "changes"))
        path.rename(path.with_name(f"{step:010d}-{kind}-r00001-of-00002"))
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


def message_case(seed: int) -> str | None:
    rng = random.Random(seed)
    messages = [each.to_bytes() for each in patches(0, "changes")]
    number = rng.randrange(len(messages))
    change = mutate.mutate_bytes if rng.random() < 0.3 else forge
    messages[number] = change(rng, messages[number])
    targets = tensors()

    def receive() -> None:
        for each in messages:
            apply_delta(targets, Patch.from_bytes(each))

    _, problem = outcome(receive)
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
            problems += [folder_case(seed, template, tmp_path / "case"), message_case(seed)]
    problems = [problem for problem in problems if problem is not None]
    assert not problems, "\n".join(problems[:20])
    assert peak_nbytes() - before < MOST_NBYTES
