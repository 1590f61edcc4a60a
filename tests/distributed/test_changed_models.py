"""What changes in a model after it was wrapped is found by name, or does no harm; it is wrapped
again, after it changed or after its wrapper is gone, and never by two at once. And what is changed
inside `summon_full_params`, which shows the whole parameters for a while."""

import contextlib
import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrize

import layerzero
from layerzero import MixedPrecision, ZeRO3
from layerzero.checkpoint import get_model_state_dict
from tests.harness.checks import (
    assert_bitwise,
    assert_same_on_all_ranks,
    assert_same_parameters,
    named,
    warns_on_first_rank,
)
from tests.harness.compare import (
    assert_same_gradients,
    assert_same_values,
    assert_trains_alike,
    sharded,
    zero3,
)
from tests.harness.models import CASES, WIDTH, Block, Mlp, Parts
from tests.harness.ranks import on_ranks
from tests.harness.reference import (
    OPTIMIZERS,
    backward_of_all_ranks,
    batches_of,
    forward_backward,
    full_gradients,
    mlp_batches,
    plain,
    seeded,
)


def _adapt(model: nn.Module) -> None:
    torch.manual_seed(3)
    base = model.blocks[1].up
    down = nn.Linear(base.in_features, 2, bias=False)
    up = nn.Linear(2, base.out_features, bias=False)
    # An adapter around a layer, as libraries for fine-tuning put it in place.
    run = lambda own, x: own.base(x) + own.up(own.down(x))  # noqa: E731
    model.blocks[1].up = Parts(run, base=base, down=down, up=up)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("base" not in name)


def _take_over(model: nn.Module) -> None:
    """As `convert_sync_batchnorm` does: another module with the same parameters."""
    layer = nn.Linear(1, 1)
    layer.weight, layer.bias = model.stem.weight, model.stem.bias
    model.stem = layer


def _tie(model: nn.Module) -> None:
    model.blocks[0].up.weight = model.blocks[1].up.weight


CHANGES: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "a module replaced": (
        lambda model: setattr(model, "head", nn.Linear(WIDTH, 4)),
        "added head.bias; replaced head.weight",
    ),
    "an item deleted": (lambda model: model.blocks.__delitem__(2), "removed blocks.2.up.weight"),
    "adapters": (_adapt, "added .*blocks.1.up.down.weight.*removed blocks.1.up.weight"),
    "a parameter tied": (_tie, "replaced blocks.0.up.weight"),
    "a module that takes over": (_take_over, "replaced stem.weight, stem.bias"),
    "a sharded module": (
        lambda model: model.add_module("extra", ZeRO3(Block())),
        "added extra.up.weight",
    ),
    "a parametrization": (
        lambda model: parametrize.register_parametrization(
            model.blocks[0].up, "weight", nn.Identity(), unsafe=True
        ),
        "added blocks.0.up.parametrizations.weight.original.*removed blocks.0.up.weight",
    ),
}

_AT: dict[str, Callable[[ZeRO3], object]] = {
    "forward": lambda model: model(torch.randn(2, WIDTH)),
    "a forward without gradients": lambda model: torch.no_grad()(model)(torch.randn(2, WIDTH)),
    "summon_full_params": lambda model: model.summon_full_params().__enter__(),
    "state_dict": lambda model: model.state_dict(),
    "the module's state_dict": lambda model: model.module.state_dict(),
    "get_model_state_dict": lambda model: get_model_state_dict(model, full=True),
}


@on_ranks(2)
def test_every_change_of_parameters_is_found_by_name() -> None:
    for what, (change, message) in CHANGES.items():
        model = zero3(Mlp, Block)
        model(torch.randn(2, WIDTH)).sum().backward()
        change(model)
        for at, use in _AT.items():
            with pytest.raises(RuntimeError, match=message) as raised:
                use(model)
            assert "layerzero.rewrap(model)" in str(raised.value), (what, at)


def _wrap_blocks(model: nn.Module) -> None:
    for name, block in list(model.blocks.named_children()):
        model.blocks._modules[name] = checkpoint_wrapper(block)


