"""flat_step_ and sum_squares_: the bits of the reference, and those of torch's fused optimizers."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from layerzero.optim import step_ops as R
from tests.harness.checks import assert_close_in_float64
from tests.ops.truth import (
    DTYPES,
    IMPLEMENTATIONS,
    REFUSAL,
    assert_same_bits,
    call,
    concatenate,
    with_threads,
)

NUMEL = 3000
EMPTY = torch.empty(0)
# A part of a block, a small range, a large one, and one whose random bits change half way (2**32).
TABLE = [
    [0, 5, 3, 1, 0, 300, 11, 0],
    [8, 8, 4, 1000, 0, 512, -7, 1],
    [1010, 1012, 1004, 30, 1, 1000, 99, 6],
    [1100, 1100, 1034, 1899, 1, (1 << 32) - 512, 123456789, 9],
]


def call_step(implementation: str, *given: Any) -> None:
    """A step of one flat parameter, given as `StepTensors` has it."""
    count = len(R.StepTensors._fields)
    joined = R.join_steps([R.StepTensors(*given[:count])])
    call(implementation, "flat_step_", *joined, *given[count:])


def adamw_row(
    lr: float, beta1: float, beta2: float, decay: float, step: int, amsgrad: bool, sign: float
) -> list[float]:
    corrections = -lr / (1 - beta1**step), math.sqrt(1 - beta2**step)
    inverse = 1 / math.sqrt(1 - beta2**step)
    options = [1 - lr * decay, 1 - beta1, beta2, 1 - beta2, *corrections, 1e-8, inverse]
    return [*options, sign, float(amsgrad), float(step)]


def rows_of(step: int) -> torch.Tensor:
    rows = [
        adamw_row(1e-2, 0.9, 0.99, 0.1, step, True, 1.0),
        adamw_row(1e-3, 0.4, 0.95, 0.0, step + 4, False, -1.0),
    ]
    return torch.tensor(rows, dtype=torch.float64)


def run_steps(
    implementation: str,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    factor: float | None,
    grad_scale: float,
) -> list[torch.Tensor]:
    """All that three steps write."""
    generator = torch.Generator().manual_seed(0)
    main = torch.randn(NUMEL, generator=generator).to(dtype)
    states = [torch.zeros(NUMEL, dtype=state_dtype) for _ in range(3)]
    scales = [torch.zeros(40) for _ in states] if state_dtype == torch.uint8 else []
    table, factors = torch.tensor(TABLE), EMPTY if factor is None else torch.tensor([factor])
    for step in (1, 2, 3):
        grad = (torch.randn(NUMEL + 10, generator=generator) * 10.0 ** (step - 2)).to(dtype)
        given = (main, grad, states, scales, table, rows_of(step), factors)
        call_step(implementation, *given, grad_scale, 3)
    return [main, *states, *scales]


def settings() -> Iterator[tuple[torch.dtype, torch.dtype]]:
    for dtype in DTYPES:
        smaller = (torch.float32, torch.bfloat16, torch.uint8)
        for state in (torch.float64,) if dtype == torch.float64 else smaller:
            yield dtype, state


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
def test_the_kernel_has_the_bits_of_the_reference(implementation: str) -> None:
    for dtype, state in settings():
        for factor, scale in [(None, 1.0), (0.7, 1024.0)]:
            wanted = run_steps("reference", dtype, state, factor, scale)
            got = run_steps(implementation, dtype, state, factor, scale)
            for ours, theirs in zip(got, wanted, strict=True):
                assert_same_bits(ours, theirs)


def test_one_call_steps_many_flat_parameters_as_calls_of_their_own(implementation: str) -> None:
    def made() -> list[R.StepTensors]:
        torch.manual_seed(0)
        steps = []
        for i, dtype in enumerate([torch.float32, torch.uint8, torch.bfloat16, torch.float32]):
            states = [torch.zeros(NUMEL, dtype=dtype) for _ in range(3)]
            scales = [torch.zeros(40) for _ in states]
            # A row of its own, two, or those of the one before.
            rows = rows_of(1 + i // 2)
            table = torch.tensor(TABLE[1:])[: i + 1]
            tensors = (torch.randn(NUMEL), torch.randn(NUMEL + 10), states, scales)
            steps.append(R.StepTensors(*tensors, table, rows, torch.tensor([0.5])))
        return steps

    together, apart = made(), made()
    joined = R.join_steps(together)
    call(implementation, "flat_step_", *joined, 1.0, 3)
    for step in apart:
        call_step(implementation, *step, 1.0, 3)
    for ours, theirs in zip(together, apart, strict=True):
        written, wanted = ([s.main, *s.states, *s.scales] for s in (ours, theirs))
        for got, want in zip(written, wanted, strict=True):
            assert_same_bits(got, want)
    assert not torch.equal(together[3].main, made()[3].main)
    lists = [*joined]
    for place in range(6) if implementation in IMPLEMENTATIONS[1:] else ():
        shorter = [*lists[:place], lists[place][1:], *lists[place + 1 :]]
        with pytest.raises(REFUSAL, match="flat_step_"):
            call(implementation, "flat_step_", *shorter, 1.0, 3)
    call(implementation, "flat_step_", *[[]] * 6, EMPTY, 1.0, 3)


@pytest.mark.parametrize("numel", [1, 7, 8, 15, 100, 4099])
def test_float32_has_the_bits_of_torchs_fused_adamw(implementation: str, numel: int) -> None:
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("torch's arithmetic is another one on this processor")
    for beta1, amsgrad, maximize in [(0.9, False, False), (0.3, True, True)]:
        generator = torch.Generator().manual_seed(numel)
        theirs = torch.nn.Parameter(torch.randn(numel, generator=generator))
        ours = theirs.detach().clone()
        states = [torch.zeros(numel) for _ in range(2 + amsgrad)]
        optimizer = torch.optim.AdamW(
            [theirs], 1e-2, (beta1, 0.99), weight_decay=0.1, amsgrad=amsgrad, maximize=maximize,
            fused=True,
        )  # fmt: skip
        table = torch.tensor([[0, 0, 0, numel, 0, 0, 0, 0]])
        for step in range(1, 51):
            grad = torch.randn(numel, generator=generator) * 10.0 ** (step % 5 - 2)
            theirs.grad = grad.clone()
            optimizer.step()
            sign = -1.0 if maximize else 1.0
            row = adamw_row(1e-2, beta1, 0.99, 0.1, step, amsgrad, sign)
            rows = torch.tensor([row], dtype=torch.float64)
            given = (ours, grad, states, [], table, rows, EMPTY)
            call_step(implementation, *given, 1.0, 0)
        assert_same_bits(ours, theirs.detach())
        kept = optimizer.state[theirs]
        for state, key in zip(states, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), strict=False):
            assert_same_bits(state, kept[key])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
def test_the_result_does_not_depend_on_the_number_of_threads(implementation: str) -> None:
    numel = 100_003
    table = torch.tensor(
        [[0, 0, 0, 50_001, 0, 77, 5, 0], [50_001, 50_001, 50_001, 50_002, 0, 3, 9, 250]]
    )
    rows = torch.tensor([adamw_row(1e-2, 0.9, 0.99, 0.1, 3, False, 1.0)], dtype=torch.float64)

    def step(dtype: torch.dtype) -> list[torch.Tensor]:
        torch.manual_seed(0)
        main, grad = torch.randn(numel), torch.randn(numel)
        states = [torch.zeros(numel, dtype=dtype) for _ in range(2)]
        scales = [torch.zeros(500) for _ in states] if dtype == torch.uint8 else []
        given = (main, grad, states, scales, table, rows, EMPTY)
        call_step(implementation, *given, 1.0, 0)
        return [main, *states, *scales, R.sum_squares(grad).reshape(1)]

    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        wanted, *others = [step(dtype) for _ in with_threads(1, 2, 3)]
        for ours, theirs in zip(itertools.chain(*others), wanted * 2, strict=True):
            assert_same_bits(ours, theirs)


@pytest.mark.parametrize("signed", [True, False])
def test_eight_bits_are_close_and_survive_a_second_rounding(signed: bool) -> None:
    values = torch.randn(256) if signed else torch.rand(256) ** 4
    values[0] = 0.0
    scale = values.abs().amax().expand(256)
    codes = R.quantize(values, scale, signed)
    decoded = R.dequantize(codes, scale, signed)
    least = scale[0] * 2.0 ** (-16 if signed else -32)
    assert ((decoded - values).abs() <= values.abs() / 16 + least).all()
    assert torch.equal(R.quantize(decoded, scale, signed), codes)
    assert decoded.abs().amax() == scale[0]


def test_rounding_at_random_is_right_on_average() -> None:
    numel = 200_000
    for value in (1.0 + 1 / 1000, -3.3):
        values = torch.full((numel,), value)
        row = [0, 0, 0, numel, 0, 0, 1, 0]
        for dtype in (torch.bfloat16, torch.uint8):
            state, scale = torch.zeros(numel, dtype=dtype), torch.zeros(-(-numel // 256))
            values[::256] = 4.0  # The largest of each block.
            R.store_states([values], [state], [scale], row, 1, 0)
            wide = state.float()
            if dtype == torch.uint8:
                wide = R.dequantize(state, torch.full((numel,), 4.0), signed=True)
            rest = wide[torch.arange(numel) % 256 != 0]
            step = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-2
            assert len(rest.unique()) == 2
            # Five standard deviations of a mean of coin tosses.
            assert abs(rest.double().mean() - value) < 5 * step / math.sqrt(numel)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sum_of_squares_is_taken_in_float64(implementation: str, dtype: torch.dtype) -> None:
    for numel in (0, 1, 17, 4096, 10_001):
        x = torch.randn(numel).to(dtype)
        out, wanted = torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
        call(implementation, "sum_squares_", out, x)
        R.sum_squares_(wanted, x)
        assert_same_bits(out, wanted)
        assert_close_in_float64(out[0], x.double().square().sum())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
def test_what_does_not_fit_is_refused_before_anything_is_written(implementation: str) -> None:
    main, grad = torch.ones(10), torch.ones(10)
    states = [torch.zeros(10), torch.zeros(10)]
    table = torch.tensor([[0, 0, 0, 10, 0, 0, 0, 0]])
    rows = torch.tensor([adamw_row(1e-2, 0.9, 0.99, 0.1, 1, False, 1.0)], dtype=torch.float64)
    good = [main, grad, states, [], table, rows, EMPTY, 1.0, 0]
    amsgrad = rows.clone()
    amsgrad[0, R.FLAG] = 1.0
    outside = table.clone()
    outside[0, R.GRAD] = 1
    for place, value in [
        (1, grad.double()),
        (2, [states[0]]),
        (2, [states[0], states[1].bfloat16()]),
        (2, [states[0], torch.zeros(9)]),
        (4, outside),
        (4, table.int()),
        (5, torch.zeros(0, R.ROW_COLUMNS, dtype=torch.float64)),
        (5, rows.float()),
        (5, amsgrad),
    ]:
        arguments = [*good]
        arguments[place] = value
        with pytest.raises(REFUSAL, match="flat_step_"):
            call_step(implementation, *arguments)
    assert torch.equal(main, torch.ones(10)) and not states[0].any()
    call_step(implementation, *good)
    assert not torch.equal(main, torch.ones(10))


def test_ops_pass_opcheck() -> None:
    rows = torch.tensor([adamw_row(1e-2, 0.9, 0.99, 0.1, 1, False, 1.0)], dtype=torch.float64)
    table = torch.tensor([[0, 0, 0, 10, 0, 0, 0, 0]])
    tensors = R.StepTensors(
        *(torch.ones(10), torch.ones(10), [torch.zeros(10), torch.zeros(10)], []),
        *(table, rows, EMPTY),
    )
    other = tensors._replace(main=torch.ones(10), states=[torch.ones(10)] * 2)
    segs, parts = concatenate([5, 0, 12], alignment=8, multiple=32), [torch.randn(10)] * 2
    for op, arguments in {
        "flat_step_": (*R.join_steps([tensors, other]), 1.0, 0),
        "sum_squares_": (torch.zeros(1, dtype=torch.float64), torch.ones(5)),
        "pack_": (torch.zeros(32), [torch.randn(n) for n in (5, 0, 12)], segs.table, 0.3),
        "ordered_sum_": (torch.zeros(10, dtype=torch.bfloat16), parts, 0.5),
        "word_sums_": (torch.zeros(2, dtype=torch.int64), parts),
    }.items():
        torch.library.opcheck(getattr(torch.ops.layerzero, op).default, arguments)
