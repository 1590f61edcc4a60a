"""save and load: any world size to any other, partly, in the background, with all a run needs."""

import copy
import functools
import gc
import json
import random
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import safetensors
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as theirs

from layerzero import OffloadPolicy, ZeRO3
from layerzero.checkpoint import (
    CheckpointError,
    get_model_state_dict,
    get_optimizer_state_dict,
    load,
    save,
    saving,
    set_model_state_dict,
    set_optimizer_state_dict,
    stream_full,
    transfer,
)
from tests.harness.checks import assert_bitwise, assert_same_parameters
from tests.harness.host_memory import FakeRuntime
from tests.harness.internals import host_memory as host
from tests.harness.models import CASES, WIDTH, Block, Mlp, OddShapes, TiedAcrossUnits, loss_of
from tests.harness.ranks import KeptRanks, of_all_ranks, on_ranks
from tests.harness.recording import logged, observed
from tests.harness.reference import on_meta
from tests.harness.saved_models import (
    OPTIMIZERS,
    Whole,
    assert_same,
    assert_same_state,
    build,
    everything,
    train,
)
from tests.harness.simulated_device import simulated_device
from tests.harness.traffic import SentBytes

MODELS = [
    *("mlp", "repeated_module", "tied_in_unit", "tied_across_units", "shared_module"),
    *("transformer", "frozen_parts", "odd_shapes", "mixed_dtypes", "no_parameters"),
]
Values = dict[str, Any]


FLAT = theirs.StateDictOptions(flatten_optimizer_state_dict=True)
FULL = theirs.StateDictOptions(full_state_dict=True)


def _in_parts(module: nn.Module, auto_wrap_policy: set[type[nn.Module]]) -> nn.Module:
    """Its units are wrapped each by itself; what is around them is whole on every rank."""
    for around in [*module.modules()]:
        for name, child in around.named_children():
            if type(child) in auto_wrap_policy:
                setattr(around, name, ZeRO3(child))
    return module


def _make(number: int, seed: int, shift: int = 0) -> tuple[ZeRO3, torch.optim.Optimizer]:
    """A toy model, sharded in one of several ways, with optimizer state."""
    options: list[Values] = [{"wrap": _in_parts}, {"layout": "rows"}, {"layout": "rows(2)"}]
    options += [{}, {"auto_wrap_policy": None}, {"zero3_size": 1}]
    if dist.get_world_size() == 4:
        options += [{"zero3_size": 2}, {"zero3_size": 2, "outer": "replicate"}]
        options += [{"zero3_size": 2, "outer": "shard"}]
    case = CASES[MODELS[number]]
    given = {"auto_wrap_policy": set(case.units), **options[(number + shift) % len(options)]}
    model, optimizer = build(case.build, seed, _kind(number), in_groups=True, **given)
    _step(model, optimizer)
    return model, optimizer


def _kind(number: int) -> str:
    return [*OPTIMIZERS][number % len(OPTIMIZERS)]


def _step(model: ZeRO3, optimizer: torch.optim.Optimizer) -> None:
    for parameter in filter(lambda each: each.requires_grad, model.parameters()):
        draw = torch.randn_like if hasattr(parameter, "layerzero") else torch.ones_like
        parameter.grad = draw(parameter)
    optimizer.step()
    optimizer.zero_grad()


def _save_all(root: str) -> list[Whole]:
    """Each model by our format, and by torch's; what is in them."""
    written, saved = [], {}
    for number, name in enumerate(MODELS):
        model, optimizer = _make(number, seed=number)
        save(root, model, optimizer, step=number, max_file_size="300B" if name == "mlp" else "5GB")
        weights, state = theirs.get_state_dict(model, optimizer)
        flat = theirs.get_optimizer_state_dict(model, optimizer, options=FLAT)
        saved[name] = [weights, state, optimizer.state_dict(), flat]
        written.append(everything(model, optimizer))
        _check_full_states(number, model, optimizer, written[-1])
    dcp.async_save(saved, checkpoint_id=f"{root}/dcp").result()
    return written


