"""The whole engine on a device that is neither CPU nor CUDA, beside one process on the CPU."""

import functools
import itertools
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from layerzero import (
    CollectiveError,
    GradScaler,
    MixedPrecision,
    OffloadPolicy,
    ParallelManager,
    ReductionPolicy,
    ZeRO3,
)
from layerzero.checkpoint import get_model_state_dict, get_optimizer_state_dict, load, save
from layerzero.comm.streams import DeviceStream, Streams
from tests.distributed.test_watchdog import Chain
from tests.harness.checks import (
    assert_bitwise,
    assert_close_in_float64,
    assert_norm,
    assert_same_parameters,
)
from tests.harness.compare import sharded, zero3
from tests.harness.models import CASES, WIDTH, Block, Case, Mlp, loss_of, rows, tensors_of
from tests.harness.ranks import on_ranks, run_ranks
from tests.harness.reference import (
    OPTIMIZERS,
    RunFn,
    backward_of_all_ranks,
    batches_of,
    forward_backward,
    full_gradients,
    full_parameters,
    plain,
    seeded,
)
from tests.openreg.device import (
    BACKENDS,
    TYPE,
    build_parts,
    device_group,
    moved,
    on_device,
    own_device,
    register,
)

pytestmark = pytest.mark.openreg

BF16 = torch.bfloat16
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "kept": {"reshard_after_forward": False},
    "compute_shard": {"reshard_after_forward": "compute_shard", "zero3_size": 1},
    "replicate": {"zero3_size": 1, "outer": "replicate"},
    "deterministic": {"deterministic": True},
    "no_prefetch": {"forward_prefetch": 0, "backward_prefetch": None},
    "unsharded": {"accumulation": "unsharded"},
    "offload": {"offload": OffloadPolicy(params=True, grads=True)},
    "two_lanes": {"reduction": ReductionPolicy(separate_groups=True, in_flight="1MB")},
}


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_parts(tmp_path_factory.mktemp("openreg"))


def _run(model: nn.Module, batch: Any) -> Tensor:
    return forward_backward(model, moved(batch, own_device()))


def _wrapped(case: Case, **options: Any) -> ZeRO3:
    return sharded(case, device=own_device(), process_group=device_group(), **options)


class _Step(NamedTuple):
    """What one step of one process gave."""

    losses: list[Tensor]
    gradients: dict[str, Tensor | None]
    parameters: dict[str, Tensor]


def _steps_of(reference: nn.Module, batches: list[list[Any]], run: RunFn) -> list[_Step]:
    optimizer = OPTIMIZERS["sgd_momentum"](reference.parameters())
    steps = []
    for step in batches:
        optimizer.zero_grad()
        losses = backward_of_all_ranks(reference, step, run)
        gradients = full_gradients(reference)
        optimizer.step()
        steps.append(_Step(losses, gradients, full_parameters(reference)))
    return steps


def _compare(
    model: ZeRO3,
    case: Case,
    expected: list[_Step],
    batches: list[list[Any]],
    run: RunFn | None = None,
) -> None:
    optimizer = OPTIMIZERS["sgd_momentum"](model.parameters())
    rank = dist.get_rank()
    for index, (step, truth) in enumerate(zip(batches, expected, strict=True)):
        optimizer.zero_grad()
        loss = (run or _run)(model, step[rank])
        assert_bitwise(loss.cpu(), truth.losses[rank].cpu(), f"step {index}: loss")
        what = f"step {index}: gradient of"
        _assert_same(full_gradients(model), truth.gradients, what)
        optimizer.step()
        what = f"after step {index}: parameter"
        _assert_same(full_parameters(model), truth.parameters, what)


def _assert_same(actual: Any, expected: Any, what: str) -> None:
    assert_same_parameters(moved(actual, "cpu"), moved(expected, "cpu"), what=what)


@on_ranks(1, in_float64=True, fresh=True)
def test_one_process_on_it_computes_what_the_cpu_does(library: Path) -> None:
    """A few operators of the device round differently."""
    register(library)
    for name, case in CASES.items():
        if name == "mixed_dtypes":  # not all of it in float64
            continue
        batches = batches_of(case, 2, steps=3)
        got = _steps_of(on_device(plain(case)), batches, _run)[-1].parameters
        expected = _steps_of(plain(case), batches, forward_backward)[-1].parameters
        assert_close_in_float64(moved(got, "cpu"), expected, name)


@pytest.mark.parametrize("options", OPTIONS)
@on_ranks(2, timeout=120, fresh=True)
def test_every_model_trains_on_it_as_in_one_process(library: Path, options: str) -> None:
    """Bitwise as one process on the device."""
    register(library)
    for name, case in CASES.items():
        batches = batches_of(case, dist.get_world_size(), steps=3)
        expected = _steps_of(on_device(plain(case)), batches, _run)
        try:
            _compare(_wrapped(case, **OPTIONS[options]), case, expected, batches)
        except Exception as error:
            raise AssertionError(f"{name}: {error!r}") from error


