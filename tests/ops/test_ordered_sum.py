"""ordered_sum_: bits of a sum that is taken in the order of the list, whatever runs it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from layerzero.ops import ordered_sum_
from tests.ops.truth import (
    DTYPES,
    assert_same_bits,
    call,
    narrowed,
    widened,
    with_threads,
)

CANARY = 7.0


def expected(parts: Sequence[torch.Tensor], dtype: torch.dtype, scale: float) -> torch.Tensor:
    total = widened(parts[0].contiguous()).copy()
    with np.errstate(all="ignore"):
        for part in parts[1:]:
            total += widened(part.contiguous())
        if scale != 1.0:
            total *= total.dtype.type(scale)
    return narrowed(total, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("part_dtype", DTYPES, ids=str)
def test_every_dtype_pair_has_the_bits_of_the_contract(
    implementation: str, part_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    for numel, count, scale in [
        (0, 2, 1.0),
        (1, 1, 0.3),
        (513, 2, 0.5),
        (4099, 3, 1 / 3),
        (70, 9, 1.0),
    ]:
        parts = [(torch.randn(numel + 1) * 10**i).to(part_dtype)[1:] for i in range(count)]
        buffer = torch.full((numel + 20,), CANARY, dtype=dtype)
        out = buffer[3 : 3 + numel]
        call(implementation, "ordered_sum_", out, parts, scale)
        assert_same_bits(out, expected(parts, dtype, scale))
        assert (buffer[:3] == CANARY).all() and (buffer[3 + numel :] == CANARY).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out_may_be_any_one_of_the_parts(implementation: str, dtype: torch.dtype) -> None:
    for place in range(4):
        parts = [torch.randn(1200).to(dtype) for _ in range(4)]
        wanted = expected(parts, dtype, 0.25)
        call(implementation, "ordered_sum_", parts[place], parts, 0.25)
        assert_same_bits(parts[place], wanted)


def test_one_tensor_may_be_several_parts(implementation: str) -> None:
    part = torch.randn(700)
    wanted = expected([part, part, part], torch.float32, 1.0)
    call(implementation, "ordered_sum_", part, [part, part, part], 1.0)
    assert_same_bits(part, wanted)


def test_the_sum_does_not_depend_on_the_number_of_threads(implementation: str) -> None:
    parts = [torch.randn(300_001) * 10**i for i in range(5)]
    wanted = expected(parts, torch.bfloat16, 0.2)
    for _ in with_threads(1, 2, 3):
        out = torch.empty(300_001, dtype=torch.bfloat16)
        call(implementation, "ordered_sum_", out, parts, 0.2)
        assert_same_bits(out, wanted)


def test_parts_of_any_strides_are_read_in_the_order_of_their_shape(implementation: str) -> None:
    parts = [torch.randn(9, 12).t(), torch.randn(12, 18)[:, ::2], torch.randn(108)]
    out = torch.empty(108)
    call(implementation, "ordered_sum_", out, parts, 1.0)
    assert_same_bits(out, expected([part.reshape(-1) for part in parts], torch.float32, 1.0))


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("none", "at least one part"),
        ("size", "part 1 has 7 elements, out has 8"),
        ("dtype", r"float32 \(part 0\) and (torch\.)?bfloat16 \(part 1\)"),
        ("integers", "part 0 must be"),
        ("shifted", "out overlaps part 1: bytes"),
        ("other dtype", "out overlaps part 0: bytes"),
        ("device", "part 1 is on meta, out is on cpu"),
        ("freed", "part 0 holds 0 bytes, the tensor needs 32"),
    ],
)
def test_bad_input_is_refused_with_its_values_and_nothing_is_written(
    implementation: str, case: str, text: str
) -> None:
    buffer = torch.zeros(32)
    freed = torch.ones(8)
    freed.untyped_storage().resize_(0)
    out = buffer[:8]
    one = torch.ones(8)
    parts = {
        "none": [],
        "size": [one, torch.ones(7)],
        "dtype": [one, one.bfloat16()],
        "integers": [one.int()],
        "shifted": [one, buffer[4:12]],
        "other dtype": [buffer.view(torch.bfloat16)[:8]],
        "device": [one, one.to("meta")],
        "freed": [freed],
    }[case]
    with pytest.raises(ValueError, match=text):
        call(implementation, "ordered_sum_", out, parts, 1.0)
    assert not buffer.any()


def test_the_wrapper_returns_out_and_moves_its_version() -> None:
    out = torch.empty(2)
    version = out._version
    assert ordered_sum_(out, [torch.ones(2), torch.ones(2)], 0.5) is out
    assert out.tolist() == [1, 1] and out._version > version


def test_opcheck_passes() -> None:
    parts = [torch.randn(40) for _ in range(3)]
    for out in (torch.zeros(40), torch.zeros(40, dtype=torch.bfloat16)):
        torch.library.opcheck(torch.ops.layerzero.ordered_sum_.default, (out, parts, 0.5))


def test_a_compiled_graph_holds_the_op_whole() -> None:
    def step(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        torch.ops.layerzero.ordered_sum_(out, [a + 1, b], 0.5)
        return out * 2

    a, b = torch.randn(9), torch.randn(9)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(torch.zeros(9), a, b), step(torch.zeros(9), a, b))


def test_complex_parts_are_added_in_order() -> None:
    parts = [torch.randn(5, dtype=torch.complex64) for _ in range(3)]
    wanted = ((parts[0] + parts[1]) + parts[2]) * 0.5
    out = ordered_sum_(torch.empty(5, dtype=torch.complex64), parts, 0.5)
    assert torch.equal(out, wanted)
    assert torch.equal(ordered_sum_(parts[0], parts, 0.5), wanted)
    with pytest.raises(ValueError, match="part 1 has 4 elements, out has 5"):
        ordered_sum_(out, [parts[1], parts[2][:4]])
    with pytest.raises(ValueError, match="must be complex64"):
        ordered_sum_(out, [torch.ones(5)])
