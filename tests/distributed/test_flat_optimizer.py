"""AdamW in one pass: the bits of torch's fused AdamW on the same shards."""

import copy
import functools
import pickle
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import layerzero
from layerzero import MixedPrecision, ZeRO3
from layerzero.errors import CheckpointError
from layerzero.optim import AdamW, step_ops
from layerzero.optim import norm as norm_module
from layerzero.state_dict.parameter_shard import ParameterShard
from tests.harness.checks import HAS_FMA, assert_bitwise, assert_same_on_all_ranks
from tests.harness.compare import assert_norm_of_gradients, assert_same_values, zero3
from tests.harness.internals import get_info
from tests.harness.models import CASES, WIDTH, Block, Mlp, Parts, unused_parts
from tests.harness.ranks import on_ranks
from tests.harness.reference import batches_of, forward_backward, own_batch, seeded

needs_fma = pytest.mark.skipif(not HAS_FMA, reason="torch has other arithmetic on this processor")

_OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"weight_decay": 0.1},
    "amsgrad": {"amsgrad": True, "maximize": True, "betas": (0.3, 0.9)},
    "in backward": {},
}
_HUGE = 1e30
"""A norm that clips nothing."""
_BF16 = {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)}


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups that interleave in every unit, the second with options of its own."""
    parameters = [*model.parameters()]
    return [
        {"params": parameters[::2]},
        {"params": parameters[1::2], "lr": 3e-3, "weight_decay": 0},
    ]


def _assert_same_state(ours: Any, theirs: Any, what: str) -> None:
    left, right = ours.state_dict()["state"], theirs.state_dict()["state"]
    assert left.keys() == right.keys(), what
    for number in left:
        assert left[number].keys() == right[number].keys(), what
        for key, value in right[number].items():
            assert_bitwise(_plain(left[number][key]), _plain(value), f"{what}: {number} {key}")


def _pair(**options: Any) -> tuple[ZeRO3, ZeRO3, Any, Any]:
    ours, theirs = zero3(Mlp, Block, **options), zero3(Mlp, Block, **options)
    optimizer = AdamW(ours.parameters(), lr=1e-2)
    other = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
    return ours, theirs, optimizer, other


def _plain(value: Any) -> torch.Tensor:
    return value.local if isinstance(value, ParameterShard) else value


def _odd() -> ZeRO3:
    """Parts that are unused, empty, and not sharded."""
    run = lambda own, x: own.head(own.parts(x).float()) + own.none.sum()  # noqa: E731
    none = nn.Parameter(torch.ones(0, 4))
    module = seeded(lambda: Parts(run, parts=unused_parts(), head=nn.Linear(WIDTH, 3), none=none))
    return ZeRO3(module, auto_wrap_policy={Block}, ignored_modules=[module.head], **_BF16)


def _train_both() -> None:
    for kind, arguments in _OPTIONS.items():
        case = CASES["mlp"]
        models = _odd(), _odd()
        in_backward = kind == "in backward"
        ours = AdamW(_groups(models[0]), lr=1e-2, **arguments)
        theirs = torch.optim.AdamW(_groups(models[1]), lr=1e-2, fused=True, **arguments)
        if in_backward:
            models[0].step_in_backward(ours)
        for number, step in enumerate(batches_of(case, dist.get_world_size(), steps=4)):
            for model, optimizer in zip(models, (ours, theirs), strict=True):
                forward_backward(model, step[dist.get_rank()])
                if optimizer is theirs or not in_backward:
                    optimizer.step()
                if number % 3 or in_backward:
                    optimizer.zero_grad()  # Else gradients of the next step are added.
                optimizer.param_groups[0]["lr"] *= 0.9
            if number == 2:
                # Each goes on with the other's state.
                states = ours.state_dict(), theirs.state_dict()
                ours.load_state_dict(states[1])
                theirs.load_state_dict(states[0])
        assert_same_values(models[0], models[1], kind)
        _assert_same_state(ours, theirs, kind)


def _clip_by_hand(model: ZeRO3, norm: torch.Tensor) -> None:
    for parameter in model.parameters():
        parameter.grad.mul_(torch.clamp(0.01 / (norm + 1e-6), max=1.0))


def _clip() -> None:
    ours, theirs, optimizer, other = _pair()
    for step in range(3):
        for model in (ours, theirs):
            forward_backward(model, own_batch(step))
        if step == 1:  # Changed by hand, after they were delivered.
            for parameter in (*ours.parameters(), *theirs.parameters()):
                parameter.grad.mul_(3.0)
        norm = optimizer.clip_grad_norm_(0.01)
        assert norm.dtype == torch.float32 and norm.dim() == 0
        assert_same_on_all_ranks(norm, "norm")
        assert_norm_of_gradients(norm, theirs)
        _clip_by_hand(theirs, norm)
        for each in (optimizer, other):
            each.step()
        assert_same_values(ours, theirs, f"step {step}")
        optimizer.clip_grad_norm_(0.01)
        for each in (optimizer, other):
            each.zero_grad()  # Drops the factor, too.
    forward_backward(ours, own_batch(0) * float("inf"))
    with pytest.raises(RuntimeError, match="norm of the gradients is"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    for norm_type in (1.0, float("inf")):
        optimizer.zero_grad()
        forward_backward(ours, own_batch(0))
        norm = optimizer.clip_grad_norm_(1.0, norm_type)
        assert_norm_of_gradients(norm, ours, norm_type)
    ours.step_in_backward(optimizer)
    with pytest.raises(RuntimeError, match="step_in_backward"):
        optimizer.clip_grad_norm_(1.0)


def _calls(function: Callable[[], Any]) -> int:
    """Calls of Python functions, and from Python of functions in C."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@on_ranks(2)
