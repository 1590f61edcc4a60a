"""A link between GPUs, on one GPU: a copy takes as long as its bytes would on the wire.

A few blocks copy and watch the clock, as many as NCCL's kernels take, so that the rest of the GPU
computes meanwhile. A copy of the driver's takes all of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_THREADS = 512
# As much as keeps a matrix product's block, which takes most of an SM's, off the SM, as NCCL does;
# more would have to be asked for.
_SHARED_NBYTES = 40 << 10
_CALIBRATION_CYCLES = 20_000_000
_SOURCE = """
__device__ unsigned long long now() {
  unsigned long long time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

extern "C" __global__ void link_copy(uint4* to, const uint4* from, int numel, int nanoseconds) {
  constexpr int kLoads = 8;  // In flight for each thread, so that few blocks reach the rate.
  const unsigned long long begin = now();
  const long long tile = (long long)blockDim.x * kLoads;
  for (long long at = blockIdx.x * tile; at < numel; at += gridDim.x * tile) {
    uint4 values[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const long long place = at + i * blockDim.x + threadIdx.x;
      if (place < numel) values[i] = from[place];
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const long long place = at + i * blockDim.x + threadIdx.x;
      if (place < numel) to[place] = values[i];
    }
    // In proportion, so that bandwidth is taken evenly.
    const unsigned long long reached = at + tile < numel ? at + tile : numel;
    const unsigned long long due = begin + nanoseconds * reached / numel;
    while (now() < due) __nanosleep(200);
  }
  while (now() < begin + nanoseconds) __nanosleep(200);
}
"""


@dataclass(frozen=True)
class Link:
    """Rates of the links of each GPU, and what moving bytes takes of it."""

    node_gb_s: float = 300.0
    """What a rank receives from the GPUs of its node."""
    network_gb_s: float = 45.0
    """What a rank receives from other nodes."""
    num_blocks: int = 16
    node_size: int = 8

    @classmethod
    def parse(cls, text: str) -> Link | None:
        """Of "300,45,16", rates and blocks, from the left as many as differ; of "none", None."""
        if text == "none":
            return None
        rates = [float(part) for part in text.split(",") if part]
        return cls(*rates[:2], *map(int, rates[2:]))

    def seconds(self, nbytes: int, ranks: Sequence[int], own: int) -> float:
        """Of a gather of `nbytes` in all, or of a reduction of as many on each rank.

        Bytes enter a node once, through the links of its ranks together, and go around inside; both
        happen at the same time.

        Args:
            ranks: in the world, in order: node k has ranks k * node_size and following.
            own: this rank's place among them.
        """
        nodes = [rank // self.node_size for rank in ranks]
        num_nodes, num_inside = len(set(nodes)), nodes.count(nodes[own])
        within = nbytes * (1 - 1 / len(ranks)) / self.node_gb_s if num_inside > 1 else 0.0
        between = nbytes * (1 - 1 / num_nodes) / num_inside / self.network_gb_s
        return max(within, between) * 1e-9

    def carry(self, to: Tensor, source: Tensor, seconds: float) -> None:
        """Queue a copy on the current stream that takes at least so long. Does not block."""
        if to.device.type != "cuda":
            to.copy_(source)
            return
        copy = _link_copy()
        if copy is None or (to.data_ptr() | source.data_ptr() | to.nbytes) % 16 or not to.nbytes:
            torch.cuda._sleep(int(seconds * _cycles_per_second()))
            to.copy_(source)
            return
        arguments = [to, source, to.nbytes // 16, int(seconds * 1e9)]
        copy((self.num_blocks, 1, 1), (_THREADS, 1, 1), arguments, _SHARED_NBYTES)


@functools.cache
def _link_copy() -> Callable[..., Any] | None:
    """The kernel, compiled for this GPU; None where torch cannot."""
    try:
        return torch.cuda._compile_kernel(_SOURCE, "link_copy")
    except Exception as error:  # Whatever the compiler's library is missing.
        print(f"no link_copy, a sleep and a copy instead: {type(error).__name__}: {error}")
        return None


@functools.cache
def _cycles_per_second() -> float:
    """Of the clock that `_sleep` counts. Blocks the host, once."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_CALIBRATION_CYCLES)
    begin.record()
    torch.cuda._sleep(_CALIBRATION_CYCLES)
    end.record()
    torch.cuda.synchronize()
    return _CALIBRATION_CYCLES / begin.elapsed_time(end) * 1e3
