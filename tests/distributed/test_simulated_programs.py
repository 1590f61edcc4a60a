"""Programs that the benchmarks record from the engine are those of the engine."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from layerzero import ZeRO3
from tests.harness.checks import of_floats
from tests.harness.fake_ranks import run_fake_ranks
from tests.harness.pages import REPOSITORY
from tests.harness.ranks import run_ranks

WIDTH, LAYERS = 8, 3
P = LAYERS * WIDTH * WIDTH * 4
GATHERED = (2 * LAYERS - 1) * WIDTH * WIDTH * 4
"""g P: the last unit is gathered once."""


MODES: list[tuple[dict[str, Any], float]] = [
    # n = K = 2, G = P: docs/reference/layered.md.
    ({"zero3_size": 2}, (GATHERED + P) / 2 + (P + P) / 2 / 2),
    ({"zero3_size": 2, "outer": "replicate"}, (GATHERED + P) / 2 + 2 * P / 2 / 2),
    ({"zero3_size": 2, "outer": "shard"}, (GATHERED + P) * 3 / 4),
    ({"zero3_size": 1}, (P + P) * 3 / 4),
]


def _record() -> list[Any]:
    sys.path.insert(0, str(REPOSITORY / "benchmarks"))
    from dry_run import Recorder

    recorder = Recorder()
    programs = []
    with recorder.attached():
        for options, _ in MODES:
            layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
            model = ZeRO3(nn.Sequential(*layers), auto_wrap_policy={nn.Linear}, **options)

            def step(model: nn.Module = model) -> None:
                model(torch.ones(1, WIDTH)).sum().backward()

            programs.append([recorder.step(step) for _ in range(3)][-1])
    return programs


def test_programs_send_the_bytes_of_the_formulas_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    from simulator import Link, Machines, MessageCosts, Post, simulate

    ranks = run_fake_ranks(range(4), 4, _record)
    for number, (options, sent) in enumerate(MODES):
        programs = {rank: programs[number] for rank, programs in enumerate(ranks)}
        for rank, program in programs.items():
            posts = [o for thread in program.values() for o in thread if isinstance(o, Post)]
            weights = [post for post in posts if "presence" not in post.collective]
            assert sum(sum(post.sends.values()) for post in weights) == sent, options
            assert all(rank in post.ranks and rank not in post.sends for post in posts)
        # Each rank posts what its peers wait for: else threads would wait forever.
        costs = MessageCosts(1e-5, 1e-5, 1e-9, 1e-5, 1e-9)
        result = simulate(programs, Machines(4, 2, Link(1e-5), Link(1e-5)), costs)
        assert result.step_s > result.core_s / 2 > 0


def _sent_at_scale(node_size: int, ranks: int) -> dict[str, dict[int, float]]:
    """For each mode: bytes that a rank sends in all over groups of each size."""
    dist.destroy_process_group()
    sys.path.insert(0, str(REPOSITORY / "benchmarks"))
    from device_program import Unit, on_device, record
    from simulator import Post

    result = {}
    for outer in ("zero1", "replicate", "shard"):
        recorded = record(LAYERS, outer, 2, torch.bfloat16, torch.float32)
        units = [Unit(NUMEL, 1.0, 2.0)] * LAYERS
        program = on_device(recorded, units, ranks, node_size, host_s=0.0)
        sent: dict[int, float] = {}
        for operation in (o for thread in program.values() for o in thread):
            if isinstance(operation, Post) and "presence" not in operation.collective:
                size = len(operation.ranks)
                sent[size] = sent.get(size, 0.0) + sum(operation.sends.values())
        result[outer] = sent
    return result


NUMEL = 1 << 20


def test_bytes_at_scale_are_those_of_the_formulas() -> None:
    node, nodes = 8, 4
    sent = run_ranks(1, _sent_at_scale, node, node * nodes)[0]
    gathered = (2 * LAYERS - 1) * NUMEL * 2
    p, g = LAYERS * NUMEL * 2, LAYERS * NUMEL * 4
    inside = (gathered + g) * 7 / 8
    assert sent["zero1"] == of_floats({8: inside, 4: (p + g) / 8 * 3 / 4})
    assert sent["replicate"] == of_floats({8: inside, 4: 2 * g / 8 * 3 / 4})
    assert sent["shard"] == of_floats({32: (gathered + g) * 31 / 32})
