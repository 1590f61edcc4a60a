"""What plain torch allows and sharding would drop in silence is refused, or told once."""

from __future__ import annotations

import gc
import io
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import layerzero
from layerzero import MixedPrecision, ZeRO3, notices
from tests.harness.internals import root_state
from tests.harness.models import WIDTH, Block, Mlp
from tests.harness.ranks import run_ranks
from tests.harness.reference import full_gradients


def wrapped(build: Callable[[], nn.Module] = Mlp, **options) -> ZeRO3:
    torch.manual_seed(0)
    options.setdefault("auto_wrap_policy", {Block})
    return ZeRO3(build(), timeout=timedelta(seconds=20), **options)


def batch() -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))


class Writes(nn.Module):
    """Changes a parameter in its forward, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(4, WIDTH, max_norm=0.1 if how == "max_norm" else None)
        self.codes = nn.Parameter(torch.zeros(2, WIDTH), requires_grad=how == "replaced")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "in place":
            with torch.no_grad():
                self.linear.weight.clamp_(-0.01, 0.01)
        elif self.how == "data":
            self.codes.data.copy_(x[:2].detach())
        elif self.how == "replaced":
            self.codes = nn.Parameter(self.codes * 0.5 + 1)
        row = self.table(torch.tensor([1]))
        return self.linear(x) + self.codes.mean() + row


def _writes(how: str, name: str, verb: str) -> None:
    model = wrapped(lambda: Writes(how), auto_wrap_policy=None)
    before = [sharded_param.detach().clone() for sharded_param in model.parameters()]
    with pytest.raises(RuntimeError, match=rf"the forward {verb}.*{name!r}.*summon_full_params"):
        model(batch())
    assert all(map(torch.equal, before, model.parameters()))
    model.module.how = "nothing"
    model.module.table.max_norm = None
    model(batch()).sum().backward()  # the error left the model as it was
    assert model.module.linear.weight.grad is not None


def _all_writes() -> None:
    _writes("in place", "linear.weight", "wrote into")
    _writes("max_norm", "table.weight", "wrote into")
    _writes("data", "codes", "wrote into")
    _writes("replaced", "codes", "replaced")


def test_a_forward_that_changes_its_parameters_is_refused() -> None:
    run_ranks(2, _all_writes)


def _keeps_what_is_whole() -> None:
    model = wrapped(lambda: Writes("in place"), auto_wrap_policy=None)
    model(batch())
    assert model.module.linear.weight.abs().max() <= 0.01


def test_on_one_rank_parameters_are_whole_and_may_be_changed() -> None:
    run_ranks(1, _keeps_what_is_whole)


def _kept_by_a_hook() -> None:
    model = wrapped()
    kept: list[torch.Tensor] = []
    hook = model.module.stem.register_forward_hook(lambda *each: kept.append(each[2]))
    model(batch())
    kept[0].sum().backward()
    with pytest.raises(RuntimeError, match=r"gradients of 'stem\.weight'.*return that"):
        model(batch())
    hook.remove()
    model(batch()).sum().backward()
    expected = wrapped()
    expected(batch()).sum().backward()
    for name, gradient in full_gradients(expected).items():
        assert torch.equal(full_gradients(model)[name], gradient), "what was dropped stays away"


def test_gradients_that_came_another_way_are_refused_at_the_next_forward() -> None:
    run_ranks(2, _kept_by_a_hook)


def _penalty(power: int) -> tuple[list[str], bool]:
    model = wrapped(lambda: nn.Linear(8, 8))  # each rank has a part of the weight
    torch.manual_seed(0)
    plain = nn.Linear(8, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for each in (model, plain):
            penalty = sum(p.norm() if power == 1 else p.square().sum() for p in each.parameters())
            (each(torch.ones(3, 8)).sum() + 0.1 * penalty).backward()
    gradients = full_gradients(model)
    is_right = all(torch.allclose(gradients[name], p.grad) for name, p in plain.named_parameters())
    return [str(each.message) for each in caught], is_right


def test_a_penalty_on_shards_warns_on_the_first_rank() -> None:
    (norms, is_right), (others, _) = run_ranks(2, _penalty, 1)
    assert not is_right and others == []
    (told,) = norms
    assert "was used outside the forward of its unit" in told and "wrong for norms" in told


def _hooked() -> list[str]:
    model = wrapped()
    for sharded_param in model.parameters():
        sharded_param.register_hook(lambda gradient: gradient * 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(batch()).sum().backward()
    return [str(each.message) for each in caught]


def test_gradients_of_shards_with_hooks_warn_of_nothing() -> None:
    assert run_ranks(2, _hooked) == [[], []]


def test_an_l2_penalty_on_shards_is_right() -> None:
    assert all(is_right for _, is_right in run_ranks(2, _penalty, 2))


def _backward_to_inputs() -> None:
    model, x = wrapped(), batch().requires_grad_()
    for inputs in (list(model.parameters()), model.parameters(), next(model.parameters())):
        with pytest.raises(NotImplementedError, match=r"are sharded.*Leave `inputs` out"):
            model(x).sum().backward(inputs=inputs)
    assert all(each.grad is None for each in model.parameters())
    model(x).sum().backward(inputs=[x])
    assert x.grad is not None and all(each.grad is None for each in model.parameters())
    # In torch's way: a penalty, whose graph has the sharded parameters themselves.
    owned = [each for each in model.parameters() if each.numel()]
    for _ in range(2):  # The second time it adds to `.grad`.
        torch.autograd.backward([sum(each.square().sum() for each in owned)], inputs=owned)
    assert all(torch.equal(each.grad, 4 * each) for each in owned)
    model.zero_grad()
    model(x).sum().backward()
    assert all(each.grad is not None for each in model.parameters())


@pytest.mark.filterwarnings("ignore:.*a gradient was computed for")
def test_a_backward_to_sharded_parameters_alone_is_refused() -> None:
    run_ranks(2, _backward_to_inputs)


def _asks_for_gradients() -> None:
    model, x = wrapped(), batch().requires_grad_()
    sharded_params = list(model.parameters())
    before = [each.detach().clone() for each in sharded_params]
    refused = pytest.raises(NotImplementedError, match=r"autograd\.grad: .*are sharded")
    for options in ({}, {"allow_unused": True}, {"materialize_grads": True}):
        for inputs in (sharded_params, iter(sharded_params), sharded_params[0]):
            with refused:
                torch.autograd.grad(model(x).sum(), inputs, **options)
        with refused:
            torch.autograd.grad(inputs=[x, *sharded_params], outputs=model(x).sum(), **options)
    assert all(map(torch.equal, before, sharded_params))
    unused = torch.ones(2, requires_grad=True)
    slope, zeros = torch.autograd.grad(model(x).sum(), [x, unused], materialize_grads=True)
    assert slope.abs().sum() > 0 and torch.equal(zeros, torch.zeros(2))
    # A penalty, whose graph has the sharded parameters themselves.
    owned = [each for each in sharded_params if each.numel()]
    for options in ({}, {"allow_unused": True}, {"materialize_grads": True}):
        penalty = sum(each.square().sum() for each in owned)
        found = torch.autograd.grad(penalty, [*owned, unused] if options else owned, **options)
        assert all(torch.equal(g, 2 * p) for g, p in zip(found, owned, strict=False))
        if options:
            assert found[-1] is None if "allow_unused" in options else not found[-1].any()
    model(x).sum().backward()
    assert all(each.grad is not None for each in sharded_params)


@pytest.mark.filterwarnings("ignore:.*a gradient was computed for")
def test_gradients_of_sharded_parameters_asked_of_autograd_are_refused() -> None:
    run_ranks(2, _asks_for_gradients)


def _scriptable(x: torch.Tensor) -> torch.Tensor:
    """What the engine replaces, for TorchScript, which knows operators by the functions' ids."""
    x.requires_grad_()
    norms = torch.norm(x, dim=-1) + torch.linalg.norm(x) + torch.linalg.vector_norm(x) + x.norm()
    (found,) = torch.autograd.grad([norms.sum()], [x])
    assert found is not None
    torch.autograd.backward([found.sum() * x.sum()])
    return norms


