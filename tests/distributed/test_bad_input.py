"""Bad input is refused before the first collective: what, where, expected, what to do."""

import gc
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import layerzero
from layerzero import ZeRO3, units
from layerzero.checkpoint import ParameterShard
from tests.harness.compare import assert_same_values
from tests.harness.models import WIDTH, Block, Mlp, TiedAcrossUnits, loss_of
from tests.harness.ranks import on_ranks
from tests.harness.reference import backward_of_all_ranks, forward_backward, mlp_batches, seeded


def refuses(error: type[Exception], pattern: str, module: nn.Module | None = None, **options):
    with pytest.raises(error, match=pattern):
        ZeRO3(Mlp() if module is None else module, **options)


class _Elsewhere(nn.Parameter):
    """A parameter that says it is on an accelerator: there is none here."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


@on_ranks(2)
def test_a_module_on_two_devices_is_refused() -> None:
    module = Mlp()
    module.head.weight = _Elsewhere(torch.zeros(3, WIDTH))
    refuses(
        ValueError,
        rf"rank {dist.get_rank()}: parameters need one device, got "
        r"cpu \('stem\.weight'\) and cuda:0 \('head\.weight'\); move the module first",
        module,
        auto_wrap_policy={Block},
    )
    assert isinstance(module.stem.weight, nn.Parameter)
    assert module.stem.weight.shape == (WIDTH, WIDTH), "nothing was changed before the refusal"


class _Trained(nn.Parameter):
    """torch refuses an integer parameter that requires grad; a subclass may still claim it."""

    @property
    def requires_grad(self) -> bool:
        return True


@on_ranks(2)
def test_an_integer_parameter_that_requires_grad_is_refused() -> None:
    module = Mlp()
    module.codes = _Trained(torch.zeros(3, dtype=torch.int64), requires_grad=False)
    refuses(
        ValueError,
        rf"rank {dist.get_rank()}\): parameter 'codes' has dtype torch.int64 and requires grad; "
        r"expected a floating-point dtype",
        module,
    )


MATRIX = torch.arange(64.0).view(8, 8)
SHARED: dict[str, tuple[Tensor, Tensor]] = {
    "the same": (MATRIX, MATRIX),
    "a part": (MATRIX, MATRIX[2:3, 4:6]),
    "columns": (MATRIX[:, :5], MATRIX[:, 4:]),
    "one element": (MATRIX[0, :1].expand(8), MATRIX[:, 0]),
}
APART: dict[str, tuple[Tensor, ...]] = {
    "rows": tuple(MATRIX),
    "no elements": (MATRIX[:0], MATRIX[:0], MATRIX),
    "no memory": (torch.empty(3, device="meta"), torch.empty(3, device="meta")),
}


def _with(*tensors: Tensor) -> nn.Module:
    """An Mlp with parameters over the memory of `tensors`; all but the first are frozen."""
    module = Mlp()
    for index, tensor in enumerate(tensors):
        setattr(module, f"over_{index}", nn.Parameter(tensor, requires_grad=not index))
    return module


@on_ranks(2)
def test_two_parameters_over_one_memory_are_refused() -> None:
    for tensors in SHARED.values():
        for ignored in ((), ("over_0",), ("over_1",)):
            module = _with(*tensors)
            before = dict(module.named_parameters())
            refuses(
                ValueError,
                r"'over_[01]' and 'over_[01]' are two Parameters over the same memory.*tied",
                module,
                ignored_parameters=[before[name] for name in ignored],
            )
            assert dict(module.named_parameters()).items() == before.items(), "nothing was changed"
        module = _with(*tensors)
        ZeRO3(module, ignored_parameters=[module.over_0.requires_grad_(False), module.over_1])
    for tensors in APART.values():
        ZeRO3(_with(*tensors), param_init_fn="later")
    ZeRO3(nn.LSTM(4, 4, 2))
    late = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8, bias=False))
    late[1].weight.data = late[0].weight.data
    is_shared = dist.get_rank() == 0
    said = "" if is_shared else "rank 0 refused the module or an argument of ZeRO3: ValueError: "
    refuses(ValueError, f"{said}parameters '0.weight' and '1.weight'", late if is_shared else Mlp())


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((8,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.scale


COMPILERS = [torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(2, 8))]


@on_ranks(2)
def test_a_scripted_module_is_refused_if_it_has_parameters_to_shard() -> None:
    for to_script in COMPILERS:
        part = to_script(nn.Linear(8, 8))
        where = r"parameter '1\.weight' is in a scripted or traced module.*ignored_modules"
        refuses(ValueError, where, nn.Sequential(nn.Linear(8, 8), part))
        frozen = to_script(nn.Linear(8, 8).requires_grad_(False))
        module = nn.Sequential(nn.Linear(8, 8), to_script(_Scaled()), frozen)
        model = ZeRO3(module, auto_wrap_policy={nn.Linear}, ignored_modules=[frozen])
        model(torch.randn(2, 8)).sum().backward()


def test_torch_distributed_must_be_initialised() -> None:
    assert not dist.is_initialized()
    refuses(RuntimeError, "init_process_group")


@on_ranks(2)
def test_data_of_another_shape_or_dtype_is_refused_and_of_the_same_taken_over() -> None:
    torch.manual_seed(0)
    model = ZeRO3(Mlp(), auto_wrap_policy={Block})
    parameter = next(p for n, p in model.named_parameters() if n == "blocks.1.up.weight")
    x = torch.randn(2, WIDTH)
    numel = parameter.numel()
    parameter.data = torch.zeros(numel + 1)
    with pytest.raises(ValueError, match=r"blocks\.1 \(rank \d\).*'blocks.1.up.weight'.*expected"):
        model(x)
    parameter.data = torch.zeros(numel)
    model(x)
    with model.summon_full_params():
        whole = dict(model.named_parameters())["blocks.1.up.weight"]
        assert not whole.any(), "a replaced tensor of the right shape is taken over"


@on_ranks(2)
def test_an_optimizer_that_trained_before_wrapping_is_refused() -> None:
    module = Mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    loss_of(module(torch.ones(2, WIDTH))).backward()
    optimizer.step()
    model = ZeRO3(module)
    with pytest.raises(RuntimeError, match=r"built before wrapping and has state.*stem\.weight"):
        optimizer.step()
    del optimizer
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module = Mlp()
        kept = list(module.parameters())
        model = ZeRO3(module)
        torch.optim.SGD(model.parameters(), lr=0.1)
        assert kept


@on_ranks(2)
def test_an_optimizer_built_before_wrapping_trains_the_wrapped_model() -> None:
    models: list[nn.Module] = [seeded(TiedAcrossUnits) for _ in range(2)]
    optimizers = []
    for each in models:
        halves = ([*each.parameters()][k::2] for k in (0, 1))
        groups = [{"params": half, "lr": lr} for half, lr in zip(halves, (0.1, 0.05), strict=True)]
        optimizers.append(torch.optim.SGD(groups, momentum=0.9))
    models[0] = ZeRO3(models[0], auto_wrap_policy={Block})
    for step in mlp_batches():
        forward_backward(models[0], step[dist.get_rank()])
        backward_of_all_ranks(models[1], step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_values(*models)
    own = {p for group in optimizers[0].param_groups for p in group["params"]}
    assert own == {*models[0].parameters()}
    state = next(iter(optimizers[0].state_dict()["state"].values()))
    assert isinstance(state["momentum_buffer"], ParameterShard)


class _KeepsItsOwn(nn.Module):
    """A parameter that the forward reads from a list, as DARTS does, or from a closure."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))
        scale = self.scale
        self.kept = {"list": [scale], "closure": lambda: scale}[how]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.kept[0] if isinstance(self.kept, list) else self.kept()
        return self.layer(x) * scale