HARMLESS: dict[str, Callable[[nn.Module], object]] = {
    "the same module": lambda model: setattr(model, "stem", model.stem),
    "the same parameter": lambda model: setattr(model.stem, "weight", model.stem.weight),
    "a module without parameters": lambda model: model.blocks[0].register_forward_pre_hook(
        lambda block, _: setattr(block, "cache", nn.Identity())
    ),
    "a buffer": lambda model: model.stem.register_buffer("seen", torch.zeros(1)),
    "checkpoint_wrapper": _wrap_blocks,
    "torch.compile": lambda model: model.blocks[0].compile(backend="eager"),
    "a compiled item": lambda model: model.blocks.__setitem__(
        0, torch.compile(model.blocks[0], backend="eager")
    ),
    "a name more": lambda model: setattr(model, "first", model.blocks[0]),
}


@on_ranks(2)
def test_what_changes_no_parameter_is_left_alone() -> None:
    batches = batches_of(CASES["mlp"], 2, steps=2)
    for what, change in HARMLESS.items():
        model, plain = zero3(Mlp, Block), seeded(Mlp)
        model(torch.randn(2, WIDTH))
        change(model)
        if what in ("a name more", "checkpoint_wrapper", "a compiled item"):
            change(plain)  # names say so, too
        assert_trains_alike(model, plain, batches)
    # Parts that are ignored may change their parameters.
    module = seeded(Mlp)
    model = ZeRO3(module, ignored_modules=[module.blocks[0]], ignored_parameters=[module.stem.bias])
    model.blocks[0], model.stem.bias = Block(), nn.Parameter(torch.zeros(WIDTH))
    outer = ZeRO3(nn.Sequential(model))
    assert outer[0].blocks[0].up.weight.shape == (7, WIDTH)
    outer(torch.randn(2, WIDTH)).sum().backward()
    assert outer[0].stem.bias.grad is not None and outer[0].stem.weight.grad is not None
    outer[0].stem.more = nn.Parameter(torch.zeros(1))
    with pytest.raises(RuntimeError, match=r"added 0.stem.more"):
        outer(torch.randn(2, WIDTH))


@on_ranks(2)
def test_what_is_put_in_place_inside_summon_is_written_or_refused() -> None:
    for options in ({}, {"zero3_size": 1}, {"zero3_size": 1, "outer": "replicate"}):
        model = zero3(Mlp, Block, **options)
        with model.summon_full_params(writeback=False), torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        with (
            contextlib.suppress(KeyError),
            model.summon_full_params(with_grads=True),
            torch.no_grad(),
        ):
            model.stem.weight.zero_()
            raise KeyError
        assert_same_values(model, seeded(Mlp))
        new = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
        for rank0_only in (False, True):
            with model.summon_full_params(rank0_only=rank0_only):
                if model.head.weight.shape == new.shape:
                    model.head.weight = nn.Parameter(new + rank0_only)
                    model.stem.weight.data = torch.ones(WIDTH, WIDTH)
            with model.summon_full_params():
                assert_bitwise(model.head.weight.detach(), new + rank0_only, "put in place")
                assert (model.stem.weight == 1).all()
            for spoil in (
                lambda m: setattr(m.head, "weight", nn.Parameter(torch.zeros(WIDTH, 3))),
                lambda m: setattr(m.head.weight, "data", torch.zeros(WIDTH, 3)),
                lambda m: delattr(m.head, "weight"),
            ):
                with (
                    pytest.raises((RuntimeError, ValueError), match="summon_full_params: "),
                    model.summon_full_params(rank0_only=rank0_only),
                ):
                    if model.head.weight.shape == new.shape:
                        spoil(model)
            with model.summon_full_params():
                assert_bitwise(model.head.weight.detach(), new + rank0_only, "left as it was")


def _block() -> nn.Module:
    return seeded(Block, seed=5)


