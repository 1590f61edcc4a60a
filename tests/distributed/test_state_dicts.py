"""State dicts by name: shards for torch.distributed.checkpoint, full tensors, streams of them; and
an optimizer's own, which torch's functions save and load as they do of one process."""

import copy
import io
import time
import warnings
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as theirs
from torch.distributed.checkpoint import state_dict as torch_helpers
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import fully_shard

from layerzero import ZeRO3, checkpoint
from layerzero.checkpoint import CheckpointError, ParameterShard
from layerzero.optim import decay_groups
from layerzero.state_dict import full_tensors
from tests.harness.checks import assert_bitwise, assert_same_parameters
from tests.harness.compare import linears
from tests.harness.internals import inner_units
from tests.harness.models import WIDTH, Block, Mlp, frozen_parts, loss_of
from tests.harness.ranks import KeptRanks, on_ranks
from tests.harness.recording import observed, recorded_operations
from tests.harness.saved_models import OPTIMIZERS, State, assert_same, build, everything, train


class Tagged(Mlp):
    """With a buffer that is saved, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.randn(WIDTH))
        self.register_buffer("scratch", torch.randn(2), persistent=False)


def _full(model: ZeRO3) -> dict[str, Tensor]:
    with model.summon_full_params(writeback=False):
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


class Renamed(nn.Module):
    """Leaves itself out of the names in its state dict, as Megatron's Float16Module does."""

    def __init__(self) -> None:
        super().__init__()
        self.module = frozen_parts()

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)

    def state_dict(self, *, prefix: str = "", **options: Any) -> Any:
        return self.module.state_dict(prefix=prefix, **options)

    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        return self.module.load_state_dict(state_dict, *args, **options)

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Any:
        return self.module.named_parameters(prefix, recurse)


@on_ranks(2)
def test_a_model_may_name_things_otherwise_in_its_state_dict() -> None:
    model, optimizer = build(Renamed, in_groups=True)
    grouped = {id(p) for group in decay_groups(model) for p in group["params"]}
    assert grouped == {id(p) for p in model.parameters() if p.requires_grad}
    train(model, optimizer)
    expected = {name.removeprefix("module."): value for name, value in _full(model).items()}
    full = checkpoint.get_model_state_dict(model, full=True)
    assert_same_parameters(full, expected)
    frozen_parts().load_state_dict(full)
    other, _ = build(Renamed, 1, in_groups=True)
    checkpoint.set_model_state_dict(other, full)
    assert_same_parameters(_full(other), _full(model))


@on_ranks(2)
def test_shards_can_be_copied_cast_saved_and_loaded_on_their_rank() -> None:
    model, _ = build(Tagged, in_groups=True)
    expected = _full(model)
    shards = model.state_dict()
    copied = copy.deepcopy(shards)
    # As torchtune gathers.
    gathered = {n: v.full_tensor() for n, v in shards.items() if hasattr(v, "_local_tensor")}
    assert [*gathered] == [name for name, _ in model.named_parameters()]
    assert_same_parameters(gathered, {name: expected[name] for name in gathered})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    for name, parameter in model.named_parameters():
        shard = shards[name]
        assert shard.shape == expected[name].shape
        assert_bitwise(shard.local, parameter.detach(), name)  # shares memory
        assert_bitwise((copied[name] + 1).local, parameter.detach(), name)
        assert torch.equal(shard.bfloat16().local, parameter.detach().bfloat16())
        assert torch.equal(shard.clone(), shard)
        for needs_others in (
            *(Tensor.sum, lambda t: t.view(-1), lambda t: t @ t.T),
            *(lambda t: t.tolist(), lambda t: torch._foreach_norm([t])),
            lambda t: dist.broadcast(t, 0),
        ):
            with pytest.raises((NotImplementedError, RuntimeError), match="whole"):
                needs_others(shard)
    # As timm's ModelEmaV3.
    averages, values = list(copy.deepcopy(copied).values()), list(shards.values())
    torch._foreach_lerp_(averages, values, weight=0.25)
    steps = torch._foreach_sub(averages, list(copied.values()))
    for average, value, step, old in zip(averages, values, steps, copied.values(), strict=True):
        assert torch.equal(average, old.lerp(value, 0.25)) and torch.equal(step, average - old)
    file = io.BytesIO()
    torch.save(copied, file)
    file.seek(0)
    model.load_state_dict(torch.load(file))
    assert_same_parameters(_full(model), expected)
    for fill, value in ((lambda shard: shard.fill_(0.5), 0.5), (Tensor.zero_, 0.0)):
        for shard in model.state_dict().values():
            assert fill(shard) is shard
        assert all(bool((parameter == value).all()) for parameter in model.parameters())
    with pytest.raises(RuntimeError, match=r"stem\.weight: size mismatch.*\(5, 4\).*\(5, 5\)"):
        model.load_state_dict({**copied, "stem.weight": torch.ones(5, 4)})
    with pytest.raises(RuntimeError, match=r"Missing key.*head"):
        model.load_state_dict({n: v for n, v in copied.items() if "head" not in n})
    model.load_state_dict(expected, assign=True)  # the shards stay the parameters
    loss_of(model(torch.ones(1, WIDTH))).backward()
    assert all(p.grad is not None for p in model.parameters() if p.numel())
    inner = model.blocks[0].state_dict()
    assert all(type(value) is checkpoint.ParameterShard for value in inner.values())
    model.blocks[0].load_state_dict({n: torch.zeros(v.shape) for n, v in inner.items()})
    assert not any(_full(model)[f"blocks.0.{name}"].any() for name in inner)