_WAYS = (3, 2, 1, 0, 1, 2, 3, 0, 2, 1)
"""By the number of a model. What torch sends from the first rank has each module under one name."""


def _check_full_states(
    number: int, model: ZeRO3, optimizer: torch.optim.Optimizer, expected: Whole
) -> None:
    """Streamed, and by torch's functions: into a plain model; from the first rank, or from every
    rank, into a sharded one, for which some models also go by our functions."""
    name = MODELS[number]
    streamed = {name: value.clone() for name, value in stream_full(model, 200)}
    assert_same_parameters(streamed, {name: expected.model[name] for name in streamed})
    on_host = theirs.StateDictOptions(full_state_dict=True, cpu_offload=True)
    from_first = theirs.get_state_dict(model, optimizer, options=on_host)
    from_all = theirs.get_state_dict(model, optimizer, options=FULL)
    if dist.get_rank() > 0:
        assert from_first == ({}, {})
    else:
        assert_same(from_first, expected, name)
        plain, twin = build(
            CASES[name].build, 97, _kind(number), in_groups=True, wrap=lambda module, **_: module
        )
        _set_by_torch(plain, twin, from_first, FULL)
        assert_same(theirs.get_state_dict(plain, twin), expected, f"{name}, unsharded")
    other, its_optimizer = _make(number, seed=98)
    way = _WAYS[number]
    if way == 3:
        state = get_optimizer_state_dict(model, optimizer, full=True, rank0_only=True)
        set_model_state_dict(other, from_first[0], broadcast_from_rank0=True)
        set_optimizer_state_dict(other, its_optimizer, state, broadcast_from_rank0=True)
    else:
        sent = theirs.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        how = (sent, FULL, theirs.StateDictOptions())[way]
        _set_by_torch(other, its_optimizer, from_all if way else from_first, how)
    assert_same(everything(other, its_optimizer), expected, f"{name}, {way}")


def _set_by_torch(
    model: nn.Module, optimizer: torch.optim.Optimizer, given: Any, how: theirs.StateDictOptions
) -> None:
    weights, state = copy.deepcopy(given)
    theirs.set_model_state_dict(model, weights, options=how)
    theirs.set_optimizer_state_dict(model, optimizer, state, options=how)


def _load_all(root: str, expected: list[Whole]) -> None:
    built, saved = [], {}
    for number, name in enumerate(MODELS):
        model, optimizer = _make(number, seed=99, shift=1)
        load(f"{root}/step-{number:08d}", model, optimizer)
        assert_same(everything(model, optimizer), expected[number], name)
        _step(model, optimizer)
        fresh, other = (
            OPTIMIZERS[_kind(number)]([{"params": g["params"]} for g in optimizer.param_groups])
            for _ in range(2)
        )
        weights, state = theirs.get_state_dict(model, fresh)
        flat = theirs.get_optimizer_state_dict(model, other, options=FLAT)
        # The optimizer's own, without names, goes into one that has state.
        saved[name] = [weights, state, optimizer.state_dict(), flat]
        built.append((model, optimizer, fresh, other))
    dcp.load(saved, checkpoint_id=f"{root}/dcp")
    for name, values, (model, optimizer, fresh, other) in zip(MODELS, expected, built, strict=True):
        weights, state, own, flat = saved[name]
        found = get_model_state_dict(model, full=True)
        assert_same_state(found, values.model, f"{name}, loaded into the shards' memory")
        theirs.set_state_dict(model, fresh, model_state_dict=weights, optim_state_dict=state)
        optimizer.load_state_dict(own)
        theirs.set_optimizer_state_dict(model, other, flat, options=FLAT)
        for what, each in {"by names": fresh, "without": optimizer, "flat": other}.items():
            assert_same(everything(model, each), values, f"{name}, {what}")


