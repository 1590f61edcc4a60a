"""word_sums: checksums, each the sum of a tensor's bytes as 64-bit words, modulo 2**64.

One flipped bit changes a word by a power of two below 2**64, so it always changes the sum. Flips in
several places cancel out only if the changes of the words add up to zero.

The reference here runs where the library built from csrc/ has no kernel (schema.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

_WORD = 8
_OF_KERNEL = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.uint8}


def word_sums(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The checksum of each tensor, int64 on their device. Does not block the host.

    Args:
        tensors: at least one; of any dtypes and shapes, all on one device. The end of one that is
            no multiple of 8 bytes counts as a word that zeros complete.
    """
    whole = [each.detach().contiguous() for each in tensors]
    whole = [x if x.dtype in _OF_KERNEL else x.view(-1).view(torch.uint8) for x in whole]
    out = torch.empty(len(whole), dtype=torch.int64, device=whole[0].device)
    torch.ops.layerzero.word_sums_.default(out, whole)
    return out


def word_sums_(out: torch.Tensor, xs: Sequence[torch.Tensor]) -> None:
    """The op.

    Raises:
        ValueError: `out` has another size than the list.
    """
    if len(xs) != out.numel():
        raise ValueError(f"word_sums_: {len(xs)} tensors, but room for {out.numel()} checksums")
    if xs:
        torch.stack([_word_sum(each) for each in xs], out=out)


def _word_sum(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.view(-1)
    nbytes = flat.nbytes
    if nbytes % _WORD == 0 and flat.storage_offset() * flat.element_size() % _WORD == 0:
        return flat.view(torch.int64).sum()
    whole = flat.new_zeros(-(-nbytes // _WORD) * _WORD, dtype=torch.uint8)
    whole[:nbytes] = flat.view(torch.uint8)
    return whole.view(torch.int64).sum()