def _built(engine: str, seed: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    if engine == "layerzero":
        return build(Tagged, seed, **options)
    torch.manual_seed(seed)
    model = Tagged()
    for module in (*filter(lambda inner: isinstance(inner, Block), model.modules()), model):
        fully_shard(module)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


_FULL = torch_helpers.StateDictOptions(full_state_dict=True)


def _write(folder: str, engine: str) -> tuple[State, State]:
    model, optimizer = _built(engine, 0)
    train(model, optimizer)
    dcp.save(dict(enumerate(torch_helpers.get_state_dict(model, optimizer))), checkpoint_id=folder)
    return torch_helpers.get_state_dict(model, optimizer, options=_FULL)


def _read(folder: str, engine: str, expected: tuple[State, State]) -> None:
    options = {"zero3_size": 1} if engine == "layerzero" else {}
    model, optimizer = _built(engine, 1, **options)
    both = dict(enumerate(torch_helpers.get_state_dict(model, optimizer)))
    dcp.load(both, checkpoint_id=folder)
    torch_helpers.set_state_dict(
        model, optimizer, model_state_dict=both[0], optim_state_dict=both[1]
    )
    weights, state = torch_helpers.get_state_dict(model, optimizer, options=_FULL)
    assert_same_parameters(weights, expected[0], what=engine)
    for name, own in expected[1]["state"].items():
        assert_same_parameters(state["state"][name], own, what=f"{engine} {name}")


def test_distributed_checkpoints_load_under_either_engine(tmp_path: Path, ranks: KeptRanks) -> None:
    theirs, ours = str(tmp_path / "theirs"), str(tmp_path / "ours")
    expected = ranks(2, _write, theirs, "fully_shard")[0]
    ranks(2, _read, theirs, "layerzero", expected)
    expected = ranks(2, _write, ours, "layerzero")[0]
    ranks(3, _read, ours, "fully_shard", expected)


@on_ranks(2)
def test_a_fresh_optimizer_shows_its_state_to_be_and_stays_fresh() -> None:
    model, _ = build(Tagged, 0)
    before = _full(model)
    for make, keys in (
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), {"momentum_buffer"}),
        (lambda p: torch.optim.SGD(p, lr=0.1), set()),
        (
            lambda p: torch.optim.AdamW(p, amsgrad=True, weight_decay=0.5),
            {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
        ),
        (lambda p: torch.optim.RMSprop(p, centered=True), {"step", "square_avg", "grad_avg"}),
    ):
        optimizer = make(model.parameters())
        fired: list[int] = []
        optimizer.register_step_pre_hook(lambda *_, fired=fired: fired.append(1))
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
        state = checkpoint.get_optimizer_state_dict(model, optimizer)["state"]
        for name, parameter in model.named_parameters():
            assert set(state.get(name, {})) == keys, optimizer
            for key, value in state.get(name, {}).items():
                if key == "step":
                    assert value == 0
                else:
                    assert value.shape == before[name].shape
                    assert value.local.shape == parameter.shape
        assert not fired
        assert not optimizer.state
    assert_same_parameters(_full(model), before)


