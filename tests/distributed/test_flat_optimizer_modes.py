"""AdamW in one pass: modes of the model, dtypes, scalers, and parameters that come and go."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import layerzero
from layerzero import MixedPrecision, ZeRO3
from layerzero.flat.parameter_info import get_info
from layerzero.optim import SGD, AdamW, Lion, nonempty_parameters
from layerzero.state_dict.errors import CheckpointError
from tests.distributed.test_flat_optimizer import needs_fma
from tests.harness.checks import assert_bitwise, assert_within
from tests.harness.compare import assert_clips, assert_norm_of_gradients, sharded, zero3
from tests.harness.models import CASES, Block, Mlp
from tests.harness.ranks import run_ranks
from tests.harness.reference import batches_of, forward_backward

_BF16 = {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)}


def _same_weights(ours: nn.Module, theirs: nn.Module, what: str) -> None:
    pairs = zip(ours.named_parameters(), theirs.named_parameters(), strict=True)
    for (name, own), (_, other) in pairs:
        assert_bitwise(own.detach(), other.detach(), f"{what}: {name}")


def _batch(step: int) -> torch.Tensor:
    seed = 10 * step + dist.get_rank()
    return torch.randn(2, 5, generator=torch.Generator().manual_seed(seed))


def _pair(**options: Any) -> tuple[ZeRO3, ZeRO3, Any, Any]:
    ours, theirs = zero3(Mlp, Block, **options), zero3(Mlp, Block, **options)
    optimizer = AdamW(ours.parameters(), lr=1e-2)
    other = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
    return ours, theirs, optimizer, other


def _modes() -> None:
    for options in (
        {"zero3_size": 2},
        {"zero3_size": 2, "outer": "replicate"},
        {"zero3_size": 1, **_BF16},
        {"zero3_size": 2, **_BF16},
    ):
        ours, theirs, optimizer, other = _pair(**options)
        for model, each in ((ours, optimizer), (theirs, other)):
            schedule = torch.optim.lr_scheduler.LinearLR(each, 0.1, total_iters=3)
            for step in range(4):
                with model.no_sync():
                    forward_backward(model, _batch(step))
                forward_backward(model, _batch(step + 50))
                each.step()
                schedule.step()
                each.zero_grad()
        _same_weights(ours, theirs, str(options))
        forward_backward(ours, _batch(0))
        assert_norm_of_gradients(optimizer.clip_grad_norm_(1.0), ours)
        assert_clips(ours, 1.0)


@needs_fma
@pytest.mark.slow
def test_it_steps_in_every_mode_of_layered_sharding() -> None:
    run_ranks(4, _modes)


def _two_optimizers() -> None:
    """Of parameters that share flat parameters; their casts must not overwrite each other's."""
    model, plain = zero3(Mlp, Block, **_BF16), zero3(Mlp, Block, **_BF16)
    parameters, others = [*model.parameters()], [*plain.parameters()]
    own = [AdamW(parameters[::2], lr=1e-2), SGD(parameters[1::2], lr=1e-2, momentum=0.9)]
    theirs = [
        torch.optim.AdamW(others[::2], lr=1e-2, fused=True),
        torch.optim.SGD(others[1::2], lr=1e-2, momentum=0.9, fused=True),
    ]
    assert sum(flat.tensors[0].numel() for flat in own[0]._all_flats()) == 0
    for step in range(4):
        for each, optimizers in ((model, own), (plain, theirs)):
            forward_backward(each, _batch(step))
            for optimizer in optimizers if step != 2 else optimizers[:1]:
                optimizer.step()
            each.zero_grad()
        _same_weights(model, plain, f"step {step}")
    assert_bitwise(model(_batch(9)).detach(), plain(_batch(9)).detach(), "output")


