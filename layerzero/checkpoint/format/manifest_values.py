"""Parses the JSON of a manifest and checks the type of every value that code relies on.

A checksum does not make a file trustworthy: whoever writes one can compute it. What is accepted
here has the shape that a save writes, so that nothing later fails half-way.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

_MAX_DEPTH = 200
"""Levels of lists and objects in one another; Python's recursion takes about a thousand."""
_Check = Callable[[Any], bool]


def parse(text: bytes) -> dict[str, Any]:
    """The values of a manifest or index: an object of finite numbers, not nested too deeply.

    Raises:
        ValueError: it is something else.
    """
    try:
        values = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("values are nested too deeply") from error
    if not isinstance(values, dict):
        raise ValueError(f"expected an object, got {type(values).__name__}")
    _check_depth(values)
    return values


def check_values(values: dict[str, Any]) -> None:
    """Check fields of a manifest: all there are, with the types that `Manifest` says.

    Raises:
        ValueError: names the first field that is wrong.
    """
    unknown = sorted(values.keys() - FIELDS.keys())
    missing = sorted(_REQUIRED - values.keys())
    if unknown or missing:
        raise ValueError(f"has no field {missing}" if missing else f"has unknown fields {unknown}")
    for name, value in values.items():
        if not FIELDS[name](value):
            raise ValueError(f"the field {name!r} is not what a save writes: {value!r:.100}")


def is_file_record(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"nbytes", "crc32"} and _are_counts(value)


def _are_counts(value: dict[str, Any]) -> bool:
    return _is_count(value["nbytes"]) and _is_crc(value["crc32"])


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_crc(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 32


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_anything(_: Any) -> bool:
    return True


def _list_of(check: _Check) -> _Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _object_of(check: _Check) -> _Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _or_none(check: _Check) -> _Check:
    return lambda value: value is None or check(value)


def _is_group(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() <= {"params", "options", "optimizer"}
        and _list_of(_is_text)(value.get("params"))
        and isinstance(value.get("options"), dict)
        and _is_text(value.get("optimizer", ""))
    )


FIELDS: dict[str, _Check] = {
    "step": _is_count,
    "world_size": _is_count,
    "files": _object_of(is_file_record),
    "tensors": _object_of(_object_of(_is_crc)),
    "optimizer_groups": _or_none(_list_of(_is_group)),
    "optimizer_scalars": _list_of(_is_text),
    "optimizer_values": _object_of(_object_of(_is_anything)),
    "scheduler": _or_none(_object_of(_is_anything)),
    "scheduler_names": _or_none(_list_of(_is_text)),
    "extras": _list_of(_is_anything),
    "extra_states": _object_of(_is_anything),
    "aliases": _object_of(_is_text),
}
_REQUIRED = {"step", "world_size", "files", "tensors"}


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text:.40} is too large")
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return
    raise ValueError(f"values are nested more than {_MAX_DEPTH} levels deep")
