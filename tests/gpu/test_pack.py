"""The CUDA kernels against the CPU's plain torch, bit by bit, and their manners on a stream.

Under `compute-sanitizer python -m pytest tests/gpu` each access is checked as well.
"""

import random
import statistics
from collections.abc import Callable, Sequence

import pytest
import torch

from layerzero.ops import Segments, ordered_sum_, pack_, reference
from layerzero.optim import step_ops
from layerzero.optim.step_ops import StepTensors, run_steps
from tests.ops.truth import DTYPES, assert_same_bits, concatenate, random_values, special_values

pytestmark = pytest.mark.gpu

CANARY = 7.0
SCALES = [1.0, 0.25, -1.5, 0.3]
SLEEP_CYCLES = 1_000_000_000
"""About half a second of a busy stream: far more than a call takes that does not wait."""


def shifted(values: torch.Tensor, shift: int, device: torch.device) -> torch.Tensor:
    """A copy on `device` that starts `shift` elements into its memory."""
    copy = torch.empty(values.numel() + shift, dtype=values.dtype, device=device)[shift:]
    return copy.copy_(values)


def check_pack(
    device: torch.device,
    srcs: Sequence[torch.Tensor | None],
    segs: Segments,
    dtype: torch.dtype,
    scale: float = 1.0,
    out_offset: int = 0,
    src_shift: int = 0,
) -> None:
    """`srcs` are on the CPU; their copies are packed into the middle of a larger buffer."""
    expected = torch.empty(segs.numel, dtype=dtype)
    given = [torch.empty(0) if s is None else s for s in srcs]
    reference.pack_(expected, given, segs.table, scale)
    buffer = torch.full((out_offset + segs.numel + 32,), CANARY, dtype=dtype, device=device)
    out = buffer[out_offset : out_offset + segs.numel]
    pack_(out, [shifted(s, src_shift, device) for s in given], segs, scale)
    assert_same_bits(out.cpu(), expected)
    assert (buffer[:out_offset] == CANARY).all()
    assert (buffer[out_offset + segs.numel :] == CANARY).all()


