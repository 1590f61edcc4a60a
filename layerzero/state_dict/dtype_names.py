"""Names of dtypes as in safetensors files, used in all our formats and messages."""

from __future__ import annotations

import torch

from layerzero.errors import CheckpointError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype, tensor: str) -> str:
    """The safetensors name of a dtype.

    Raises:
        CheckpointError: it has none; `tensor` names what should be saved.
    """
    if dtype not in _NAMES:
        raise CheckpointError(
            f"{tensor}: safetensors files cannot hold {dtype}; they hold "
            + ", ".join(str(known).removeprefix("torch.") for known in _NAMES)
        )
    return _NAMES[dtype]