def test_the_host_makes_as_many_calls_whatever_the_number_of_parameters() -> None:
    for state in ("float32", "8bit"):
        found = []
        for count in (4, 64):
            weights = nn.ParameterList(torch.ones(6) for _ in range(count))
            model = ZeRO3(
                Parts(lambda own, x: x * sum(w.sum() for w in own.weights), weights=weights)
            )
            optimizer = AdamW(model.parameters(), state=state)
            calls = []
            for _ in range(9):
                forward_backward(model, torch.ones(2))
                clip = functools.partial(optimizer.clip_grad_norm_, 1.0)
                calls.append([_calls(each) for each in (clip, optimizer.step, optimizer.zero_grad)])
            # The fewest: finalizers, and waiting for a peer that is late, are calls as well.
            found.append([min(each) for each in zip(*calls, strict=True)])
        assert found[0] == found[1], state


def _two_optimizers() -> None:
    """Of parameters that share flat parameters: each steps and measures its own."""
    model, plain = zero3(Mlp, Block, **_BF16), zero3(Mlp, Block, **_BF16)
    parameters, others = [*model.parameters()], [*plain.parameters()]
    own = [AdamW(parameters[::2], lr=1e-2), AdamW(parameters[1::2], lr=3e-3, amsgrad=True)]
    theirs = [
        torch.optim.AdamW(others[::2], lr=1e-2, fused=True),
        torch.optim.AdamW(others[1::2], lr=3e-3, amsgrad=True, fused=True),
    ]
    for step in range(4):
        for each, optimizers in ((model, own), (plain, theirs)):
            forward_backward(each, own_batch(step))
            if each is model:
                norms = [optimizer.clip_grad_norm_(_HUGE).double() for optimizer in own]
                both = (norms[0] ** 2 + norms[1] ** 2).sqrt().float()
                assert_norm_of_gradients(both, model)
            for optimizer in optimizers if step != 2 else optimizers[:1]:
                optimizer.step()
            each.zero_grad()
        assert_same_values(model, plain, f"step {step}")