@on_ranks(1)
def test_groups_are_known_by_their_parameters() -> None:
    model, optimizer = build(Tagged, in_groups=True)
    state = checkpoint.get_optimizer_state_dict(model, optimizer)
    turned = torch.optim.AdamW(
        [{"params": list(group["params"])} for group in reversed(optimizer.param_groups)]
    )
    checkpoint.set_optimizer_state_dict(model, turned, state)
    assert [group["lr"] for group in turned.param_groups] == [0.02, 0.05]
    with pytest.raises(
        checkpoint.CheckpointError, match="group 0 mixes parameters of saved groups"
    ):
        checkpoint.set_optimizer_state_dict(model, torch.optim.AdamW(model.parameters()), state)
    del state["param_groups"][1]
    with pytest.raises(checkpoint.CheckpointError, match="group 1 has parameters that the saved"):
        checkpoint.set_optimizer_state_dict(model, optimizer, state)
    checkpoint.set_optimizer_state_dict(model, optimizer, state, strict=False)


@on_ranks(2)
def test_full_tensors_are_streamed_in_a_dtype_and_by_name() -> None:
    """All of them in their own dtype: test_checkpoint.py, of every toy model."""
    model, _ = build(Tagged, 0)
    expected = checkpoint.get_model_state_dict(model, full=True)
    for nbytes in (1, "1GB"):
        for name, value in checkpoint.stream_full(model, nbytes, dtype=torch.bfloat16):
            own = expected[name].bfloat16() if name != "mean" else expected[name]
            assert_bitwise(value, own, name)
    model, optimizer = build(Mlp, 0)
    name, parameter = next(iter(model.named_parameters()))
    with recorded_operations(model) as operations:
        ((found, value),) = checkpoint.stream_full(model, only={name})
        assert not list(checkpoint.stream_full(model, only=()))
    assert found == name and value.shape == parameter.layerzero.shape
    unit = next(unit for unit in inner_units(model) if any(name in h.fqns for h in unit.handles))
    assert {operation.unit for operation in operations} <= {h.fqns[0] for h in unit.handles}
    next(checkpoint.stream_full(model, 1))  # stopped early
    train(model, optimizer)


def _alive(made: list[ref[Tensor]], at_most: int) -> list[int]:
    """Bytes of each that is; a thread of gloo lets go a moment after it said that it is done."""
    deadline = time.monotonic() + 5
    while True:
        found = [full.nbytes for full in (each() for each in made) if full is not None]
        if len(found) <= at_most or time.monotonic() > deadline:
            return found
        time.sleep(0.01)


@on_ranks(2)
def test_the_next_flat_parameter_is_gathered_ahead_within_the_bytes_allowed() -> None:
    one = 64 * 64 * 4
    made: list[ref[Tensor]] = []
    model = linears(4, 64)
    for nbytes, at_most in ((2 * one, 2), (2 * one - 1, 1)):
        found = []
        with observed(full_tensors, "_gather", after=lambda pair, *_: made.append(ref(pair[0]))):
            for _, value in checkpoint.stream_full(model, nbytes):
                found.append(len(_alive(made, at_most)))
                del value
        assert max(found) == at_most
        assert not _alive(made, 0)
    with pytest.raises(ValueError, match="bucket_bytes"):
        checkpoint.stream_full(model, 0)


class CopiesByName(Mlp):
    """Loads as much old code does: into the tensors of its own state dict."""

    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        own = self.state_dict()
        for name, value in state_dict.items():
            own[name].copy_(value)


@on_ranks(2)
def test_a_module_that_copies_into_its_own_state_dict_loads() -> None:
    model, _ = build(CopiesByName, in_groups=True)
    torch.manual_seed(3)
    values = Mlp().state_dict()
    model(torch.ones(2, WIDTH))  # the last unit stays full
    for given in (values, {name: nn.Parameter(value + 1) for name, value in values.items()}):
        model.load_state_dict(given)
        assert_same_parameters(_full(model), {n: v.detach() for n, v in given.items()})
        plain = Mlp()
        plain.load_state_dict(given)
        assert_bitwise(model(torch.ones(2, WIDTH)), plain(torch.ones(2, WIDTH)))
    before = _full(model)
    with pytest.raises(RuntimeError):
        model.load_state_dict({"stem.weight": torch.ones(WIDTH, WIDTH + 1)})
    assert_same_parameters(_full(model), before)