@on_ranks(2)
def test_a_gradient_for_a_parameter_of_before_wrapping_is_refused() -> None:
    for how in ("list", "closure"):
        model = ZeRO3(_KeepsItsOwn(how), auto_wrap_policy={nn.Linear})
        with torch.no_grad():
            model(torch.ones(2, WIDTH))
        for _ in range(2):  # Each time, and nothing is left behind.
            with pytest.raises(RuntimeError, match=r"gradient of 'scale' as it was before wrap"):
                loss_of(model(torch.ones(2, WIDTH))).backward()
            assert all(parameter.grad is None for parameter in model.parameters())


@on_ranks(2)
def test_calls_at_the_wrong_time_are_refused() -> None:
    with pytest.raises(ValueError, match="expected a ZeRO3 module, got Mlp"):
        units(Mlp())
    model = ZeRO3(Mlp())
    with pytest.raises(ValueError, match="has no method 'generate'"):
        layerzero.register_forward_method(model, "generate")
    with pytest.raises(ValueError, match="Mlp is not a unit"):
        layerzero.register_forward_method(Mlp(), "forward")
    with model.summon_full_params():
        with pytest.raises(RuntimeError, match="the gradients would not be reduced"):
            model(torch.randn(2, WIDTH))
        with torch.no_grad():
            model(torch.randn(2, WIDTH))
    model.module.register_forward_pre_hook(lambda *_: model.reduce_gradients())
    with pytest.raises(RuntimeError, match="inside forward or backward"):
        model(torch.randn(2, WIDTH))