def _autocast_run(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast(TYPE, BF16):
        loss = loss_of(model(moved(batch, own_device())))
    loss.backward()
    return loss.detach()


@on_ranks(2, timeout=120, fresh=True)
def test_under_autocast_it_trains_as_in_one_process(library: Path) -> None:
    register(library)
    case = CASES["transformer"]
    batches = batches_of(case, dist.get_world_size(), steps=3)
    casting, without = (
        _steps_of(on_device(plain(case)), batches, run) for run in (_autocast_run, _run)
    )
    assert not torch.equal(casting[0].losses[0].cpu(), without[0].losses[0].cpu()), "it casts"
    _compare(_wrapped(case), case, casting, batches, _autocast_run)


LOW = MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32)
HALF = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32)
HOST = OffloadPolicy(params=True, grads=True)
RUNS: dict[str, tuple[str, dict[str, Any], dict[str, bool]]] = {
    "bfloat16": ("tied_across_units", {"mixed_precision": LOW}, {}),
    "bfloat16, offloaded": ("mlp", {"mixed_precision": LOW, "offload": HOST}, {}),
    "float16, scaled": ("mlp", {"mixed_precision": HALF}, {"scaled": True}),
    "float16, scaled, offloaded": (
        "mlp",
        {"mixed_precision": HALF, "offload": HOST},
        {"scaled": True},
    ),
    "recomputed": ("mlp", {"reshard_after_forward": "compute_shard"}, {"recomputed": True}),
    "frozen": ("frozen_parts", {"accumulation": "unsharded"}, {}),
    "unused": ("unused_parts", {"zero3_size": 1}, {}),
    "clipped": ("mlp", {}, {"clipped": True}),
}


class Run:
    """A model on one of the two devices, trained for steps of two micro-batches each."""

    def __init__(self, case: Case, place: str, options: dict[str, Any], seed: int = 0) -> None:
        self.case, self.place = case, place
        self.group = None if place == "cpu" else device_group()
        build = functools.partial(seeded, case.build, seed)
        self.model = zero3(build, *case.units, device=place, process_group=self.group, **options)
        self.optimizer = OPTIMIZERS["adamw"](self.model.parameters())

    def train(
        self, scaled: bool = False, recomputed: bool = False, clipped: bool = False
    ) -> list[Tensor]:
        """Losses of two steps, and what an evaluation gives."""
        model, kind = self.model, torch.device(self.place).type
        scaler = GradScaler(kind, init_scale=1024.0, enabled=scaled, process_group=self.group)
        found = []
        for step in batches_of(self.case, 2 * dist.get_world_size(), steps=2):
            self.optimizer.zero_grad()
            for index, batch in enumerate(step[2 * dist.get_rank() :][:2]):
                batch = moved(batch, self.place)
                with nullcontext() if index else model.no_sync():
                    call = functools.partial(checkpoint, use_reentrant=False)
                    output = call(model, batch) if recomputed else model(batch)
                    loss = loss_of(output)
                    scaler.scale(loss).backward()
                found.append(loss.detach().cpu())
            scaler.unscale_(self.optimizer)
            norm = self._clip(1e6)
            if clipped:
                # To exactly a half: shards start elsewhere on a device (alignment), so the last
                # bits of its norm, a sum in another order, are others.
                self._clip((norm + 1e-6).item() / 2)
            scaler.step(self.optimizer)
            scaler.update()
        with torch.no_grad():
            outputs = tensors_of(model.eval()(batch))
        return found + [output.cpu() for output in outputs]

    def _clip(self, max_norm: float) -> Tensor:
        gradients = moved(full_gradients(self.model), "cpu").values()
        norm = self.model.clip_grad_norm_(max_norm).cpu()
        assert_norm(norm, [each for each in gradients if each is not None])
        return norm

    def state(self) -> dict[str, Tensor]:
        """All values of the model and the optimizer, by name."""
        values = dict(get_model_state_dict(self.model, full=True))
        state = get_optimizer_state_dict(self.model, self.optimizer, full=True)["state"]
        for name, each in state.items():
            values |= {f"{name}.{key}": value for key, value in each.items()}
        return moved(dict(sorted(values.items())), "cpu")