WRAPPED_AGAIN: dict[str, Callable[[nn.Module], object]] = {
    "appended": lambda model: model.blocks.append(_block()),
    "inserted": lambda model: model.blocks.insert(0, _block()),
    "replaced": lambda model: setattr(model, "head", seeded(lambda: nn.Linear(WIDTH, 2), seed=4)),
    "adapters": _adapt,
    "a module that takes over": _take_over,
    "a parameter tied": _tie,
    "nothing": lambda model: None,
}


@on_ranks(2)
def test_a_change_whose_values_were_dropped_is_refused() -> None:
    """As a merge of adapters, which writes weights and removes modules."""
    model = zero3(Mlp, Block)
    with model.summon_full_params(writeback=False):
        model.module.head.weight.data.fill_(0.5)
        del model.module.blocks[1]
    with pytest.raises(RuntimeError, match=r"removed .*layerzero\.rewrap\(model\)"):
        model(torch.ones(2, WIDTH))
    with pytest.raises(
        RuntimeError, match=r"rewrap: .*writeback=False\), which dropped the values"
    ):
        layerzero.rewrap(model)
    model = zero3(Mlp, Block)
    with model.summon_full_params(writeback=False):
        head, model.module.head = model.module.head, nn.Identity()
        model.module.head = head
    model(torch.ones(2, WIDTH))


@on_ranks(2)
def test_a_changed_model_trains_on_once_it_is_wrapped_again() -> None:
    """Shards of what did not change stay, with their optimizer state and hooks."""
    batches = mlp_batches(3)
    for what, change in WRAPPED_AGAIN.items():
        model, plain = zero3(Mlp, Block), seeded(Mlp)
        kept, stepped = model.blocks[2].down.weight, []
        optimizers = [OPTIMIZERS["adamw"](each.blocks[2].parameters()) for each in (model, plain)]
        kept.register_post_accumulate_grad_hook(stepped.append)
        for number, step in enumerate(batches):
            if number == 1:
                wrapper = model
                for each in (model, plain):
                    change(each)
                    each.note = what
                new = layerzero.rewrap(model)
                assert model is wrapper and model.note == what and type(model).__name__ == "ZeRO3"
                assert any(kept is sharded_param for sharded_param in model.parameters()), what
                if what in ("nothing", "appended"):
                    added = [n for n, _ in model.named_parameters() if n.startswith("blocks.3")]
                    assert new == added
            forward_backward(model, step[dist.get_rank()])
            backward_of_all_ranks(plain, step)
            assert_same_gradients(model, plain, what=f"{what}: gradient of")
            for optimizer, each in zip(optimizers, (model, plain), strict=True):
                optimizer.step()
                each.zero_grad()
            assert_same_values(model, plain, f"{what}: parameter")
        assert len(stepped) == 3 and all(each is kept for each in stepped)


@on_ranks(3)
def test_all_ranks_find_the_same_shards_new() -> None:
    model = ZeRO3(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))
    model.append(nn.Linear(8, 8))  # The third layer moves from rank 2 to 1; rank 0 has none of it.
    new = layerzero.rewrap(model)
    assert "2.weight" in new
    assert_same_on_all_ranks(new)


@on_ranks(2)
def test_a_warning_names_shards_that_lose_their_hooks() -> None:
    model = zero3(Mlp, Block)
    for name in ("stem.bias", "blocks.0.up.bias"):
        model.get_parameter(name).register_post_accumulate_grad_hook(print)
    model.add_module("late", nn.Linear(9, 9))
    with warns_on_first_rank(re.escape("rewrap: the hooks on ['stem.bias'] were lost")):
        layerzero.rewrap(model)


@on_ranks(2)
def test_what_cannot_be_wrapped_again_is_refused() -> None:
    model = zero3(Mlp, Block)
    with pytest.raises(ValueError, match="rewrap: expected the outermost ZeRO3 module, got Linear"):
        layerzero.rewrap(model.stem)
    with model.summon_full_params(), pytest.raises(RuntimeError, match="a model between steps"):
        layerzero.rewrap(model)
    with model.no_sync():
        model(torch.randn(2, WIDTH)).sum().backward()
    with pytest.raises(RuntimeError, match="it has unreduced gradients"):
        layerzero.rewrap(model)
    nested = ZeRO3(nn.Sequential(zero3(Block)))
    with pytest.raises(NotImplementedError, match="'0' was wrapped by its own ZeRO3"):
        layerzero.rewrap(nested)