@on_ranks(2)
def test_what_writes_or_records_a_whole_model_is_refused_with_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / str(dist.get_rank())
    path.mkdir()
    model, _ = build(Tagged, in_groups=True)
    calls = {
        "save_file": lambda: safetensors.torch.save_file(model.state_dict(), path / "a"),
        "save_model": lambda: safetensors.torch.save_model(model, str(path / "b")),
        "numpy": lambda: model.state_dict()["stem.weight"].cpu().numpy(),
        "storage": lambda: model.state_dict()["stem.weight"].untyped_storage().data_ptr(),
        # As from a file that one rank wrote with torch.save.
        "load": lambda: Mlp().load_state_dict(model.state_dict()),
        # A shard of one element fits any shape.
        "copy_": lambda: torch.ones(dist.get_world_size()).copy_(
            ZeRO3(nn.Linear(1, dist.get_world_size())).state_dict()["bias"]
        ),
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=r"get_model_state_dict\(model, full=True"):
            call()
            pytest.fail(name)
    batch = torch.ones(2, WIDTH)
    for record in (
        lambda: torch.export.export(model, (batch,)),
        lambda: torch.jit.trace(model, (batch,)),
    ):
        with (
            warnings.catch_warnings(),
            pytest.raises(NotImplementedError, match=r"root unit: .*and export"),
        ):
            warnings.filterwarnings("error", message="torch.compile around")
            record()
    assert not list(path.iterdir())
    loss_of(model(batch)).backward()  # the model is as it was


FULL = theirs.StateDictOptions(full_state_dict=True)


@on_ranks(2)
def test_a_rank_keeps_saving_and_loading_its_own_state() -> None:
    model, optimizer = build(in_groups=True)
    train(model, optimizer)
    expected = everything(model, optimizer)
    state = optimizer.state_dict()
    number = state["param_groups"][0]["params"][0]
    shard = state["state"][number]["exp_avg"]
    sharded_param = optimizer.param_groups[0]["params"][0]
    kept = optimizer.state[sharded_param]["exp_avg"]
    assert type(shard) is ParameterShard and type(kept) is Tensor
    assert shard.shape == sharded_param.layerzero.shape
    assert shard.local.data_ptr() == kept.data_ptr(), "shares its memory"
    name = sharded_param.layerzero.fqn
    assert_bitwise(shard.full_tensor(), expected[1]["state"][name]["exp_avg"], name)
    assert_bitwise(model.state_dict()[name].full_tensor(), expected[0][name], name)

    copied = copy.deepcopy(state)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    read = torch.load(file)
    bare = {
        "state": {
            number: {k: v.local if isinstance(v, ParameterShard) else v for k, v in own.items()}
            for number, own in copied["state"].items()
        },
        "param_groups": copied["param_groups"],
    }
    train(model, optimizer, 1)
    for what, given in {"a copy": copied, "a file": read, "bare pieces": bare}.items():
        other, other_optimizer = build(Mlp, 1, in_groups=True)
        other.load_state_dict(expected[0])
        other_optimizer.load_state_dict(given)
        assert_same(everything(other, other_optimizer), expected, what)
    with pytest.raises(ValueError, match="read from a file"):
        next(v for v in read["state"][number].values() if v.ndim).full_tensor()

    # Schedulers, copies and pickles see an optimizer as ever.
    schedule = torch.optim.lr_scheduler.LambdaLR(other_optimizer, lambda step: 0.5**step)
    twin = copy.copy(other_optimizer)
    assert type(twin.state_dict()["state"][number]["exp_avg"]) is ParameterShard
    pickled = io.BytesIO()
    torch.save(other_optimizer, pickled)
    pickled.seek(0)
    loaded = torch.load(pickled, weights_only=False)
    loaded.load_state_dict(other_optimizer.state_dict())
    train(other, other_optimizer, 1)
    schedule.step()
    assert other_optimizer.state_dict()["param_groups"][0]["lr"] == 0.025


class _Late(torch.optim.SGD):
    """Keeps more from its second step on."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if "seen" in state:
                state["slow"] = parameter.detach().clone()
            state["seen"] = 1
        return super().step(closure)


class _Means(torch.optim.SGD):
    """Has the options of SGD, and other state."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for state in self.state.values():
            state["mean"] = state.pop("momentum_buffer")
        return loss