def _come_and_go() -> None:
    """Frozen, unfrozen, added, left out, skipped; and edits of states that users make."""
    ours, theirs, optimizer, other = _pair()
    for model in (ours, theirs):
        model.blocks[0].requires_grad_(False)
    for step in range(7):
        for model, each in ((ours, optimizer), (theirs, other)):
            if step == 2:
                model.blocks[0].requires_grad_(True)
            forward_backward(model, _batch(step))
            if step in (3, 4):
                model.head.weight.grad = None
            if step == 4:
                model.stem.weight.grad = model.stem.weight.grad.clone() * 2
                each.state[model.stem.weight]["exp_avg"].zero_()
            if step == 5:
                each.state[model.stem.weight]["exp_avg"] = torch.ones_like(model.stem.weight)
                del each.state[model.stem.bias]
            each.step()
            each.zero_grad(set_to_none=step % 2 == 0)
        _same_weights(ours, theirs, f"step {step}")
    assert float(optimizer.state[ours.head.weight]["step"]) == 5
    assert float(optimizer.state[ours.blocks[0].up.weight]["step"]) == 5


def _dtypes() -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        model = zero3(lambda dtype=dtype: Mlp().to(dtype), Block)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        plain = [each.detach().to(torch.float64) for each in model.parameters()]
        wide = [nn.Parameter(each) for each in plain]
        reference = torch.optim.AdamW(wide, lr=1e-2)
        for step in range(3):
            forward_backward(model, _batch(step).to(dtype))
            for parameter, own in zip(model.parameters(), wide, strict=True):
                own.grad = parameter.grad.double()
                own.data.copy_(parameter.detach())
            optimizer.step()
            reference.step()
            optimizer.zero_grad()
            for parameter, own in zip(model.parameters(), wide, strict=True):
                # The value is rounded to its dtype, by half a unit; of the update, which is about
                # the learning rate, each of some 30 operations rounds in the dtype of the states.
                of_states = torch.promote_types(dtype, torch.float32)
                bound = (
                    torch.finfo(dtype).eps / 2 * own.abs() + 30 * torch.finfo(of_states).eps * 1e-2
                )
                assert_within(parameter.detach().double(), own.detach(), bound.detach(), str(dtype))
        for parameter in model.parameters():
            state = optimizer.state[parameter]["exp_avg"]
            assert state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        if dtype == torch.float64:
            del optimizer
            with pytest.raises(ValueError, match=r"'stem.weight' is float64"):
                AdamW(model.parameters(), state="8bit")


def _scalers() -> None:
    for make in (layerzero.GradScaler, torch.amp.GradScaler):
        if make is torch.amp.GradScaler and dist.get_world_size() > 1:
            continue  # Its ranks do not agree, which it is warned about.
        ours, theirs, optimizer, other = _pair()
        scalers = [make(device="cpu", init_scale=1024.0) for _ in range(2)]
        for step in range(4):
            for model, each, scaler in zip(
                (ours, theirs), (optimizer, other), scalers, strict=True
            ):
                loss = model(_batch(step)).square().mean()
                scale = float("inf") if step == 1 and dist.get_rank() == 0 else 1.0
                scaler.scale(loss * scale).backward()
                if step == 3:
                    scaler.unscale_(each)
                scaler.step(each)
                scaler.update()
                each.zero_grad()
            _same_weights(ours, theirs, f"{make} step {step}")
            assert scalers[0].get_scale() == scalers[1].get_scale()
        assert float(optimizer.state[ours.head.weight]["step"]) == 3


def _turned_on() -> None:
    """Options that add a state take effect at the next step, as with torch's SGD."""
    models = [zero3(Mlp, Block) for _ in range(3)]
    ours, amsgrad = SGD(models[0].parameters(), lr=1e-2), AdamW(models[2].parameters(), lr=1e-2)
    theirs = torch.optim.SGD(models[1].parameters(), lr=1e-2, fused=True)
    for step in range(4):
        if step == 2:
            ours.param_groups[0]["momentum"] = theirs.param_groups[0]["momentum"] = 0.9
            amsgrad.param_groups[0]["amsgrad"] = True
        for model, optimizer in zip(models, (ours, theirs, amsgrad), strict=True):
            forward_backward(model, _batch(step))
            optimizer.step()
            optimizer.zero_grad()
    _same_weights(models[0], models[1], "momentum from the third step on")
    assert all("max_exp_avg_sq" in own for own in amsgrad.state.values())
    for name in ("capturable", "differentiable"):
        with pytest.raises(NotImplementedError, match=f"AdamW: {name}=True"):
            AdamW(models[0].parameters(), **{name: True})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected seed to be an int64, got 'x'"):
        Lion(models[0].parameters(), seed="x")  # type: ignore[arg-type]
    del ours
    SGD(models[0].parameters(), lr=1e-2, foreach=True, fused=False)


