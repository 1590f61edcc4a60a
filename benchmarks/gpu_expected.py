"""What a GPU is expected to show, where each number comes from, and what to read where it is off.

Ranges hold for an H100 or H200. "measured" is the first run (results/gpu_h100_202611.md);
"counted" follows from the code, "computed" from the sizes of tensors; "bar" is a promise.
"""

from __future__ import annotations

from typing import NamedTuple


class Expected(NamedTuple):
    """A range for one measure; both ends are as expected."""

    what: str
    low: float
    high: float
    source: str
    page: str
    """What to read where the measure is off."""

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high

    @property
    def text(self) -> str:
        """The range, in a table."""
        if self.low <= 0:
            return f"<= {self.high:g}"
        return f"{self.low:g} to {self.high:g}" if self.low < self.high else f"{self.low:g}"


FIRST_RUN = "docs/howto/first_gpu_run.md"
PROFILE = "docs/howto/profile.md"
MEMORY = "docs/howto/memory.md"
STREAMS = "docs/internals/streams.md"
PACK = "docs/internals/pad_copy.md"


EXPECTED: dict[str, Expected] = {
    "copy_tb_s": Expected("TB/s", 2.5, 4.8, "measured 2.8; data sheets 3.4, 4.8", FIRST_RUN),
    "matmul_tflop_s": Expected("TFLOP/s", 600, 990, "measured 662; data sheet 990", FIRST_RUN),
    "link_over_wanted": Expected("time over the link's", 0.99, 1.1, "counted", FIRST_RUN),
    "over_bare": Expected("passes over bare", 0.95, 1.1, "measured 1.07", PROFILE),
    "over_bare_and_sms": Expected("the same less the link's SMs", 0.9, 1.02, "bar", PROFILE),
    "over_fully_shard": Expected("over fully_shard", 0, 1.0, "bar; measured 0.94", PROFILE),
    "host_over_fully_shard": Expected("over fully_shard", 0, 0.25, "bar", PROFILE),
    "host_ms_per_unit": Expected("ms a unit", 0, 1.0, "measured 1.8, to be halved", PROFILE),
    "bytes_at_rest": Expected("bytes a parameter", 11.9, 12.6, "computed: 12", MEMORY),
    "peak_over_fully_shard": Expected("over fully_shard", 0, 0.95, "bar", MEMORY),
    "reserved_over_allocated": Expected("reserved over peak", 1.0, 1.15, "measured 1.12", MEMORY),
    "allocs_after_step_3": Expected("cudaMalloc after step 3", 0, 0, "counted", STREAMS),
    "step_over_floor": Expected("over its bytes' time", 0.9, 1.15, "bar", PROFILE),
    "hidden_part": Expected("gathers beside compute", 0.9, 1.0, "counted: all but two", STREAMS),
    "trace_gathers": Expected("steps without gathers", 0, 0, "counted", PROFILE),
    "trace_gathers_on_compute": Expected("gathers on compute", 0, 0, "counted", STREAMS),
    "trace_order": Expected("steps in another order than drawn", 0, 0, "counted", STREAMS),
    "trace_own_kernels": Expected(
        "steps with other kernels than counted", 0, 0, "counted", STREAMS
    ),
    "trace_gaps": Expected("steps with a gap over 50 us", 0, 0, "bar", PROFILE),
    "trace_host": Expected("calls that can block the host", 0, 0, "counted", STREAMS),
}
