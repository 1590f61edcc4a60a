"""Encodes the Python values that schedulers, random generators and trainers keep as JSON, and back.

JSON has no tuples, bytes, tensors, NaN, or keys other than strings. Such values become an object
with one key, their tag. Decoding never looks up a class by a name from a file.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from layerzero.errors import CheckpointError
from layerzero.state_dict.dtype_names import DTYPES, dtype_name

_TAG = "$"
_MAX_TENSOR_NBYTES = 1 << 24
"""Size limit of one tensor in JSON, in bytes."""


def encode(value: Any, where: str) -> Any:
    """`value` in types that the json module writes, to the same bytes on every rank.

    Takes None, bool, int, float, str, bytes, list, tuple, dict, set, complex, small tensors and
    numpy arrays, numpy scalars, torch dtypes, nested in any way.

    Args:
        where: what `value` is, for the message.

    Raises:
        CheckpointError: it contains something else.
    """
    if value is None:
        return None
    for plain in (bool, int, str):  # Of a subclass, such as an IntEnum, the plain value.
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, float):
        number = float(value)
        return number if math.isfinite(number) else {_TAG + "float": repr(number)}
    if isinstance(value, list):
        return [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict):
        return _encode_dict(value, where)
    if isinstance(value, (tuple, set, frozenset)):
        tag = "tuple" if isinstance(value, tuple) else "set"
        items = value if isinstance(value, tuple) else sorted(value)
        return {_TAG + tag: [encode(item, f"{where}[{i}]") for i, item in enumerate(items)]}
    if isinstance(value, (bytes, bytearray)):
        return {_TAG + "bytes": _to_text(bytes(value))}
    if isinstance(value, complex):
        return {_TAG + "complex": repr(value)}
    if isinstance(value, torch.dtype):
        return {_TAG + "dtype": dtype_name(value, where)}
    if isinstance(value, torch.Tensor):
        return {_TAG + "tensor": _encode_tensor(value, where)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {_TAG + "array": [value.dtype.str, list(value.shape), _to_text(value.tobytes())]}
    if isinstance(value, np.generic):
        return encode(value.item(), where)
    raise CheckpointError(
        f"{where}: a {type(value).__name__} cannot be saved without pickle; expected None, bool, "
        "int, float, str, bytes, list, tuple, dict, set, a tensor or a numpy array"
    )


def _encode_dict(value: dict[Any, Any], where: str) -> Any:
    if all(type(key) is str and not key.startswith(_TAG) for key in value):
        return {key: encode(item, f"{where}[{key!r}]") for key, item in value.items()}
    return {
        _TAG + "dict": [
            [encode(key, f"a key of {where}"), encode(item, f"{where}[{key!r}]")]
            for key, item in value.items()
        ]
    }


def _encode_tensor(tensor: torch.Tensor, where: str) -> list[Any]:
    if tensor.nbytes > _MAX_TENSOR_NBYTES:
        raise CheckpointError(
            f"{where}: a tensor of {tensor.nbytes} bytes is too large for the JSON part of a "
            f"checkpoint, which takes {_MAX_TENSOR_NBYTES}; make it a buffer of the model"
        )
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = _to_text(flat.view(torch.uint8).numpy().tobytes())
    return [dtype_name(tensor.dtype, where), list(tensor.shape), data]


def decode(value: Any) -> Any:
    """The inverse of `encode`; tensors are on the CPU.

    What `encode` did not write may raise anything: checksums come before (decision 0062).
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, content),) = value.items()
        if tag.startswith(_TAG):
            # Here, not in a call of its own: as deep as `encode` goes.
            items = [decode(item) for item in content] if isinstance(content, list) else content
            return _DECODERS[tag](items)
    return {key: decode(item) for key, item in value.items()}


def _decode_tensor(content: Any) -> torch.Tensor:
    name, shape, text = content
    # A bytearray, because tensors need writable memory; of no elements there is one byte too many.
    data = torch.frombuffer(bytearray(_from_text(text) or b"\0"), dtype=torch.uint8)
    return (data if text else data[:0]).view(DTYPES[name]).view(shape)


def _decode_array(content: Any) -> np.ndarray[Any, Any]:
    name, shape, text = content
    return np.frombuffer(bytearray(_from_text(text)), dtype=np.dtype(name)).reshape(shape)


def _to_text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _from_text(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$tuple": tuple,
    "$set": set,
    "$dict": dict,
    "$float": float,
    "$complex": complex,
    "$bytes": _from_text,
    "$dtype": DTYPES.__getitem__,
    "$tensor": _decode_tensor,
    "$array": _decode_array,
}
"""What reads the content of each tag, the items of which are decoded."""