def _scale_in_the_pass() -> None:
    """`step` alone unscales without a pass of its own: `.grad` stays as it was delivered."""
    for dtype, huge in ((torch.float32, 3e38), (torch.float64, 1e200)):
        model = zero3(lambda dtype=dtype: Mlp().to(dtype), Block)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        scaler = layerzero.GradScaler("cpu", init_scale=1024.0)
        for step, value in enumerate((1.0, huge, float("nan"), float("inf"), 1.0)):
            scaler.scale(model(_batch(step).to(dtype)).square().mean()).backward()
            grad = next(each.grad for each in model.parameters() if each.numel())
            if value != 1.0 and dist.get_rank() == 0:
                grad[0] = value
            before, weights = grad.clone(), [each.detach().clone() for each in model.parameters()]
            scaler.step(optimizer)
            assert_bitwise(grad, before, "gradient")
            is_taken = any(
                not torch.equal(each, weight)
                for each, weight in zip(model.parameters(), weights, strict=True)
            )
            assert is_taken == (abs(value) < float("inf")), (dtype, value)
            scaler.update()
            assert (scaler.get_scale() == 1024.0) == (step < 2)
            optimizer.zero_grad()


def _clip_scaled() -> None:
    """A clip that is given the scaler has the bits of one after `unscale_`, and leaves `.grad`."""
    ours, theirs = zero3(Mlp, Block), zero3(Mlp, Block)
    optimizer, other = (AdamW(model.parameters(), lr=1e-2) for model in (ours, theirs))
    scalers = [layerzero.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    with pytest.raises(RuntimeError, match="has scaled no loss"):
        optimizer.clip_grad_norm_(1.0, scaler=scalers[0])
    for step in range(4):
        bad = step == 2 and dist.get_rank() == 0
        for model, scaler in zip((ours, theirs), scalers, strict=True):
            loss = model(_batch(step)).square().mean() * (float("inf") if bad else 1.0)
            scaler.scale(loss).backward()
        before = [each.grad.clone() for each in ours.parameters()]
        if step == 3:
            scalers[0].unscale_(optimizer)  # Allowed, and then nothing is left to unscale.
        norms = [optimizer.clip_grad_norm_(0.01, scaler=scalers[0])]
        scalers[1].unscale_(other)
        norms.append(other.clip_grad_norm_(0.01))
        assert_bitwise(norms[0], norms[1], f"norm {step}")
        if step < 3:
            for parameter, grad in zip(ours.parameters(), before, strict=True):
                assert_bitwise(parameter.grad, grad, "gradient")
        for scaler, each in zip(scalers, (optimizer, other), strict=True):
            scaler.step(each)
            scaler.update()
            each.zero_grad()
        _same_weights(ours, theirs, f"step {step}")
    assert scalers[0].get_scale() == scalers[1].get_scale() == 512.0
    forward_backward(ours, _batch(0))
    disabled = layerzero.GradScaler("cpu", enabled=False)
    assert_bitwise(
        optimizer.clip_grad_norm_(1.0, scaler=disabled), optimizer.clip_grad_norm_(1.0), "disabled"
    )


def _refused_options() -> None:
    """What groups and state dicts ask for and cannot have, in one line."""
    model, plain = zero3(Mlp, Block), Mlp()
    wrong: list[dict[str, Any]] = [
        *({"capturable": True}, {"differentiable": True}, {"decoupled_weight_decay": False})
    ]
    for options in wrong:
        with pytest.raises(NotImplementedError, match=f"AdamW: group 0 has {next(iter(options))}="):
            AdamW([{"params": [*model.parameters()], **options}], lr=1e-2)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    forward_backward(model, _batch(0))
    for options in wrong[1:]:
        optimizer.param_groups[0].update(options)
        with pytest.raises(NotImplementedError, match=f"group 0 has {next(iter(options))}="):
            optimizer.step()
        optimizer.param_groups[0].update({key: not value for key, value in options.items()})
    torch.compile(optimizer.step, backend="eager")()
    # Of a model that is not sharded.
    whole = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    plain(_batch(0)).sum().backward()
    whole.step()
    optimizer.load_state_dict(whole.state_dict())  # Each rank takes its part.
    for own, full in zip(model.parameters(), plain.parameters(), strict=True):
        start, stop = get_info(own).range
        for key in ("exp_avg", "exp_avg_sq"):
            part = whole.state[full][key].reshape(-1)[start:stop]
            assert_bitwise(optimizer.state[own][key].reshape(-1), part, key)
    before = [each.clone() for own in optimizer.state.values() for each in own.values()]
    wrong = whole.state_dict()
    wrong["state"][0] = {**wrong["state"][0], "exp_avg": torch.ones(3)}
    with pytest.raises(CheckpointError, match=r"exp_avg' of stem.weight: size mismatch"):
        optimizer.load_state_dict(wrong)
    after = [each for own in optimizer.state.values() for each in own.values()]
    for old, new in zip(before, after, strict=True):
        assert_bitwise(new, old, "state")
    optimizer.step()


def _copies() -> None:
    for make in (AdamW, SGD, Lion):
        model = zero3(Mlp, Block)
        options = {"momentum": 0.9} if make is SGD else {}
        optimizer = make(nonempty_parameters(model), lr=1e-2, **options)
        forward_backward(model, _batch(0))
        optimizer.step()
        for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            first = copied.param_groups[0]["params"][0]
            first.grad = torch.ones_like(first)
            copied.step()
        text = repr(optimizer)
        assert make.__name__ in text
        bare = nn.Parameter(torch.ones(3))
        with pytest.raises(ValueError, match="belongs to no ZeRO3 module"):
            make([bare], lr=1e-2)


def _ignored() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Mlp()
            self.own = nn.Linear(3, 3)
            self.none = nn.Parameter(torch.ones(0, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.own(self.mlp(x)) + self.none.sum()

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        module = Odd()
        models.append(ZeRO3(module, auto_wrap_policy={Block}, ignored_modules=[module.own]))
    ours, theirs = models
    optimizer = AdamW(ours.parameters(), lr=1e-2)
    other = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
    for step in range(3):
        for model, each in ((ours, optimizer), (theirs, other)):
            forward_backward(model, _batch(step))
            each.step()
            each.zero_grad()
        _same_weights(ours, theirs, f"step {step}")


def _odd_uses() -> None:
    _two_optimizers()
    _come_and_go()
    _dtypes()
    _scalers()
    _scale_in_the_pass()
    _turned_on()
    _clip_scaled()
    _refused_options()
    _copies()
    _ignored()


@needs_fma
@pytest.mark.parametrize("world_size", [1, 2])
def test_odd_uses_are_as_with_torchs_optimizer(world_size: int) -> None:
    run_ranks(world_size, _odd_uses)


def _replace_data() -> None:
    model, plain = zero3(Mlp, Block), zero3(Mlp, Block)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    other = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    for step in range(4):
        for each, own in ((model, optimizer), (plain, other)):
            forward_backward(each, _batch(step))
            own.step()
            own.zero_grad()
        if step == 1:
            for each in (model, plain):
                each.head.weight.data = each.head.weight.data.clone() * 0.5
        _same_weights(model, plain, f"step {step}")


@needs_fma
def test_data_that_is_replaced_is_stepped() -> None:
    run_ranks(2, _replace_data)


def _train() -> None:
    for name in ("mlp", "tied_across_units"):
        for state in ("float32", "bfloat16", "8bit"):
            model = sharded(CASES[name])
            optimizer = AdamW(model.parameters(), lr=1e-2, state=state)  # type: ignore[arg-type]
            losses = []
            for _ in range(30):
                (batches,) = batches_of(CASES[name], dist.get_world_size(), 1)
                optimizer.zero_grad()
                losses.append(float(forward_backward(model, batches[dist.get_rank()])))
                optimizer.clip_grad_norm_(1.0)
                optimizer.step()
            assert losses[-1] < 0.7 * losses[0], (name, state, losses)


@pytest.mark.slow
def test_every_state_trains() -> None:
    run_ranks(2, _train)