@on_ranks(2, timeout=180, fresh=True)
def test_runs_and_their_checkpoints_equal_those_on_the_cpu(library: Path, tmp_path: Path) -> None:
    register(library)
    for name, (case_name, options, how) in RUNS.items():
        case, path = CASES[case_name], tmp_path / name
        here, there = (Run(case, place, options) for place in ("cpu", own_device()))
        expected, got = here.train(**how), there.train(**how)
        for index, (one, other) in enumerate(zip(got, expected, strict=True)):
            assert_bitwise(one, other, f"{name}: value {index}")
        state = there.state()
        assert_same_parameters(state, here.state(), what=f"{name}: state of")
        save(path, there.model, there.optimizer, blocking=name == "frozen").wait()
        for place in ("cpu", own_device()):
            new = Run(case, place, options, seed=1)
            load(path, new.model, new.optimizer)
            assert_same_parameters(new.state(), state, what=f"{name}: loaded on {place}:")


@on_ranks(1, fresh=True)
def test_a_stream_of_another_device_leaves_all_as_it_was(library: Path) -> None:
    register(library)
    device = torch.device(TYPE, 1)
    assert torch.accelerator.current_device_index() == 0
    compute = torch.accelerator.current_stream(device)
    stream = DeviceStream(device, [])
    with stream:
        inside = torch.accelerator.current_stream(device)
        assert inside != compute
        event = stream.record_event()
    assert torch.accelerator.current_stream(device) == compute
    assert torch.accelerator.current_device_index() == 0
    stream.wait(Streams(device).record_compute_event())
    event.synchronize()
    assert event.query()


@on_ranks(2, fresh=True)
def test_the_backends_of_the_default_group_choose_the_device(library: Path, tmp_path: Path) -> None:
    """The default group's backends name the device; the current one is each rank's own."""
    register(library)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    torch.accelerator.set_device_index(rank % 2)
    store = dist.FileStore(str(tmp_path / "store"), world_size)
    dist.init_process_group(BACKENDS, store=store, rank=rank, world_size=world_size)
    mesh = ParallelManager().data_mesh
    assert mesh.device_type == TYPE
    for group in (None, mesh):
        with torch.device("meta"):
            module = Mlp()
        model = ZeRO3(module, group, auto_wrap_policy={Block})
        assert {each.device for each in model.parameters()} == {torch.device(own_device())}
        before = full_parameters(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = GradScaler()
        loss = loss_of(model(torch.randn(3, WIDTH)))  # The forward moves it to the device.
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        after = full_parameters(model)
        assert all(not torch.equal(after[name], value) for name, value in before.items())


@on_ranks(2, fresh=True)
def test_a_model_from_the_meta_device_gets_the_values_that_it_gets_on_the_cpu(
    library: Path,
) -> None:
    register(library)
    found = []
    for place, group in (("cpu", None), (own_device(), device_group())):
        with torch.device("meta"):
            module = Mlp()
        torch.manual_seed(3)
        model = ZeRO3(module, group, auto_wrap_policy={Block}, device=place)
        found.append(moved({**full_parameters(model), "drawn next": torch.rand(3)}, "cpu"))
    assert_same_parameters(found[1], found[0])


def _diverges(library: Path) -> str:
    register(library)
    model = ZeRO3(Chain(), device_group(), device=own_device(), auto_wrap_policy={Block})
    batch = torch.randn(3, WIDTH).to(own_device())
    with pytest.raises(CollectiveError) as caught:
        for step in itertools.count():
            if step == 2 and dist.get_rank() == 1:
                model.module.route = [0, 2, 1, 3]
            loss_of(model(batch)).backward()
    return str(caught.value)


def test_ranks_that_gather_different_units_are_found(library: Path) -> None:
    messages = run_ranks(2, _diverges, library)
    assert messages[0] == messages[1]
    assert "rank 0 and rank 1 issued different collectives" in messages[0]


class ViaHost(nn.Module):
    """Between units and inside one, what is computed goes through the CPU and back."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.inner = HostBlock()
        self.threads: set[int] = set()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.blocks[1](self.inner(self.blocks[0](x)))
        on_host = torch.tanh(x.cpu())
        for each in (x, on_host):
            if each.requires_grad:
                each.register_hook(lambda _: self.threads.add(threading.get_ident()))
        return self.blocks[2](on_host.to(x.device)), on_host.to(x.device)


class HostBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x).cpu().to(x.device))


@on_ranks(2, timeout=120, fresh=True)
def test_backward_on_both_of_autograds_threads_equals_one_process(library: Path) -> None:
    register(library)
    case = Case("via host", ViaHost, (Block, HostBlock), rows)
    batches = batches_of(case, dist.get_world_size(), steps=3)
    expected = _steps_of(on_device(plain(case)), batches, _run)
    for options in OPTIONS.values():
        model = _wrapped(case, **options)
        _compare(model, case, expected, batches)
        assert len(model.module.threads) == 2, "one for nodes on the device, one for the host's"