def _dtypes() -> None:
    """Of states. Their steps are compared in tests/ops, and in float64 by random models."""
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        model = zero3(lambda dtype=dtype: Mlp().to(dtype), Block)
        if dtype == torch.float64:
            with pytest.raises(ValueError, match=r"'stem.weight' is float64"):
                AdamW(model.parameters(), state="8bit")
        optimizer = AdamW(model.parameters(), lr=1e-2)
        forward_backward(model, own_batch(0).to(dtype))
        optimizer.step()
        states = {each["exp_avg"].dtype for each in optimizer.state.values()}
        assert states == {torch.promote_types(dtype, torch.float32)}


def _scalers() -> None:
    """A clip that is given the scaler, and a step of it, unscale on the way and leave `.grad`."""
    for make in (layerzero.GradScaler, torch.amp.GradScaler):
        if make is torch.amp.GradScaler and dist.get_world_size() > 1:
            continue  # Its ranks do not agree, which it is warned about.
        ours, theirs, optimizer, other = _pair()
        scalers = [make(device="cpu", init_scale=1024.0) for _ in range(2)]
        with pytest.raises(RuntimeError, match="has scaled no loss"):
            optimizer.clip_grad_norm_(1.0, scaler=scalers[0])
        for step in range(4):
            bad = step == 1 and dist.get_rank() == 0
            for model, scaler in zip((ours, theirs), scalers, strict=True):
                loss = model(own_batch(step)).square().mean() * (float("inf") if bad else 1.0)
                scaler.scale(loss).backward()
            if step == 3:
                scalers[0].unscale_(optimizer)  # Allowed, and then nothing is left to unscale.
            before = [each.grad.clone() for each in ours.parameters()]
            norm = optimizer.clip_grad_norm_(0.01, scaler=scalers[0])
            scalers[1].unscale_(other)
            if step != 1:
                assert_norm_of_gradients(norm, theirs)
            _clip_by_hand(theirs, norm)
            for scaler, each in zip(scalers, (optimizer, other), strict=True):
                scaler.step(each)
                scaler.update()
            for parameter, grad in zip(ours.parameters(), before, strict=True):
                assert_bitwise(parameter.grad, grad, "gradient")
            for each in (optimizer, other):
                each.zero_grad()
            assert_same_values(ours, theirs, f"{make} step {step}")
        assert scalers[0].get_scale() == scalers[1].get_scale() == 512.0
        assert float(optimizer.state[ours.head.weight]["step"]) == 3
    forward_backward(ours, own_batch(0))
    disabled = layerzero.GradScaler("cpu", enabled=False)
    assert_bitwise(
        optimizer.clip_grad_norm_(1.0, scaler=disabled), optimizer.clip_grad_norm_(1.0), "disabled"
    )


def _edited_states() -> None:
    """Edits that users make, and an option that adds a state, take effect at the next step."""
    ours, theirs, optimizer, other = _pair()
    for step in range(5):
        for model, each in ((ours, optimizer), (theirs, other)):
            stem = model.stem
            if step == 2:
                each.param_groups[0]["amsgrad"] = True
                for state in each.state.values():
                    state.setdefault("max_exp_avg_sq", torch.zeros_like(state["exp_avg"]))
            if step == 3:
                each.state[stem.weight]["exp_avg"].zero_()
            forward_backward(model, own_batch(step))
            if step == 4:
                each.state[stem.weight]["exp_avg"] = torch.ones_like(stem.weight)
                del each.state[stem.bias]
            each.step()
            each.zero_grad(set_to_none=step % 2 == 0)
        assert_same_values(ours, theirs, f"step {step}")
    assert float(optimizer.state[ours.head.weight]["step"]) == 5
    assert "max_exp_avg_sq" in optimizer.state[ours.head.weight]