@on_ranks(2)
def test_a_module_can_be_wrapped_again_after_its_wrapper_is_gone() -> None:
    batches = mlp_batches()
    plain = seeded(Mlp)
    model = zero3(Mlp, Block)
    module = model.module
    assert_trains_alike(model, plain, batches[:1])
    for each in (model, module, model.blocks[0]):
        with pytest.raises(RuntimeError, match="is wrapped already"):
            ZeRO3(each)
    del each
    del model
    again = ZeRO3(module, auto_wrap_policy={nn.Linear}, zero3_size=1, outer="replicate")
    assert len(layerzero.units(again)) == 9
    assert_trains_alike(again, plain, batches[1:])
    block = again.blocks[1]
    del again, module
    alone = ZeRO3(block)
    assert_same_values(alone, plain.blocks[1])
    x = torch.randn(2, WIDTH)
    assert_bitwise(alone(x), plain.blocks[1](x), "a part of a model that is gone")


def _over_one_backbone() -> nn.ModuleList:
    backbone = Mlp()
    return nn.ModuleList(nn.Sequential(backbone, nn.Linear(3, width)) for width in (4, 1))


@on_ranks(2)
def test_a_backbone_in_no_unit_of_its_own_is_in_one_wrapped_model() -> None:
    x = torch.randn(2, WIDTH)
    first, second = seeded(_over_one_backbone)
    actor = ZeRO3(first)
    before = list(actor.parameters())
    for module, message in ((second, "share whole units only"), (first[0], "")):
        with pytest.raises(RuntimeError, match=f"of a wrapped Sequential.*{message}"):
            ZeRO3(module)
    assert all(a is b for a, b in zip(before, actor.parameters(), strict=True))
    assert type(second[1].weight) is nn.Parameter and second[1].weight.ndim == 2
    actor(x).sum().backward()
    assert all(p.grad is not None for p in actor.parameters())
    del actor, before
    critic = ZeRO3(second)
    expected = seeded(_over_one_backbone)[1](x)
    assert_bitwise(critic(x), expected, "after the first wrapper is gone")