def _takes_norms() -> dict[str, list[str]]:
    model = _wide({})
    x = torch.ones(3, 24)
    model(x).sum().backward()
    first = next(model.parameters())
    ways: dict[str, Callable[[], object]] = {
        "gradient": lambda: first.grad.norm(),
        "detached": lambda: first.grad.detach().data.norm(2).item(),
        "value": lambda: torch.norm(first),
        "data": lambda: nn.functional.normalize(first.data, dim=0),
        "linalg": lambda: torch.linalg.norm(first.grad),
        "vector_norm": lambda: torch.linalg.vector_norm(first.detach()),
        "foreach": lambda: torch._foreach_norm([x, *(p.grad for p in model.parameters())]),
        "engine": lambda: layerzero.global_norm(model),
        "clip": lambda: model.clip_grad_norm_(1.0),
        "others": lambda: torch.ones(first.numel()).norm() + x.norm(dim=1),
        "transformed": lambda: torch.func.vmap(torch.norm)(torch.ones(2, first.numel())),
        "scripted": lambda: torch.jit.script(_scriptable)(x.clone()),
    }
    told = {}
    for way, take in ways.items():
        with mock.patch.object(notices, "_issued", set()):
            torch.optim.SGD(model.parameters(), lr=0.1)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                # Of TorchScript itself.
                warnings.simplefilter("ignore", DeprecationWarning)
                take()
                take()
            told[way] = [str(each.message) for each in caught]
    return told