@on_ranks(2)
def test_what_it_cannot_do_is_refused_by_name() -> None:
    model, other = zero3(Mlp, Block), zero3(Mlp, Block)
    own, loose = [*model.parameters()], nn.Parameter(torch.randn(3))
    of_group = {"capturable": True}, {"differentiable": True}, {"decoupled_weight_decay": False}
    refused: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        ([*own, loose], {}, ValueError, r"of shape \(3,\) belongs to no ZeRO3 module;"),
        ([loose], {}, ValueError, r"of shape \(3,\) belongs to no ZeRO3 module;"),
        ([*own, *other.parameters()], {}, ValueError, "'stem.weight' belongs to another ZeRO3"),
        (own, {"state": "int4"}, ValueError, r"state to be one of 'float32', .* got 'int4'"),
        (own, {"lr": -1.0}, ValueError, "learning rate"),
        (own, {"capturable": True}, NotImplementedError, r"AdamW: .*capturable=True"),
        (own, {"seed": "x"}, ValueError, "expected seed to be an int64, got 'x'"),
        *(
            ([{"params": own, **each}], {}, NotImplementedError, f"group 0 has {next(iter(each))}=")
            for each in of_group
        ),
    ]
    for parameters, options, error, text in refused:
        with pytest.raises(error, match=text):
            AdamW(parameters, **options)
    optimizer = AdamW(own[:1], lr=1e-2)
    with pytest.raises(ValueError, match="of shape"):
        optimizer.add_param_group({"params": [loose]})
    assert len(optimizer.param_groups) == 1
    del optimizer
    optimizer = AdamW(own, foreach=True, fused=False)
    output = model(torch.randn(2, 5))
    output.register_hook(lambda _: optimizer.step())
    with pytest.raises(RuntimeError, match="inside a backward pass"):
        output.sum().backward()
    forward_backward(model, own_batch(0))
    for options in of_group[1:]:
        optimizer.param_groups[0].update(options)
        with pytest.raises(NotImplementedError, match=f"group 0 has {next(iter(options))}="):
            optimizer.step()
        optimizer.param_groups[0].update({key: not value for key, value in options.items()})
    torch.compile(optimizer.step, backend="eager")()
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        first = copied.param_groups[0]["params"][0]
        first.grad = torch.ones_like(first)
        copied.step()


def _loads_whole_states() -> None:
    """Of a model that is not sharded; or nothing, if one does not fit."""
    model, plain = zero3(Mlp, Block), Mlp()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    whole = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    plain(own_batch(0)).sum().backward()
    whole.step()
    optimizer.load_state_dict(whole.state_dict())  # Each rank takes its part.

    def check() -> None:
        for own, full in zip(model.parameters(), plain.parameters(), strict=True):
            start, stop = get_info(own).range
            for key in ("exp_avg", "exp_avg_sq"):
                part = whole.state[full][key].reshape(-1)[start:stop]
                assert_bitwise(optimizer.state[own][key].reshape(-1), part, key)

    check()
    wrong = whole.state_dict()
    wrong["state"][0] = {**wrong["state"][0], "exp_avg": torch.ones(3)}
    with pytest.raises(CheckpointError, match=r"exp_avg' of stem.weight: size mismatch"):
        optimizer.load_state_dict(wrong)
    check()


def _huge_and_bad_gradients() -> None:
    """A step alone finds what is not finite, and takes what is huge."""
    for dtype, huge in ((torch.float32, 3e38), (torch.float64, 1e200)):
        model = zero3(lambda dtype=dtype: Mlp().to(dtype), Block)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        scaler = layerzero.GradScaler("cpu", init_scale=1024.0)
        for step, value in enumerate((huge, float("nan"), float("inf"))):
            scaler.scale(model(own_batch(step).to(dtype)).square().mean()).backward()
            if dist.get_rank() == 0:
                next(each.grad for each in model.parameters() if each.numel())[0] = value
            weights = [each.detach().clone() for each in model.parameters()]
            scaler.step(optimizer)
            is_taken = not all(map(torch.equal, model.parameters(), weights))
            assert is_taken == (value == huge), (dtype, value)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 256.0


@needs_fma
@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_odd_uses_are_as_with_torchs_optimizer(world_size: int) -> None:
    _clip()
    _two_optimizers()
    _dtypes()
    _scalers()
    _huge_and_bad_gradients()
    _edited_states()
    _loads_whole_states()