@on_ranks(1)
def test_the_arguments_are_those_of_the_first_time() -> None:
    model = zero3(Mlp, Block, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    x = torch.randn(2, WIDTH)
    expected = model(x)
    model.blocks.append(nn.Identity())
    assert layerzero.rewrap(model) == []
    assert_bitwise(model(x), expected, "arguments are those of the first time")
    before = model.forward
    model.forward = lambda x: 2 * before(x)
    layerzero.rewrap(model)
    assert_bitwise(model(x), 2 * expected, "a patched forward stays")


@on_ranks(3)
def test_changes_are_written_back_or_not() -> None:
    for options in (
        {},
        {"writeback": False},
        {"rank0_only": True},
        {"rank0_only": True, "writeback": False},
        {"offload_to_cpu": True},
        {"rank0_only": True, "offload_to_cpu": True},
        {"rank0_only": True, "with_grads": True},
    ):
        model, plain = zero3(Mlp, Block), seeded(Mlp)
        shards = dict(model.named_parameters())
        with model.summon_full_params(**options), torch.no_grad():
            if not options.get("rank0_only") or dist.get_rank() == 0:
                for parameter in model.parameters():
                    parameter.mul_(2).add_(1)
                model.head.weight[0, 0] = 7
            else:
                assert all(p is shards[name] for name, p in model.named_parameters())
        if options.get("writeback", True):
            with torch.no_grad():
                for parameter in plain.parameters():
                    parameter.mul_(2).add_(1)
                plain.head.weight[0, 0] = 7
        with named(options):
            assert_trains_alike(model, plain, batches_of(CASES["mlp"], 3, steps=1))


@on_ranks(2)
def test_gradients_are_full_inside_and_written_back() -> None:
    for name in ("mlp", "unused_parts", "frozen_parts", "tied_across_units", "odd_shapes"):
        case = CASES[name]
        model, reference = sharded(case), plain(case)
        step = batches_of(case, dist.get_world_size(), steps=1)[0]
        forward_backward(model, step[dist.get_rank()])
        backward_of_all_ranks(reference, step)
        expected = full_gradients(reference)
        with model.summon_full_params(with_grads=True), torch.no_grad():
            gradients = {key: value.grad for key, value in model.named_parameters()}
            assert_same_parameters(gradients, expected, what=f"{name}: gradient of")
            for gradient in gradients.values():
                if gradient is not None:
                    gradient.mul_(3)
        tripled = {key: None if value is None else value * 3 for key, value in expected.items()}
        with model.summon_full_params():
            assert all(parameter.grad is None for parameter in model.parameters())
        after = full_gradients(model)
        assert_same_parameters(after, tripled, what=f"{name}: gradient of")
        with model.summon_full_params(with_grads=True, writeback=False):
            for parameter in model.parameters():
                parameter.grad = None
        assert_same_parameters(full_gradients(model), after, what=f"{name}: gradient of")
    model = zero3(Mlp, Block)
    forward_backward(model, mlp_batches(1)[0][dist.get_rank()])
    with model.summon_full_params(rank0_only=True, with_grads=True):
        if dist.get_rank() == 0:
            model.stem.weight.grad = None
            model.stem.bias.grad.fill_(2.0)
    written = full_gradients(model)
    assert written["stem.weight"] is None and written["head.weight"] is not None
    assert written["stem.bias"] is not None and written["stem.bias"].eq(2.0).all()


@on_ranks(2)
def test_a_nested_wrapper_summons_its_own_parameters_only() -> None:
    def build() -> nn.Module:
        model = Mlp()
        model.blocks[1] = ZeRO3(model.blocks[1])
        return model

    model, plain = zero3(build, Block), seeded(Mlp)
    inner = model.blocks[1]
    with inner.summon_full_params(), torch.no_grad():
        assert inner.up.weight.shape == (7, WIDTH)
        assert model.head.weight.dim() == 1 and model.blocks[0].up.weight.dim() == 1
        inner.up.weight.zero_()
    with torch.no_grad():
        plain.blocks[1].up.weight.zero_()
    assert_same_values(model, plain)


@on_ranks(2)
def test_inside_forward_backward_or_itself_it_is_refused() -> None:
    model = zero3(Mlp, Block)
    batch = batches_of(CASES["mlp"], 1, steps=1)[0][0]
    refused = 0

    def summon(*_: object) -> None:
        nonlocal refused
        with pytest.raises(RuntimeError, match=r"summon_full_params.*between steps"):
            model.summon_full_params().__enter__()
        refused += 1

    with model.summon_full_params():
        summon()
        assert model.head.weight.dim() == 2, "the outer one still holds"
    handle = model.blocks[0].up.register_forward_pre_hook(summon)
    output = model(batch)
    handle.remove()
    output.register_hook(summon)
    output.sum().backward()
    assert refused == 3
    model.zero_grad()
    assert_trains_alike(model, seeded(Mlp))


@on_ranks(3)
def test_ranks_evaluate_unequally_where_all_parameters_are_full() -> None:
    plain, model = seeded(Mlp).eval(), zero3(Mlp, Block).eval()
    own = [torch.full((2, WIDTH), float(index)) for index in range(3 * dist.get_rank())]
    with model.summon_full_params(writeback=False), torch.no_grad():
        outputs = [model(batch) for batch in own]
        outputs += [block(batch) for batch in own for block in model.blocks]
    with torch.no_grad():
        expected = [plain(batch) for batch in own]
        expected += [block(batch) for batch in own for block in plain.blocks]
    for index, (output, other) in enumerate(zip(outputs, expected, strict=True)):
        assert_bitwise(output, other, f"output {index}")
    assert_trains_alike(model, plain, mlp_batches(1))