def test_norms_of_shards_taken_by_hand_warn_once() -> None:
    first, others = run_ranks(2, _takes_norms)
    assert not any(others.values())
    for way, told in first.items():
        if way in ("engine", "clip", "others", "transformed", "scripted"):
            assert not told, way
        else:
            assert len(told) == 1, way
            assert "that of this rank's part" in told[0] and "global_norm(model)" in told[0]
    (alone,) = run_ranks(1, _takes_norms)
    assert not any(alone.values())


def _edit(how: str, model: ZeRO3) -> None:
    """What a program does to gradients and weights between backward and step."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None and p.numel()]
    if how == "clipped":
        total = sum(g.pow(2).sum() for g in gradients).sqrt().item()
        for g in gradients:
            g.mul_(min(1, 1e-3 / total))
    elif how == "normalised":
        for p in model.parameters():
            p.grad = p.grad / (p.grad.square().mean() + 1e-12).sqrt()
    elif how == "centred":
        for g in gradients:
            g.sub_(g.mean())
    elif how == "weights normalised":  # As nGPT does after each step, here by hand.
        for p in model.parameters():
            p.data.mul_(0.1 / (p.data.square().mean() + 1e-12).sqrt())
    elif how == "weights to a norm":
        with torch.no_grad():
            weights = list(model.parameters())
            norm = sum(w.square().sum() for w in weights).sqrt()
            for w in weights:
                w.div_(norm)
    elif how == "weights normalised right":
        for p in model.parameters():
            p.data.mul_(0.1 / layerzero.global_norm(p))
    elif how == "weights, row by row":
        with model.summon_full_params():
            for p in model.parameters():
                p.data.mul_(torch.tensor([[0.5], [2.0]]))
    elif how == "weights by element":
        for p in model.parameters():
            p.data.clamp_(-0.05, 0.05).add_(torch.randn(p.numel()), alpha=1e-3 * dist.get_rank())
    elif how == "clipped right":
        total = sum(g.pow(2).sum() for g in gradients)
        dist.all_reduce(total)
        for g in gradients:
            g.mul_(1e-3 / total.sqrt())
    elif how == "clipped by the engine":
        model.clip_grad_norm_(1e-3)
    elif how == "by element":
        for g in gradients:
            g.clamp_(-1e-6, 1e-6).add_(torch.randn(len(g)), alpha=1e-3 * dist.get_rank())


def _steps(how: str, num_steps: int = 17) -> list[str]:
    """Warnings of some steps, in which ranks decide by what each of them sees."""
    model, rank = _wide({}), dist.get_rank()
    if how == "weights, row by row":  # Each rank holds one row.
        model = wrapped(lambda: nn.Linear(32, 2, bias=False), auto_wrap_policy=None)
    sharded_params = list(model.parameters())
    width = sharded_params[0].layerzero.shape[-1]
    groups = [{"params": [p], "lr": 0.1 / (1 + p.numel())} for p in sharded_params]
    alike = [{"params": [p], "lr": 2.4 / p.layerzero.shape[-1]} for p in sharded_params]
    optimizer = torch.optim.SGD(groups if how == "sizes of shards" else alike)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    optimizers: list[torch.optim.Optimizer] = [optimizer]
    if not how.startswith("weights"):  # What another one adds to weights would hide the factor.
        optimizers.append(torch.optim.AdamW(sharded_params, lr=1e-4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(num_steps):
            model(torch.ones(3, width)).square().mean().backward()
            _edit(how, model)
            if how != "left out" or number != 2 or rank == 0:
                for each in optimizers:
                    each.step()
            optimizer.zero_grad()
            plateau.step(5 if how == "plateau" and number == 1 and rank == 1 else -number)
            # The first rank compares once the others have put their notes: after a left-out step
            # in the next round.
            for first in (False, True):
                threads = [t for t in threading.enumerate() if t.name == "layerzero-steps"]
                for thread in threads if first == (rank == 0) else ():
                    thread.join(2)
                dist.barrier()
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("how", ["sizes of shards", "plateau", "left out", "alike"])
def test_ranks_that_step_differently_are_told_once(how: str) -> None:
    said = {
        "sizes of shards": r"SGD, step 1: '\d\.weight' has .*'lr'.* on rank 0, and .* on rank 1",
        "plateau": r"SGD, step \d: '0\.weight' has .*'lr'.* on rank 0, and .* on rank 1",
        "left out": r"(SGD|AdamW), step \d: rank 1 has left out steps",
    }
    first, second = run_ranks(2, _steps, how)
    assert second == []
    if how == "alike":
        assert first == []
    else:
        (told,) = first
        assert re.search(said[how], told), told


_EDITS = {
    "clipped": r"all gradients became 0\.\d+ times as large on rank 0, and 0\.\d+ .* rank 1, as by",
    "normalised": r"gradient of '\d\.\w+' became \S+ times as large on rank 0, and .* on rank 1",
    "centred": r"gradient of '\d\.\w+' became 1 times as large and \S+ (larger|smaller) on rank 0",
    "weights normalised": r"since the step before the weight of '\d\.\w+' became \S+ times as "
    r"large on rank 0, and \S+ times as large on rank 1",
    "weights to a norm": r"since the step before all weights became \S+ times as large on rank 0",
    "weights normalised right": None,
    "weights, row by row": None,
    "weights by element": None,
    "clipped right": None,
    "clipped by the engine": None,
    "by element": None,
}


def _all_edits() -> dict[str, list[str]]:
    told = {}
    for how in _EDITS:
        with mock.patch.object(notices, "_issued", set()):
            told[how] = _steps(how, num_steps=3)
    return told


def test_what_each_rank_multiplies_by_a_number_of_its_own_is_told_once() -> None:
    first, second = run_ranks(2, _all_edits)
    for how, expected in _EDITS.items():
        assert second[how] == []
        if expected is None:
            assert first[how] == [], how
        else:
            (told,) = first[how]
            assert re.search(expected, told), told
            here, there = re.findall(r"became (.+?) on rank 0, and (.+?) on rank 1", told)[0]
            assert here != there, told


def _two_steps() -> list[str]:
    """What a program is told that ends before the step at which it would be."""
    model = _wide({})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(3, 24)).square().mean().backward()
            _edit("clipped", model)
            optimizer.step()
        threads = [t for t in threading.enumerate() if t.name == "layerzero-steps"]
        for thread in threads:
            thread.join(2)
        assert not caught
        del optimizer
        gc.collect()
    return [str(each.message) for each in caught]


def test_unlike_steps_at_the_end_of_a_program_are_told_with_its_optimizer() -> None:
    first, second = run_ranks(2, _two_steps)
    (told,) = first
    assert "step 2: between backward and step all gradients became" in told
    assert second == []


def _averages_by_hand() -> None:
    """As tutorials on data parallelism do it; where parts have equal sizes, and where one rank has
    nothing of a parameter."""
    for model, x in ((_wide({}), torch.ones(3, 24)), (wrapped(), batch())):
        before = [each.detach().clone() for each in model.parameters()]
        with pytest.raises(RuntimeError, match=r"broadcast of .*, which is sharded.* remove the"):
            for each in model.parameters():
                dist.broadcast(each.data, 0)
        model(x).sum().backward()
        gradients = [each.grad.clone() for each in model.parameters()]
        for of in (lambda p: p.grad, lambda p: p.grad.data):
            with pytest.raises(RuntimeError, match=r"all_reduce of .*, which is .*averaged"):
                for each in model.parameters():
                    dist.all_reduce(of(each), op=dist.ReduceOp.SUM)
        assert all(map(torch.equal, before, model.parameters()))
        found = [each.grad for each in model.parameters()]
        assert all(map(torch.equal, gradients, found))
    other = torch.ones(24 * 12)  # As large as a part, and not one.
    dist.all_reduce(other)
    assert other[0] == dist.get_world_size()


def test_gradients_averaged_by_hand_are_refused() -> None:
    run_ranks(2, _averages_by_hand)


def _saves_parts() -> dict[str, list[str]]:
    """As scripts save what they have trained."""
    from layerzero import checkpoint  # Other tests here must not need it.

    model = _wide({})
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 24)).sum().backward()
    optimizer.step()
    full = checkpoint.get_model_state_dict(model, full=True, cpu_offload=True)
    own = {name: p for name, p in model.named_parameters() if p.requires_grad}
    ways: dict[str, object] = {
        "parameters": own,
        "values": {"step": 1, "model": [p.data for p in model.parameters()]},
        "detached": {name: p.detach().cpu() for name, p in own.items()},
        "state dicts": {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        "full": full,
        "others": {"x": torch.ones(next(model.parameters()).numel())},
    }
    told = {}
    for way, obj in ways.items():
        with (
            mock.patch.object(notices, "_issued", set()),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            for _ in range(2):
                torch.save(obj, io.BytesIO())
        told[way] = [str(each.message) for each in caught]
    return told


def test_parts_saved_as_if_they_were_whole_are_told_once() -> None:
    first, second = run_ranks(2, _saves_parts)
    assert not any(second.values())
    for way, told in first.items():
        if way in ("parameters", "values", "detached"):
            assert len(told) == 1, way
            assert "this rank's part of '0.weight'" in told[0]
            assert "get_model_state_dict(model, full=True)" in told[0]
        else:
            assert not told, way
    (alone,) = run_ranks(1, _saves_parts)
    assert not any(alone.values())


def _averages_metrics() -> float:
    """When an outer wrapper was deleted, and something keeps what was inside it."""
    inner = ZeRO3(nn.Linear(24, 24))
    kept = root_state(inner)
    outer = ZeRO3(nn.Sequential(inner, nn.Linear(24, 24)))
    metrics = torch.ones(24)
    del outer
    gc.collect()
    dist.all_reduce(metrics)
    assert kept.units
    return metrics.mean().item()


def test_tensors_of_others_may_be_averaged_once_a_wrapper_is_gone() -> None:
    assert run_ranks(2, _averages_metrics) == [2.0, 2.0]


_SAVES = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch import nn
import layerzero
_, rank, folder = sys.argv
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=2)
torch.manual_seed(0)
model = layerzero.ZeRO3(nn.Sequential(nn.Linear(24, 24, bias=False)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
model(torch.randn(2, 24)).square().sum().backward()
optimizer.step()
[state] = optimizer.state.values()
before = state["exp_avg"].clone()
dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=f"{folder}/saved")
state["exp_avg"].zero_()
entries = optimizer.state_dict()
dcp.load({"optimizer": entries}, checkpoint_id=f"{folder}/saved")
optimizer.load_state_dict(entries)
[state] = optimizer.state.values()
assert before.abs().sum() > 0 and torch.equal(state["exp_avg"], before), "another rank's state"
dist.destroy_process_group()
"""