@pytest.mark.parametrize(
    ("written_by", "read_by"), [(3, [2]), pytest.param(4, [1, 3], marks=pytest.mark.slow)]
)
def test_what_some_ranks_wrote_any_number_reads_bit_for_bit(
    tmp_path: Path, written_by: int, read_by: list[int], ranks: KeptRanks
) -> None:
    expected = ranks(written_by, _save_all, str(tmp_path))[0]
    for world_size in read_by:
        ranks(world_size, _load_all, str(tmp_path), expected)
    # Any safetensors reader sees the full tensors.
    for step, values in enumerate(expected):
        folder = tmp_path / f"step-{step:08d}"
        found, metadata = _stored(folder, "model")
        for name, tensor in found.items():
            assert_bitwise(tensor, values.model[name], name)
        assert metadata["format"] == "pt"
        assert found.keys() | metadata.keys() == values.model.keys() | {"format"}
        state, _ = _stored(folder, "optimizer")
        for name, own in values.optimizer["state"].items():
            for key, tensor in own.items():
                assert_bitwise(state[f"{name}/{key}"], tensor, f"{name}/{key}")
    # The first one is split into several files.
    folder = tmp_path / "step-00000000"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    total = sum(value.nbytes for value in expected[0].model.values())
    assert index["metadata"]["total_size"] == total
    assert index["weight_map"].keys() == expected[0].model.keys()
    assert len(set(index["weight_map"].values())) > 3
    assert all(name in load_file(folder / file) for name, file in index["weight_map"].items())