def small_tensors(count: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    return [torch.randn(random.randrange(1, 64), device=device).to(dtype) for _ in range(count)]


def raw_pack(
    out: torch.Tensor, srcs: list[torch.Tensor], segs: torch.Tensor, scale: float = 1.0
) -> None:
    torch.ops.layerzero.pack_.default(out, srcs, segs, scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("src_dtype", DTYPES, ids=str)
def test_every_dtype_pair_has_the_bits_of_the_reference(
    cuda: torch.device, src_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    numels = [0, 1, 2, 3, 7, 8, 9, 31, 33, 127, 255, 257, 511, 513, 1025, 4097, 20_001]
    for alignment in (1, 16):
        segs = concatenate(numels, alignment=alignment, multiple=64)
        for scale in SCALES:
            srcs = [random_values(numel, src_dtype) for numel in numels]
            check_pack(cuda, srcs, segs, dtype, scale)
    numels = [3, 5000, 17, 2600]
    srcs = [random_values(numel, src_dtype) for numel in numels]
    for shift in range(1, 8):  # Sources and outputs may start anywhere.
        check_pack(cuda, srcs, concatenate(numels, 16), dtype, src_shift=shift)
        check_pack(cuda, srcs, concatenate(numels), dtype, out_offset=shift)
    for src in special_values(src_dtype, dtype):
        check_pack(cuda, [src], concatenate([src.numel()]), dtype)


@pytest.mark.parametrize("count", [0, 1, 33, 449, 2000, 4001, 10_000])
def test_any_number_of_sources_packs(cuda: torch.device, count: int) -> None:
    numels = [random.randrange(40) for _ in range(count)]
    segs = concatenate(numels, alignment=8, multiple=24)
    for src_dtype, dtype in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        srcs = [torch.randn(numel).to(src_dtype) for numel in numels]
        check_pack(cuda, srcs, segs, dtype, 0.5)


def test_missing_sources_gaps_and_the_tail_become_zeros(cuda: torch.device) -> None:
    numels = [1000, 3, 700, 5000]
    rows = [(0, 0, 5, 1000), (1, 1, 1005, 2), (2, 0, 1100, 700), (3, 17, 1900, 4000)]
    segs = Segments.build(rows, 7001)
    whole = [torch.randn(numel) for numel in numels]
    for missing in ((), (0,), (2, 3), (0, 1, 2, 3)):
        srcs = [None if i in missing else src for i, src in enumerate(whole)]
        check_pack(cuda, srcs, segs, torch.bfloat16)
        check_pack(cuda, srcs, segs, torch.float32, 0.5, out_offset=1)


def test_rows_that_are_nonsense_touch_nothing_but_the_output(cuda: torch.device) -> None:
    """The kernel cannot refuse what it reads on the device; it must not harm anybody else."""
    huge = (1 << 63) - 1
    srcs = [torch.ones(100, device=cuda), torch.ones(5, device=cuda)]
    for rows in (
        [(0, 90, 0), (1, 4, 50), (9, 0, 60), (-1, 0, 1000)],
        [(0, huge, 0), (1, -huge, 50), (0, -1, 60), (-1, 0, huge)],
        [(0, 0, huge), (1, 0, -huge), (huge, 0, 0), (-huge, 0, 3)],
    ):
        buffer = torch.full((400,), CANARY, device=cuda)
        raw_pack(buffer[100:300], srcs, torch.tensor(rows, device=cuda))
        torch.cuda.synchronize()
        assert (buffer[:100] == CANARY).all()
        assert (buffer[300:] == CANARY).all()


@pytest.mark.slow
def test_more_than_2_to_the_31_elements_pack(cuda: torch.device) -> None:
    numel = (1 << 31) + 4099
    needed = 14 << 30
    if torch.cuda.mem_get_info(cuda)[0] < needed:
        pytest.skip(f"needs {needed >> 30} GiB of free GPU memory")
    # Positive finite bit patterns, so that comparing bits compares values.
    bits = torch.randint(0, 0x7F80, (numel,), dtype=torch.int16, device=cuda)
    small = torch.ones(3, dtype=torch.bfloat16, device=cuda)
    segs = concatenate([3, numel, 3], multiple=64)
    out = torch.empty(segs.numel, dtype=torch.bfloat16, device=cuda)
    pack_(out, [small, bits.view(torch.bfloat16), small], segs)
    for begin in range(0, numel, 1 << 28):
        end = min(numel, begin + (1 << 28))
        assert torch.equal(out[3 + begin : 3 + end].view(torch.int16), bits[begin:end])
    assert (out[:3] == 1).all() and (out[3 + numel : 6 + numel] == 1).all()
    assert (out[6 + numel :] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("part_dtype", DTYPES, ids=str)
def test_parts_are_added_in_order(
    cuda: torch.device, part_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    for numel in (0, 1, 7, 8, 33, 1023, 4097):
        for count in (1, 2, 3, 4, 5, 9):
            shift = (numel + count) % 3
            parts = [random_values(numel, part_dtype) for _ in range(count)]
            expected = torch.empty(numel, dtype=dtype)
            reference.ordered_sum_(expected, parts, 1 / count)
            buffer = torch.full((shift + numel + 32,), CANARY, dtype=dtype, device=cuda)
            out = buffer[shift : shift + numel]
            ordered_sum_(out, [shifted(part, shift, cuda) for part in parts], 1 / count)
            assert_same_bits(out.cpu(), expected)
            assert (buffer[:shift] == CANARY).all() and (buffer[shift + numel :] == CANARY).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_may_replace_one_of_its_parts(cuda: torch.device, dtype: torch.dtype) -> None:
    parts = [random_values(10_001, dtype) for _ in range(6)]
    expected = torch.empty(10_001, dtype=dtype)
    reference.ordered_sum_(expected, parts, 0.5)
    for index in range(len(parts)):
        on_device = [shifted(part, 0, cuda) for part in parts]
        ordered_sum_(on_device[index], on_device, 0.5)
        assert_same_bits(on_device[index].cpu(), expected)


@pytest.mark.parametrize("count", [9, 2000, 4001])
def test_kernels_are_captured_and_replayed(cuda: torch.device, count: int) -> None:
    """On another stream than the current one they would be in no graph, or end the capture."""
    srcs = small_tensors(count, torch.float32, cuda)
    segs = concatenate([src.numel() for src in srcs], alignment=16, multiple=64)
    out = torch.empty(segs.numel, dtype=torch.bfloat16, device=cuda)
    parts = [torch.empty(1000, device=cuda) for _ in range(5)]
    total = torch.empty(1000, device=cuda)
    pack_(out, srcs, segs)  # the rows go to the device, which a capture would refuse
    ordered_sum_(total, parts)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pack_(out, srcs, segs, 0.5)
        ordered_sum_(total, parts, 0.5)
    for _ in range(2):
        for tensor in (*srcs, *parts):
            tensor.normal_()
        out.fill_(CANARY)
        total.fill_(CANARY)
        graph.replay()
        torch.cuda.synchronize()
        expected = torch.empty(segs.numel, dtype=torch.bfloat16)
        reference.pack_(expected, [src.cpu() for src in srcs], segs.table, 0.5)
        assert_same_bits(out.cpu(), expected)
        expected = torch.empty(1000)
        reference.ordered_sum_(expected, [part.cpu() for part in parts], 0.5)
        assert_same_bits(total.cpu(), expected)


@pytest.mark.parametrize(("count", "launches"), [(9, 1), (2000, 1), (4001, 2)])
def test_2000_tensors_are_one_launch(cuda: torch.device, count: int, launches: int) -> None:
    srcs = small_tensors(count, torch.float32, cuda)
    segs = concatenate([src.numel() for src in srcs], alignment=16)
    out = torch.empty(segs.numel, dtype=torch.bfloat16, device=cuda)
    table = segs.on(cuda)
    raw_pack(out, srcs, table)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        raw_pack(out, srcs, table)
        torch.cuda.synchronize()
    on_device = [
        event.name
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    assert sum("pack_kernel" in name for name in on_device) == launches, on_device
    assert not any("memcpy" in name.lower() or "memset" in name.lower() for name in on_device)


def test_kernels_neither_allocate_nor_wait(cuda: torch.device) -> None:
    srcs = small_tensors(300, torch.float32, cuda)
    srcs[7] = torch.empty(0, device=cuda)
    segs = concatenate([src.numel() for src in srcs], alignment=16, multiple=64)
    out = torch.empty(segs.numel, dtype=torch.bfloat16, device=cuda)
    table = segs.on(cuda)
    parts = [torch.randn(1000, device=cuda) for _ in range(5)]
    total = torch.empty(1000, device=cuda)

    def call() -> None:
        raw_pack(out, srcs, table, 0.5)
        torch.ops.layerzero.ordered_sum_.default(total, parts, 0.5)
        pack_(out, srcs, segs, 0.5)

    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats(cuda)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(SLEEP_CYCLES)
        call()
        # The debug mode knows torch's own waits only; the busy stream shows any other.
        assert not torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    after = torch.cuda.memory_stats(cuda)
    torch.cuda.synchronize()
    for counter in ("allocation.all.allocated", "segment.all.allocated", "num_alloc_retries"):
        assert after[counter] == before[counter]


def median_ms(call: Callable[[], object]) -> float:
    for _ in range(20):
        call()
    times = []
    for _ in range(100):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in times)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("src_dtype", "dtype"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
def test_a_large_layer_packs_at_the_bandwidth_of_a_copy(
    cuda: torch.device, src_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    """At least 0.9 of what the device reaches when it copies as many bytes within itself."""
    width, hidden, narrow = 2048, 8192, 512
    numels = [width * width] * 2 + [width * narrow] * 2 + [width * hidden] * 3 + [width] * 2
    srcs = [torch.randn(numel, device=cuda).to(src_dtype) for numel in numels]
    segs = concatenate(numels, alignment=16, multiple=1024)
    out = torch.empty(segs.numel, dtype=dtype, device=cuda)
    table = segs.on(cuda)
    moved = sum(src.nbytes for src in srcs) + out.nbytes
    from_bytes = torch.empty(moved // 2, dtype=torch.uint8, device=cuda)
    to_bytes = torch.empty_like(from_bytes)
    copy_ms = median_ms(lambda: to_bytes.copy_(from_bytes))
    pack_ms = median_ms(lambda: raw_pack(out, srcs, table))
    assert copy_ms >= 0.9 * pack_ms, f"copy {copy_ms:.3f} ms, pack {pack_ms:.3f} ms"


def random_step(dtype: torch.dtype, state: torch.dtype, aligned: bool) -> StepTensors:
    """A flat parameter of a few ranges, on the CPU; aligned: as layouts make them."""
    table: list[list[int]] = []
    main = grad = place = blocks = 0
    for numel in (1, 255, 20_000, 31, 4096, 70_003):
        index = random.randrange(2000)
        if aligned:
            main, grad, place, index = (-(-x // 64) * 64 for x in (main, grad, place, index))
        table.append([main, grad, place, numel, len(table) % 2, index, numel, blocks])
        blocks += (index + numel - 1) // 256 - index // 256 + 1
        main, grad, place = main + numel, grad + numel, place + numel
    # Two states in odd cases: such a step of AdamW has kernels of its own.
    count = 2 if aligned else 3
    full = torch.float64 if dtype == torch.float64 else torch.float32
    states = [torch.zeros(place, dtype=state if full != torch.float64 else full)] * count
    scales = [torch.zeros(blocks)] * count if states[0].dtype == torch.uint8 else []
    row = [0.999, 0.1, 0.9, 0.1, -1e-2, 0.7, 1e-8, 1 / 0.7, 1.0, 0.0, 1.0]
    amsgrad = [*row[:8], -1.0, float(count == 3), 5.0]
    return StepTensors(
        *(torch.randn(main).to(dtype), torch.randn(grad).to(dtype)),
        *([each.clone() for each in states], [each.clone() for each in scales]),
        *(torch.tensor(table), torch.tensor([row, amsgrad], dtype=torch.float64)),
        torch.tensor([0.5]),
    )


def on_device(step: StepTensors, device: torch.device) -> StepTensors:
    states, scales = ([x.to(device) for x in each] for each in (step.states, step.scales))
    moved = StepTensors(*(x.to(device) for x in step[:2]), states, scales, *step[4:])
    others = {name: getattr(step, name).to(device) for name in ("table", "factor")}
    return moved._replace(**others)


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_steps_have_the_bits_of_the_reference(
    cuda: torch.device, dtype: torch.dtype, state: torch.dtype
) -> None:
    for aligned in (True, False):
        wanted = [random_step(dtype, state, aligned) for _ in range(3)]
        ours = [on_device(step, cuda) for step in wanted]
        for _ in range(3):
            run_steps(ours, 2.0, 7)
            step_ops.flat_step_(*step_ops.join_steps(wanted), 2.0, 7)
        for step, other in zip(ours, wanted, strict=True):
            written = [step.main, *step.states, *step.scales]
            truth = [other.main, *other.states, *other.scales]
            for got, want in zip(written, truth, strict=True):
                assert_same_bits(got.cpu(), want)


def test_a_step_does_not_wait_for_the_device(cuda: torch.device) -> None:
    step = random_step(torch.float32, torch.uint8, True)
    ours = on_device(step, cuda)
    run_steps([ours])
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    run_steps([ours])
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