def test_optimizer_states_are_shards_for_torch_whatever_was_imported(tmp_path: Path) -> None:
    """In processes of their own: nothing here may import `layerzero.checkpoint`."""
    command = [sys.executable, "-W", "ignore", "-c", _SAVES]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=100)
        assert rank.returncode == 0, errors


def _averages_over_replicas() -> None:
    """Ranks 0 and 2 hold the same part, and so do 1 and 3."""
    model = _wide({"zero3_size": 2, "outer": "replicate"})
    model(torch.ones(3, 24)).sum().backward()
    replicas = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][dist.get_rank() % 2]
    for each in model.parameters():
        before = each.grad.clone()
        dist.all_reduce(each.grad, dist.ReduceOp.SUM, replicas)
        assert torch.equal(each.grad, 2 * before)
        with pytest.raises(RuntimeError, match="which is sharded"):
            dist.all_reduce(each.grad)


def test_parts_may_be_averaged_over_ranks_that_hold_the_same() -> None:
    run_ranks(4, _averages_over_replicas)


def _wide(options: dict[str, object]) -> ZeRO3:
    """Each rank has more of each weight than torch draws one by one."""

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(24, 24, bias=place > 0) for place in range(3)))

    return wrapped(build, auto_wrap_policy={nn.Linear}, **options)


