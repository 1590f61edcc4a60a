"""Mutations for fuzzing: of JSON values by their structure, of bytes, and of files in a folder."""

import copy
import json
import os
import random
from collections.abc import Callable, MutableMapping, MutableSequence
from pathlib import Path
from typing import Any

NAMES = (
    "",
    ".",
    "..",
    "../../x.safetensors",
    "/etc/passwd",
    "a/b.safetensors",
    "\u202e\u0000",
    "é",
)


DEEP = {"@deep@": 100_000, "@less deep@": 900, "@hardly deep@": 60}
"""Stand for so many lists in one another, which Python's own functions cannot copy."""


def odd_value(rng: random.Random) -> Any:
    """What stands where something else is meant."""
    numbers = (-1, 0, 1, 7, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), 10**40)
    others: tuple[Any, ...] = (
        *(0.5, -0.0, 1e308, float("nan"), float("inf"), True, False, None),
        *(
            "x" * 5000,
            "F32",
            "BF16",
            "F99",
            "step-00000001",
            "checkpoint.json",
            "model.safetensors",
        ),
        *([], {}, [[]], {"a": 1}, [1, 2], [-1], [2**62, 2**62], [0, 2**63], ["a"], {"": {}}),
        *({"$tensor": ["F32", [2**40], ""]}, {"$array": ["<f8", [-1], "AAAA"]}, {"$array": "O"}),
        *({"$array": ["|O", [1], "AAAAAAAAAAA="]}, {"$set": [[1]]}, {"$nothing": 0}, {"$tuple": 3}),
        *({"$dict": [[[1], 2]]}, {"$float": "x"}, {"$bytes": "%"}, {"$dtype": "F99"}),
        *DEEP,
    )
    return copy.deepcopy(rng.choice(rng.choice((numbers, NAMES, others))))


def mutate_json(rng: random.Random, value: Any) -> Any:
    """A copy with one to three changes at random places: replaced, removed, added, swapped."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = _changed_once(rng, value)
    return value


def _changed_once(rng: random.Random, value: Any) -> Any:
    holder, key = _place_in(rng, value)
    if holder is None:
        return odd_value(rng)
    way = rng.randrange(6)
    if way == 0:
        del holder[key]
    elif way == 1 and isinstance(holder[key], int):
        holder[key] += rng.choice((-1, 1, 2**20, -holder[key] * 2))
    elif way == 2 and isinstance(holder, MutableMapping):
        holder[rng.choice((*NAMES, "new", *map(str, holder)))] = copy.deepcopy(holder[key])
    elif way == 3 and isinstance(holder, MutableSequence):
        holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
    elif way == 4 and isinstance(holder[key], (str, list)):
        holder[key] = holder[key][: rng.randrange(len(holder[key]) + 1)]
    else:
        holder[key] = odd_value(rng)
    return value


def _place_in(rng: random.Random, value: Any) -> tuple[Any, Any]:
    """A random container in the value and a key of it; (None, None): the value itself."""
    holder, key = None, None
    while isinstance(value, (dict, list)) and value and (holder is None or rng.random() < 0.8):
        holder = value
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        value = value[key]
    return holder, key


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Flipped, truncated, extended, or with a piece that is there twice."""
    way, place = rng.randrange(5), rng.randrange(len(data) + 1)
    if way == 0 and data:
        flipped = bytearray(data)
        flipped[min(place, len(data) - 1)] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    if way == 1:
        return data[:place]
    if way == 2:
        return data + rng.randbytes(rng.randrange(1, 100))
    if way == 3:
        return data[:place] + data[max(0, place - rng.randrange(1, 50)) :]
    return rng.randbytes(rng.randrange(0, 20)) + data[place:]


def mutate_head(rng: random.Random, path: Path) -> None:
    """Change the JSON head of a safetensors file, or the length before it."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    if rng.random() < 0.15:
        length = rng.choice((0, 7, length - 1, length + 1, 10**8, 2**63, 2**64 - 1))
        path.write_bytes(length.to_bytes(8, "little") + data[8:])
        return
    text = dump(mutate_json(rng, json.loads(data[8 : 8 + length])))
    text += b" " * max(0, length - len(text))
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def dump(value: Any) -> bytes:
    text = json.dumps(value, separators=(",", ":")).encode()
    for name, depth in DEEP.items():
        text = text.replace(dump_text(name), b"[" * depth + b"]" * depth)
    return text


def dump_text(text: str) -> bytes:
    return json.dumps(text).encode()


def replace_file(rng: random.Random, path: Path, elsewhere: Path) -> None:
    """Something else than a file with these contents: nothing, a link, a folder, a pipe."""
    ways: tuple[Callable[[], None], ...] = (
        lambda: None,
        path.mkdir,
        lambda: path.symlink_to(elsewhere),
        lambda: path.symlink_to("/dev/zero"),
        lambda: path.symlink_to(path.name),
        lambda: os.mkfifo(path),
        lambda: path.write_bytes(b""),
    )
    path.unlink()
    rng.choice(ways)()