def _trained(model: ZeRO3) -> list[Any]:
    return [each for each in model.parameters() if each.grad is not None]


def _to_all(change: Callable[[Any], Any]) -> Callable[[ZeRO3], None]:
    @torch.no_grad()
    def touch(model: ZeRO3) -> None:
        for each in _trained(model):
            change(each)

    return touch


def _drop(model: ZeRO3) -> None:
    model.blocks[0].zero_grad()
    del model.stem.bias.grad


def _one_buffer(model: ZeRO3) -> None:
    """As trainers do that keep the gradients of the whole model in one buffer."""
    grads = [each.grad.clone() for each in _trained(model)]
    parts = torch.cat(grads).split([each.numel() for each in grads])
    for parameter, part in zip(_trained(model), parts, strict=True):
        parameter.grad = part


def _nothing(model: ZeRO3) -> None:
    """Between two that do something."""


_ASSIGN_DATA = _to_all(lambda p: setattr(p.grad, "data", p.grad.data * 3))
_TOUCHES: tuple[Callable[[ZeRO3], Any], ...] = (
    _to_all(lambda p: setattr(p, "grad", p.grad * 2)),
    *(_nothing, _ASSIGN_DATA, _ASSIGN_DATA),
    lambda model: setattr(model.head.weight, "grad", model.head.weight.grad.clone() * 0.5),
    *(_drop, _nothing),
    lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-3),
    _to_all(lambda p: setattr(p, "data", p.data * 0.5)),
    _to_all(lambda p: p.set_(p.detach() * 0.75)),
    *(_one_buffer, _nothing),
)


def _touch_all(late: bool, accumulates: bool) -> None:
    """Each way before the clip, or after it; a clip in every other step."""
    ours, theirs, optimizer, other = _pair()
    for step, touch in enumerate(_TOUCHES):
        what = f"touch {step} late={late} accumulates={accumulates}"
        for model, own in ((ours, optimizer), (theirs, other)):
            forward_backward(model, own_batch(step))
            if not late:
                touch(model)
            if step % 2 == late:
                norm = (own if own is optimizer else model).clip_grad_norm_(_HUGE)
                assert_same_on_all_ranks(norm, what)
                assert_norm_of_gradients(norm, model, what=f"{what}: norm")
            if late:
                touch(model)
            own.step()
            if not accumulates or step % 3 == 2:
                own.zero_grad()
        assert_same_values(ours, theirs, what)


@needs_fma
@on_ranks(2)
def test_whatever_is_done_between_counts() -> None:
    for late, accumulates in ((False, True), (True, False)):
        _touch_all(late, accumulates)


def _quadruple(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(4.0)


def _with_hooks() -> None:
    model = zero3(Mlp, Block)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    model.blocks[0].requires_grad_(False)
    for parameter in list(model.parameters())[::3]:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_quadruple)
            parameter.register_hook(lambda grad: grad * 2)
    for step in range(2):
        forward_backward(model, own_batch(step))
        assert_norm_of_gradients(optimizer.clip_grad_norm_(_HUGE), model, what="hooks")
        optimizer.zero_grad()


def _as_on_a_device() -> None:
    """A device sums the squares of all flat parameters in one call."""
    with (
        mock.patch.object(torch, "_foreach_norm", wraps=torch._foreach_norm) as of_all,
        mock.patch.object(step_ops, "sum_squares", wraps=step_ops.sum_squares) as of_one,
        mock.patch.object(norm_module, "_is_on_device", lambda _: True),
    ):
        model = zero3(Mlp, Block)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        forward_backward(model, own_batch(0))
        optimizer.clip_grad_norm_(1.0)
        # Of all gradients, and of what this rank's come to.
        assert (of_all.call_count, of_one.call_count) == (2, 0)
        _two_optimizers()


@needs_fma
@on_ranks(2)
def test_it_steps_and_clips_as_torchs_does() -> None:
    _train_both()
    _with_hooks()
    _as_on_a_device()