@on_ranks(2)
def test_state_that_does_not_fit_is_refused_before_anything_changes(tmp_path: Path) -> None:
    model, optimizer = build(in_groups=True)
    train(model, optimizer)
    expected = everything(model, optimizer)
    groups = [{"params": group["params"]} for group in optimizer.param_groups]
    momentum = OPTIMIZERS["momentum"]([dict(group) for group in groups])
    train(model, momentum, 1)
    model.load_state_dict(expected[0])
    saved = {"adamw": optimizer.state_dict(), "momentum": momentum.state_dict()}
    by_name = theirs.get_optimizer_state_dict(model, optimizer)
    kept = copy.deepcopy(momentum.state_dict())

    checkpoint.save(tmp_path, model, optimizer)
    with torch.no_grad():
        model.head.weight.zero_()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    means = _Means([dict(group) for group in groups], lr=0.05, momentum=0.9)
    ungrouped = {"param_groups": [{"params": [*range(len([*model.parameters()]))]}]}
    bad = [copy.deepcopy(saved["momentum"]) for _ in range(2)]
    for state, wrong in zip(bad, (torch.zeros(2, 3), torch.zeros(3)), strict=True):
        state["state"][0]["momentum_buffer"] = wrong
    mismatch = f"'momentum_buffer' of {groups[0]['params'][0].layerzero.fqn}: size mismatch"
    for load, text in (
        (lambda: momentum.load_state_dict(saved["adamw"]), "saved by another optimizer class"),
        (lambda: means.load_state_dict(saved["momentum"]), "_Means keeps mean: it was saved by"),
        (lambda: optimizer.load_state_dict(saved["momentum"]), "saved by another optimizer class"),
        (
            lambda: theirs.set_optimizer_state_dict(model, momentum, by_name),
            "exp_avg.* SGD keeps momentum_buffer",
        ),
        (
            lambda: checkpoint.set_optimizer_state_dict(model, momentum, by_name),
            "another optimizer class",
        ),
        (lambda: checkpoint.load(tmp_path, model, momentum), "another optimizer class"),
        (lambda: sgd.load_state_dict({**saved["adamw"], **ungrouped}), "SGD keeps nothing"),
        (lambda: momentum.load_state_dict(bad[0]), mismatch),
        (lambda: momentum.load_state_dict(bad[1]), mismatch),
    ):
        with pytest.raises(CheckpointError, match=text):
            load()
    assert not model.head.weight.any(), "nothing was loaded"
    full = copy.deepcopy(saved["momentum"])
    full["state"][0]["momentum_buffer"] = torch.ones(groups[0]["params"][0].layerzero.shape)
    for state, own in kept["state"].items():
        now = momentum.state_dict()["state"][state]["momentum_buffer"]
        assert torch.equal(now, own["momentum_buffer"]), "what was refused changed nothing"
    momentum.load_state_dict(full)
    buffer = momentum.state[groups[0]["params"][0]]["momentum_buffer"]
    assert buffer.shape == groups[0]["params"][0].shape
    assert bool((buffer == 1).all())

    # AdamW takes what Adam kept, and a class may add state after its first step.
    torch.optim.Adam([dict(group) for group in groups]).load_state_dict(saved["adamw"])
    late = _Late(model.parameters(), lr=0.1)
    train(model, late, 2)
    fresh = _Late(model.parameters(), lr=0.1)
    fresh.load_state_dict(late.state_dict())
    assert "slow" in next(iter(fresh.state.values()))


class Flat(torch.optim.SGD):
    """Keeps one vector of all that it has, as LBFGS does."""

    def step(self, closure: Any = None) -> Any:
        parameters = self.param_groups[0]["params"]
        loss = super().step(closure)
        self.state[parameters[0]]["d"] = torch.cat([each.detach() for each in parameters])
        return loss


@on_ranks(2)
def test_state_that_no_other_ranks_could_load_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    model = ZeRO3(Mlp(), auto_wrap_policy={Block})
    optimizer = Flat(model.parameters(), lr=0.1)
    batch = torch.ones(2, WIDTH)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(batch))
        loss.backward()
        return loss

    optimizer.step(closure)
    state = optimizer.state_dict()
    with pytest.raises(CheckpointException, match="cannot be resharded"):
        dcp.save({"optimizer": state}, checkpoint_id=tmp_path)
    with pytest.raises(NotImplementedError, match=r"optimizer state 'd' of .*torch\.save"):
        theirs.get_optimizer_state_dict(model, optimizer, options=FULL)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    again = Flat(model.parameters(), lr=0.1)
    again.load_state_dict(torch.load(file))
    (own,), (expected,) = again.state.values(), optimizer.state.values()
    assert type(own["d"]) is Tensor
    assert_bitwise(own["d"], expected["d"])
    again.step(closure)


@on_ranks(2)
def test_ranks_that_would_gather_different_tensors_raise() -> None:
    model, optimizer = build(in_groups=True)
    train(model, optimizer)
    weights = model.state_dict()
    if dist.get_rank() == 1:
        del weights["head.weight"]
    with pytest.raises(CheckpointError, match=r"differ between ranks: 15 on rank 0, 14 on rank 1"):
        theirs._gather_state_dict(weights)