def _stored(folder: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of all files of a kind."""
    tensors, metadata = dict[str, Tensor](), dict[str, str]()
    for path in folder.glob(f"{kind}*.safetensors"):
        tensors |= load_file(path)
        with safetensors.safe_open(path, "pt") as file:
            metadata |= file.metadata() or {}
    return tensors, metadata


def _layers() -> nn.Module:
    return nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])


@on_ranks(2)
def test_no_parameter_is_sent_and_a_model_from_the_meta_device_is_filled(tmp_path: Path) -> None:
    model = ZeRO3(_layers(), auto_wrap_policy={nn.Linear})
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    with SentBytes() as saved:
        save(tmp_path, model, optimizer)
    other = ZeRO3(on_meta(_layers), auto_wrap_policy={nn.Linear}, param_init_fn="later")
    other_optimizer = torch.optim.AdamW(other.parameters())
    with SentBytes() as sent:
        load(tmp_path, other, other_optimizer)
    # Names, shapes and checksums: a smaller share, the larger the model.
    one_weight = 256 * 256 * 4
    assert 0 < saved.nbytes < one_weight / 8
    assert 0 < sent.nbytes < one_weight / 4
    assert_same(everything(other, other_optimizer), everything(model, optimizer))


@on_ranks(2)
def test_main_weights_may_be_of_another_dtype(tmp_path: Path) -> None:
    for number, (written, read) in enumerate(
        [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
    ):
        torch.manual_seed(0)
        model = ZeRO3(Mlp().to(written), auto_wrap_policy={Block})
        optimizer = torch.optim.AdamW(model.parameters())
        loss_of(model(torch.ones(1, WIDTH, dtype=written))).backward()
        optimizer.step()
        save(tmp_path, model, optimizer, step=number)
        expected = everything(model, optimizer)
        other = ZeRO3(Mlp().to(read), auto_wrap_policy={Block})
        other_optimizer = torch.optim.AdamW(other.parameters())
        load(tmp_path, other, other_optimizer)
        found = everything(other, other_optimizer)
        for name, value in expected.model.items():
            assert_bitwise(found.model[name], value.to(read), name)
            state = found.optimizer["state"][name]
            for key, old in expected.optimizer["state"][name].items():
                assert_bitwise(state[key], old if key == "step" else old.to(read), f"{name} {key}")


class WideMomentum(torch.optim.Optimizer):
    """State in float64 whatever the parameter is, a counter that is no tensor, and a remark."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "remark": ("a", {1: None})})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["note"] = f"step {state['count']}"
                wide = state.setdefault("wide", torch.zeros_like(parameter, dtype=torch.float64))
                wide.mul_(0.9).add_(parameter.grad.double())
                parameter.sub_((group["lr"] * wide).to(parameter.dtype))


class WithState(Mlp):
    """Buffers of both kinds, an ignored frozen parameter, and state of its own making."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.randn(WIDTH))
        self.register_buffer("scratch", torch.randn(2), persistent=False)
        self.head.register_buffer("count", torch.tensor(3))
        self.temperature = nn.Parameter(torch.rand(()), requires_grad=False)
        self.seen = 0

    def get_extra_state(self) -> Values:
        return {"seen": self.seen}

    def set_extra_state(self, state: Values) -> None:
        self.seen = state["seen"]

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(x) * self.temperature


def _whole_run(root: str) -> None:
    """An optimizer of any kind with groups, a scheduler, extra, random states, buffers, ignored
    parameters, extra state."""

    def build(seed: int) -> tuple[ZeRO3, torch.optim.Optimizer, Any]:
        torch.manual_seed(seed)
        module = WithState()
        ignored = [module.temperature]
        model = ZeRO3(module, auto_wrap_policy={Block}, ignored_parameters=ignored)
        named = dict(model.named_parameters())
        decayed = [p for name, p in named.items() if name.endswith("weight")]
        other = [p for name, p in named.items() if not name.endswith("weight")]
        optimizer = WideMomentum([{"params": decayed}, {"params": other, "lr": 0.3}])
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, [0.1, 0.3], total_steps=20, cycle_momentum=False
        )
        return model, optimizer, scheduler

    def step(model: ZeRO3, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        loss_of(model(torch.randn(3, WIDTH))).backward()  # from the global generator
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    parts = build(0)
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        step(*parts)
    model, optimizer, scheduler = parts
    extra = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "position": {"epoch": 1, "shards": (3, 5)},
        "rank": dist.get_rank(),
    }
    save(root, model, optimizer, scheduler=scheduler, extra=extra)
    draws = (random.random(), np.random.random())
    for _ in range(3):
        step(*parts)
    expected = everything(model, optimizer)

    again = build(5)
    found = load(root, again[0], again[1], scheduler=again[2])
    torch.set_rng_state(found["torch"])
    random.setstate(found["python"])
    np.random.set_state(found["numpy"])
    assert found["position"] == extra["position"]
    assert found["rank"] == dist.get_rank()
    assert again[0].seen == 3
    assert draws == (random.random(), np.random.random())
    for _ in range(3):
        step(*again)
    assert_same(everything(again[0], again[1]), expected, "resumed")
    assert again[2].state_dict() == scheduler.state_dict()


def _first_ranks_extra(root: str) -> int:
    model, _ = build(WithState, 1)
    return load(root, model)["rank"]


def test_a_resumed_run_goes_on_as_if_nothing_had_been(tmp_path: Path, ranks: KeptRanks) -> None:
    ranks(2, _whole_run, str(tmp_path))
    assert ranks(3, _first_ranks_extra, str(tmp_path)) == [0, 0, 0]


@on_ranks(2)
def test_training_goes_on_while_a_save_is_written(tmp_path: Path) -> None:
    model, optimizer = build(Mlp, 0)
    train(model, optimizer)
    expected = everything(model, optimizer)
    gate = threading.Event()
    with observed(transfer.WriteRanges, "finish", lambda *_: gate.wait(30)):
        handle = save(tmp_path, model, optimizer, step=1, blocking=False)
        assert not handle.done()
        assert not (tmp_path / "latest").exists()
        train(model, optimizer)  # while nothing is on the disk yet
        gate.set()
        assert handle.wait() == tmp_path / "step-00000001"
    assert handle.done()
    load(tmp_path, model, optimizer)
    assert_same(everything(model, optimizer), expected, "as it was at the call")

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with observed(transfer.WriteRanges, "finish", fail):
        handle = save(tmp_path, model, optimizer, step=2, blocking=False)
        with pytest.raises(CheckpointError, match=r"ranks 0, 1: .*No space left"):
            save(tmp_path, model, optimizer, step=3)  # the next call tells
    handle.wait()  # told already
    handle = save(tmp_path, model, optimizer, step=3, blocking=False)
    load(tmp_path, model, optimizer)  # waits for the end
    assert handle.done()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {".lock", "latest", "step-00000001", "step-00000003"}


@on_ranks(2)
def test_two_models_on_the_same_ranks_save_in_the_background(tmp_path: Path) -> None:
    """One is written in the background while the other is saved, and while its state is gathered:
    they share the ranks, which must not talk of both at a time."""
    first, first_optimizer = build(Mlp, 0)
    second, second_optimizer = build(OddShapes, 1)
    train(first, first_optimizer)
    train(second, second_optimizer)
    for step in range(3):
        handle = save(f"{tmp_path}/first", first, first_optimizer, step=step, blocking=False)
        other = save(f"{tmp_path}/second", second, second_optimizer, step=step, blocking=False)
        get_optimizer_state_dict(second, second_optimizer, full=True)
        assert handle.done()
        assert other.done()


@on_ranks(2)
def test_safetensors_of_another_source_load(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = TiedAcrossUnits().state_dict()
    folder = tmp_path / f"foreign-{dist.get_rank()}"  # each rank its own, with equal content
    folder.mkdir()
    tied = "blocks.2.up.weight"
    names = [name for name in plain if name != tied]
    half = len(names) // 2
    for number, part in enumerate((names[:half], names[half:]), 1):
        file = folder / f"model-{number:05d}-of-00002.safetensors"
        save_file({name: plain[name].contiguous() for name in part}, file, {"format": "pt"})
    weight_map = {
        name: f"model-{1 + (i >= half):05d}-of-00002.safetensors" for i, name in enumerate(names)
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text("{}")
    model, optimizer = build(TiedAcrossUnits, 1)
    assert load(tmp_path / "foreign-0", model) is None
    assert_same_parameters(get_model_state_dict(model, full=True), plain)
    single = tmp_path / f"single-{dist.get_rank()}.safetensors"
    save_file({name: plain[name] + 1 for name in names}, single)
    load(tmp_path / "single-0.safetensors", model)
    assert_bitwise(model.state_dict()[tied].local, model.state_dict()["blocks.0.up.weight"].local)
    values, num_threads = get_model_state_dict(model, full=True), threading.active_count()
    with pytest.raises(CheckpointError, match="contains no optimizer state"):
        load(tmp_path / "foreign-0", model, optimizer)
    assert threading.active_count() == num_threads, "the model was being read already"
    assert_same_parameters(get_model_state_dict(model, full=True), values)
    load(tmp_path / "foreign-0", model, optimizer, strict=False)
    assert_same_parameters(get_model_state_dict(model, full=True), plain)

    others = {f"old.{name}": plain[name] + 2 for name in names} | {"head": torch.ones(3)}
    save_file(others, single)
    renames = {name: name.removeprefix("old.") for name in others} | {"head": None}
    load(tmp_path / "single-0.safetensors", model, rename=renames.__getitem__)
    expected = {name: value + 2 for name, value in plain.items()}
    assert_same_parameters(get_model_state_dict(model, full=True), expected)
    with pytest.raises(CheckpointError, match="to 'one', which is taken already"):
        load(tmp_path / "single-0.safetensors", model, rename=lambda name: "one")
    with pytest.raises(ValueError, match="rename: cannot be combined with an optimizer"):
        load(tmp_path / "single-0.safetensors", model, optimizer, rename=str)


class Longer(Mlp):
    def __init__(self) -> None:
        super().__init__(depth=4)
        self.extra = nn.Linear(2, 2, bias=False)


@on_ranks(2)
def test_a_part_loads_on_request_and_the_rest_is_reported(tmp_path: Path) -> None:
    small, small_optimizer = build(Mlp, 0)
    train(small, small_optimizer)
    save(f"{tmp_path}/small", small, small_optimizer)
    values = everything(small, small_optimizer)
    large, large_optimizer = build(Longer, 1)
    before = everything(large, large_optimizer)
    with pytest.raises(CheckpointError, match=r"missing .*blocks\.3\.down\.bias.*extra\.weight"):
        load(f"{tmp_path}/small", large)
    with pytest.raises(CheckpointError, match=r"group 0 has parameters that the saved"):
        load(f"{tmp_path}/small", large, large_optimizer)
    assert_same(everything(large, large_optimizer), before, "after a refusal")
    with logged("layerzero.checkpoint") as missing:
        load(f"{tmp_path}/small", large, large_optimizer, strict=False)
    found = everything(large, large_optimizer)
    for name, value in found.model.items():
        assert_bitwise(value, values.model.get(name, before.model[name]), name)
    assert found.optimizer["state"].keys() == values.optimizer["state"].keys()

    save(f"{tmp_path}/large", large, large_optimizer)
    with pytest.raises(CheckpointError, match=r"unexpected.*extra\.weight"):
        load(f"{tmp_path}/large", small, small_optimizer)
    with logged("layerzero.checkpoint") as unexpected:
        load(f"{tmp_path}/large", small, small_optimizer, strict=False)
    assert_same(everything(small, small_optimizer), values, "the part that fits")
    narrow, _ = build(lambda: Mlp(width=4), 1)
    with pytest.raises(
        CheckpointError, match=r"shapes differ: .*stem\.weight is \(5, 5\).*\(4, 4\)"
    ):
        load(f"{tmp_path}/small", narrow, strict=False)
    lines = of_all_ranks((missing, unexpected))
    assert [len(one + other) for one, other in lines] == [2, 0]
    assert "missing in the checkpoint: blocks.3.down.bias" in lines[0][0][0]
    assert "extra.weight" in lines[0][1][0].partition("unexpected")[2]


@on_ranks(2)
def test_tied_weights_are_saved_once_and_load_under_each_name(tmp_path: Path) -> None:
    tied, optimizer = build(TiedAcrossUnits, 0)
    train(tied, optimizer)
    save(tmp_path, tied, optimizer)
    expected = get_model_state_dict(tied, full=True)

    def make() -> nn.Module:
        module = TiedAcrossUnits()
        module.blocks[2].up.weight = nn.Parameter(torch.zeros_like(module.blocks[2].up.weight))
        return module

    untied, untied_optimizer = build(make, 1)
    load(tmp_path, untied, untied_optimizer)
    assert_same_parameters(get_model_state_dict(untied, full=True), expected)
    state = get_optimizer_state_dict(untied, untied_optimizer, full=True)["state"]
    one, other = state["blocks.0.up.weight"], state["blocks.2.up.weight"]
    assert_same_state(other, one, "of the other")
    train(untied, untied_optimizer, 1)  # the two do not share memory


@on_ranks(2)
def test_offloaded_and_resident_weights_share_checkpoints(tmp_path: Path) -> None:
    with simulated_device():  # which raises for accesses in no order
        models = []
        for number, policy in enumerate((None, OffloadPolicy(params=True, grads=True))):
            model, optimizer = build(Mlp, number, offload=policy)
            train(model, optimizer)
            save(tmp_path, model, optimizer, step=number, blocking=bool(number))
            models.append((model, optimizer))
        kept = [[p.detach().clone() for p in model.parameters()] for model, _ in models]
        for number, (model, optimizer) in enumerate(models):
            load(f"{tmp_path}/step-{1 - number:08d}", model, optimizer)  # the other's
            for parameter, other in zip(model.parameters(), kept[1 - number], strict=True):
                assert torch.equal(parameter, other)
            model(torch.ones(1, WIDTH))  # copied to the device, and written again behind it
            load(f"{tmp_path}/step-{number:08d}", model, optimizer)
            train(model, optimizer, 1)


@on_ranks(2)
def test_shards_on_a_device_are_written_through_small_windows(tmp_path: Path) -> None:
    window, runtime = 1 << 15, FakeRuntime()
    make = functools.partial(nn.Linear, 300, 150)
    torch.manual_seed(0)
    model = ZeRO3(nn.Sequential(make(), *(Mlp() for _ in range(20))), auto_wrap_policy={Mlp})
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    save(tmp_path, model, optimizer, step=0)
    with (
        mock.patch.object(transfer, "is_on_host", lambda tensor: False),
        mock.patch.object(saving, "is_on_host", lambda tensor: False),
        mock.patch.object(saving, "wait_for"),
        mock.patch.object(transfer, "BATCH_NBYTES", window),
        mock.patch.object(host, "get_device_module", lambda _: runtime),
    ):
        save(tmp_path, model, optimizer, step=1)
        assert not runtime.held, "all is given back"
        assert window <= runtime.most_nbytes <= 8 * window
        assert set(runtime.sizes) == {window}
        runtime.sizes.clear()
        handle = save(tmp_path, model, optimizer, step=2, blocking=False)
        handle.wait()
    own = [
        *model.parameters(),
        *(t for s in optimizer.state.values() for t in s.values() if t.ndim),
    ]
    total = sum(each.nbytes for each in own)
    assert total <= runtime.sizes[0] <= total + 64 * 1000, "not rounded to a power of two"
    del handle
    gc.collect()
    assert not runtime.held
    dist.barrier()
    plain, windows, background = sorted(tmp_path.glob("step-*"))
    for file in plain.glob("*.safetensors"):
        for other in (windows, background):
            assert file.read_bytes() == (other / file.name).read_bytes()


@on_ranks(2)
def test_what_cannot_be_saved_is_refused_on_every_rank(tmp_path: Path) -> None:
    rank = dist.get_rank()
    model, optimizer = build(Mlp, 0)

    def refused(message: str, **arguments: Any) -> None:
        with pytest.raises((CheckpointError, ValueError, TypeError), match=message):
            save(arguments.pop("root", tmp_path), model, **{"optimizer": optimizer, **arguments})

    refused("rank 1: extra: a function cannot be saved", extra=(lambda: 0) if rank else 0)
    refused("^ranks 0, 1: extra: a function cannot be saved((?!rank).)*$", extra=lambda: 0)
    refused("root, step and keep differ between ranks", step=rank)
    refused("keep: expected at least 1", keep=0)
    refused("step: expected an int", step=-1)
    refused("max_file_size: expected a size such as", max_file_size="many")
    blocked = tmp_path / "file"
    if rank == 0:
        blocked.write_text("")
    dist.barrier()
    refused("rank 0: .*file", root=blocked)
    loss_of(model(torch.ones(1, WIDTH))).backward()
    optimizer.step()
    # The first element of its weight is on the first rank.
    state = optimizer.state[model.stem.weight]
    for late in (torch.ones(()), torch.zeros_like(model.stem.weight)):
        state |= {"late": late} if rank else {}
        refused("^rank 1: stem.weight/late is on this rank, but the rank with the first element")
    state["exp_avg"] = torch.ones(2, 2)
    refused(r"exp_avg.*shape \(2, 2\) for a shard of")
    with pytest.raises(ValueError, match="wrap the model first"):
        save(tmp_path, Mlp())
    with pytest.raises(CheckpointError, match="no such folder"):
        load(f"{tmp_path}/nowhere", model)
    dist.barrier()  # The first rank removes what it began.
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "file"}

    def within_backward(gradient: Tensor) -> None:
        text = "^save: expected a model between steps, but it is in backward$"
        with pytest.raises(RuntimeError, match=text):
            save(tmp_path, model)

    output = model(torch.ones(1, WIDTH))
    output.register_hook(within_backward)
    loss_of(output).backward()


@on_ranks(2)
def test_ranks_with_different_modules_share_a_checkpoint(tmp_path: Path) -> None:
    rank = dist.get_rank()
    alone = [dist.new_group([0]), dist.new_group([1])][rank]

    def build(seed: int) -> tuple[ZeRO3, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        stage = nn.Module()
        whole = Mlp()
        stage.blocks = nn.ModuleDict({str(rank): whole.blocks[rank]})
        setattr(stage, "stem" if rank == 0 else "head", whole.stem if rank == 0 else whole.head)
        model = ZeRO3(stage, alone)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    everyone = dist.group.WORLD
    model, optimizer = build(0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    save(tmp_path, model, optimizer, process_group=everyone)
    expected = everything(model, optimizer)
    names = load_file(tmp_path / "step-00000000" / "model.safetensors").keys()
    assert {name.split(".")[0] for name in names} == {"stem", "blocks", "head"}
    other, other_optimizer = build(1)
    load(tmp_path, other, other_optimizer, process_group=everyone)
    assert_same(everything(other, other_optimizer), expected, f"stage {rank}")
