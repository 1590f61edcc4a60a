"""What a GPU is expected to show, where each number comes from, and what to read where it is off.

None of these numbers was measured. "estimate" is a calculation from data sheets and from counts of
launches; "counted" follows from the code; "computed" from the sizes of tensors. Numbers of findings
are those of docs/howto/first_gpu_run.md.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Expected:
    """A range for one measure; both ends are as expected."""

    what: str
    low: float
    high: float
    unit: str
    source: str
    finding: int | None
    """What to suspect where the measure is off; None: the machine itself, or the estimate."""
    page: str

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high

    @property
    def text(self) -> str:
        """The range, in a table."""
        if self.low == self.high:
            return f"{self.low:g} {self.unit}".strip()
        if self.low <= 0:
            return f"<= {self.high:g} {self.unit}".strip()
        return f"{self.low:g} to {self.high:g} {self.unit}".strip()

    @property
    def suspect(self) -> str:
        name = "the machine" if self.finding is None else f"finding {self.finding}"
        return f"{name}, {self.page}"


FIRST_RUN = "docs/howto/first_gpu_run.md"
PROFILE = "docs/howto/profile.md"
MEMORY = "docs/howto/memory.md"
STREAMS = "docs/internals/streams.md"


def _of_world(world: int) -> dict[str, Expected]:
    return {
        f"layerzero_over_bare_w{world}": Expected(
            f"passes of rank 3 of {world} beside the bare model's",
            0.97,
            1.05,
            "x",
            "estimate: two packs and a copy hide behind compute",
            6,
            PROFILE,
        ),
        f"layerzero_over_fully_shard_w{world}": Expected(
            f"passes of rank 3 of {world} beside fully_shard's",
            0.0,
            1.03,
            "x",
            "estimate: 0.97 to 1.00; fewer launches, same collectives",
            14,
            PROFILE,
        ),
        f"resident_over_computed_w{world}": Expected(
            f"memory between steps, rank 3 of {world}",
            0.98,
            1.1,
            "x",
            "computed: 14 bytes for each parameter, divided by the ranks",
            9,
            MEMORY,
        ),
        f"transient_gb_w{world}": Expected(
            f"peak above that and the activations, rank 3 of {world}",
            -0.5,
            1.3,
            "GB",
            "estimate: two full units, one gradient buffer, chunks: about 0.9",
            1,
            MEMORY,
        ),
        f"reserved_over_allocated_w{world}": Expected(
            f"reserved beside allocated memory at the peak, rank 3 of {world}",
            1.0,
            1.15,
            "x",
            "estimate: five pools that do not mix",
            1,
            MEMORY,
        ),
        f"device_allocs_after_step_3_w{world}": Expected(
            f"calls of cudaMalloc after step 3, rank 3 of {world}",
            0,
            0,
            "",
            "counted: each buffer finds the block it had",
            1,
            STREAMS,
        ),
    }


EXPECTED: dict[str, Expected] = {
    "copy_tb_s": Expected(
        "copy within the device, read plus written",
        2.7,
        4.8,
        "TB/s",
        "data sheets: 3.35 (H100), 4.8 (H200), less a tenth",
        None,
        FIRST_RUN,
    ),
    "matmul_tflop_s": Expected(
        "bfloat16 product of random values",
        600,
        990,
        "TFLOP/s",
        "data sheet: 990 at full clock",
        None,
        FIRST_RUN,
    ),
    "bare_ms": Expected(
        "passes of the bare model, 1.08 B, 8192 tokens",
        100,
        200,
        "ms",
        "estimate: 60 TFLOP at 400 TFLOP/s: 140 to 155",
        None,
        FIRST_RUN,
    ),
    **_of_world(8),
    **_of_world(64),
    "host_ms_per_unit_layerzero": Expected(
        "host time of a unit in one step",
        0.0,
        0.4,
        "ms",
        "estimate: 0.25 to 0.35 on a 3 GHz host",
        11,
        PROFILE,
    ),
    "host_ms_per_unit_fully_shard": Expected(
        "the same of fully_shard",
        0.0,
        2.0,
        "ms",
        "estimate: 0.7 to 1.2; nothing of ours",
        None,
        FIRST_RUN,
    ),
    "pack_over_copy": Expected(
        "a layer's cast beside a copy of as many bytes",
        0.85,
        1.2,
        "x",
        "estimate: bound by memory, as on the CPU",
        3,
        "docs/internals/pad_copy.md",
    ),
    "hidden_part": Expected(
        "time of gathers that runs beside compute",
        0.9,
        1.0,
        "",
        "counted: all gathers but the root's and the first unit's",
        6,
        STREAMS,
    ),
    "trace_gathers": Expected(
        "steps whose trace shows no gather", 0, 0, "", "counted", None, PROFILE
    ),
    "trace_gathers_on_compute": Expected(
        "steps with a gather on the compute stream", 0, 0, "", "counted", 6, STREAMS
    ),
    "trace_hidden": Expected(
        "steps that hide too little of their gathers", 0, 0, "", "counted", 6, STREAMS
    ),
    "trace_order": Expected(
        "steps whose collectives are in another order than drawn", 0, 0, "", "counted", 15, STREAMS
    ),
    "trace_own_kernels": Expected(
        "steps with more or fewer than two own kernels a unit", 0, 0, "", "counted", 3, STREAMS
    ),
    "trace_gaps": Expected(
        "steps with a gap over 50 us at a unit's border", 0, 0, "", "estimate", 11, PROFILE
    ),
    "trace_host": Expected(
        "calls of steps that can block the host", 0, 0, "", "counted", 3, STREAMS
    ),
}