def _initialises(how: str, options: dict[str, object]) -> list[str]:
    """Warnings of the first two steps of a model that is initialised after it was wrapped."""
    model, x = _wide(options), torch.ones(3, 24)
    told: list[str] = []
    torch.manual_seed(1 + (dist.get_rank() if how == "other seeds" else 0))

    def initialise(module: nn.Module) -> None:
        if not isinstance(module, nn.Linear):
            return
        if module.bias is not None:
            nn.init.zeros_(module.bias)
        if how in ("normal_", "trunc_normal_", "uniform_"):
            getattr(nn.init, how)(module.weight)
        elif how == "data":
            module.weight.data.normal_()
        elif how != "zeros":
            module.weight.detach().normal_()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if how == "loaded":
            other = _wide(options)
            with torch.no_grad(), other.summon_full_params():
                other.apply(initialise)
            model.load_state_dict(other.state_dict())
        elif how == "full":
            with model.summon_full_params():
                model.apply(initialise)
        elif how != "not":
            model.apply(initialise)
        with torch.no_grad():
            model(x)  # An evaluation before does not count as the first forward.
        for _ in range(2):
            model(x).sum().backward()
    told += [str(each.message) for each in caught]
    return told


def _initialises_in_all_ways() -> dict[str, list[str]]:
    modes = {
        "float32": {},
        "bfloat16": {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
        "zero3_size=1": {"zero3_size": 1, "outer": "shard"},
        "replicas": {"zero3_size": 1, "outer": "replicate"},
    }
    ways = ["normal_", "trunc_normal_", "uniform_", "data", "drawn"]
    ways += ["other seeds", "full", "zeros", "loaded", "not"]
    told = {}
    for mode, options in modes.items():
        for how in ways:
            with mock.patch.object(notices, "_issued", set()):
                told[f"{mode}, {how}"] = _initialises(how, options)
    return told


@pytest.mark.parametrize("world_size", [2, 4])
def test_equal_numbers_drawn_for_unequal_parts_warn_once(world_size: int) -> None:
    """Whatever draws them, in all modes that split the weights; and nothing else does."""
    first, *others = run_ranks(world_size, _initialises_in_all_ways)
    draws = ("normal_", "trunc_normal_", "uniform_", "data", "drawn")
    for case, told in first.items():
        if case.endswith(draws) and not case.startswith("replicas"):
            assert len(told) == 1, case
            assert "begin with the same numbers" in told[0] and "summon_full_params" in told[0]
        else:
            assert not told, case
    assert not any(told for other in others for told in other.values())


def _refused_around() -> None:
    model = wrapped()
    sharded_params = list(model.parameters())
    with pytest.raises(TypeError, match=r"ZeroRedundancyOptimizer was given.*torch\.optim\.AdamW"):
        ZeroRedundancyOptimizer(sharded_params, torch.optim.SGD, lr=0.1)
    before = [sharded_param.detach().clone() for sharded_param in sharded_params]
    for module in (model, model.module):
        with pytest.raises(RuntimeError, match="remove DistributedDataParallel"):
            DistributedDataParallel(module)
    assert all(map(torch.equal, before, sharded_params))
    # Of equal sizes on both ranks, or torch finds out itself.
    inside = nn.Sequential(ZeRO3(nn.Linear(8, 8, bias=False)), nn.Linear(8, 1))
    around = DistributedDataParallel(inside)
    with pytest.raises(RuntimeError, match="inside a module that DistributedDataParallel wraps"):
        around(torch.ones(3, 8))
    inside = nn.Sequential(ZeRO3(nn.Linear(8, 8, bias=False)), nn.Linear(8, 1))
    ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(inside, ["0.weight"])
    around = DistributedDataParallel(inside)
    around(torch.ones(3, 8)).sum().backward()
    assert inside[0].weight.grad is not None and inside[1].weight.grad is not None
    with pytest.raises(NotImplementedError, match=r"torch\.func transforms"):
        torch.func.vmap(model)(batch())


def test_engines_that_would_mix_up_shards_are_refused() -> None:
    run_ranks(2, _refused_around)


def _scaled(scaler: type[torch.amp.GradScaler]) -> list[str]:
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = scaler("cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            scaler.scale(model(batch()).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    return [str(each.message) for each in caught]


def test_the_scaler_of_torch_warns_once() -> None:
    (told,), nothing = run_ranks(2, _scaled, torch.amp.GradScaler)
    assert "use layerzero.GradScaler" in told and nothing == []
    assert run_ranks(2, _scaled, layerzero.GradScaler) == [[], []]
