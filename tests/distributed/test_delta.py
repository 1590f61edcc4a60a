"""Patches of changed elements: receivers hold bit for bit what the model has."""

import pickle
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from layerzero import ZeRO3, checkpoint, rewrap
from layerzero.checkpoint import DeltaError, DeltaStream, Patch, apply_delta
from tests.distributed.test_checkpoint_splits import TENSOR_PARALLEL, build
from tests.harness.checks import assert_bitwise
from tests.harness.models import CASES, Block, Mlp, Parts, TiedAcrossUnits, loss_of
from tests.harness.ranks import KeptRanks, on_ranks
from tests.harness.saved_models import train

Tensors = dict[str, Tensor]
BF16 = torch.bfloat16


def gathered(patches: Iterable[Patch]) -> list[Patch]:
    """The patches of all ranks, as they would arrive: pickled, rank by rank."""
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, pickle.dumps(list(patches)))
    return [patch for answer in answers for patch in pickle.loads(answer)]


def in_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def expected(model: nn.Module, dtype: torch.dtype = BF16) -> Tensors:
    full = checkpoint.get_model_state_dict(model, full=True)
    return {name: in_dtype(value, dtype) for name, value in full.items()}


def one_nan(value: Tensor) -> Tensor:
    """Which NaN torch's casts leave depends on the place in the tensor."""
    return value.masked_fill(value.isnan(), torch.nan) if value.is_floating_point() else value


class Receiver:
    """Tensors of a receiver, which is checked after each round; tied names share memory."""

    def __init__(self, model: nn.Module, stream: DeltaStream, dtype: torch.dtype = BF16) -> None:
        self.model, self.stream, self.dtype = model, stream, dtype
        wanted = expected(model, dtype)
        patches = gathered(stream.full())
        names = {name for patch in patches for name in patch.names}
        # Experts of other ranks have names that this rank's model does not.
        shapes = {patch.name: (patch.shape, patch.values.dtype) for patch in patches}
        self.tensors = {n: torch.zeros(shape, dtype=d) for n, (shape, d) in shapes.items()}
        self.apply(patches)
        self.compared = [name for name in wanted if name in names]
        self.aliases = {alias: patch.name for patch in patches for alias in patch.aliases}
        self.check("full()")

    def apply(self, patches: list[Patch]) -> None:
        seen: set[tuple[str, int]] = set()
        for patch in patches:
            places = {(patch.name, index) for index in patch.indices.tolist()}
            assert not places & seen, f"{patch.name}: sent twice in a round"
            seen |= places
            assert patch.indices.dtype == torch.int64 and patch.indices.ndim == 1
            assert patch.values.dtype == in_dtype(patch.values, self.dtype).dtype
            assert patch.indices.numel(), "an empty patch"
            apply_delta(self.tensors, patch)

    def round(self, what: str) -> list[Patch]:
        before = {name: tensor.clone() for name, tensor in self.tensors.items()}
        patches = gathered(self.stream.changes())
        self.apply(patches)
        self.check(what)
        for patch in patches:  # only what changed
            old, new = (t[patch.name].reshape(-1)[patch.indices] for t in (before, self.tensors))
            assert (bits(old) != bits(new)).any(-1).all(), (
                f"{what}: {patch.name} sent without a change"
            )
        return patches

    def check(self, what: str) -> None:
        wanted = expected(self.model, self.dtype)
        for name in self.compared:
            found = self.tensors[self.aliases.get(name, name)]
            assert_bitwise(*(one_nan(value) for value in (found, wanted[name])), f"{what}: {name}")


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8).view(*tensor.shape, -1)


def change(model: nn.Module, how: Callable[[Tensor], Any] = lambda p: p.mul_(1.03)) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                how(parameter)


def edit(model: nn.Module, number: int) -> None:
    """By hand, with values that casts treat specially."""
    special = [torch.nan, -0.0, 0.0, torch.inf, 1e-40, -1.5]
    with torch.no_grad():
        for at, parameter in enumerate(model.parameters()):
            if parameter.numel() and parameter.is_floating_point():
                place = (at + number) % parameter.numel()
                parameter.data[place] = special[(at + number) % len(special)]


FEW = ["transformer", "tied_across_units", "mixed_dtypes", "odd_shapes"]


def _models(names: Sequence[str]) -> None:
    for number, name in enumerate(names):
        options = {"zero3_size": 1} if number % 2 else {}
        torch.manual_seed(number)
        units = set(CASES[name].units) or None
        model = ZeRO3(CASES[name].build(), auto_wrap_policy=units, **options)
        stream = DeltaStream(model, buffers=True, patch_bytes=300 + 100 * number)
        receiver = Receiver(model, stream)
        assert not list(stream.changes()), f"{name}: nothing has changed"
        change(model)
        receiver.round(f"{name} {options} change")
        edit(model, number)
        receiver.round(f"{name} {options} edit")
        assert not list(stream.changes()), f"{name}: a NaN is sent once"


@pytest.mark.parametrize(
    "names",
    [FEW, pytest.param([name for name in CASES if name not in FEW], marks=pytest.mark.slow)],
    ids=["few", "others"],
)
def test_receivers_follow_models_of_many_kinds(names: list[str], ranks: KeptRanks) -> None:
    ranks(3, _models, names)


@on_ranks(4)
def test_parts_that_some_ranks_have_are_sent_once_under_global_names() -> None:
    for kind, options in (
        (TENSOR_PARALLEL, {}),
        (TENSOR_PARALLEL, {"in_sequence": False, "zero3_size": 1, "outer": "replicate"}),
        ("NamedExperts", {}),
        ("StackedExperts", {}),
    ):
        model = build(kind, 2, **options)
        receiver = Receiver(model, DeltaStream(model, buffers=True, patch_bytes=300))
        if kind == "NamedExperts":
            assert len(receiver.tensors) > len(receiver.compared), "experts of other ranks"
        change(model)
        receiver.round(kind)


@on_ranks(2)
def test_an_interrupted_round_is_repeated() -> None:
    torch.manual_seed(0)
    model = ZeRO3(Mlp(), auto_wrap_policy={Block})
    tensors = expected(model)  # the weights that the stream begins with
    stream = DeltaStream(model, patch_bytes=40)

    def add(value: float) -> None:
        change(model, lambda parameter: parameter.add_(value))

    for taken, then in ((0, 0.25), (1, -0.5), (3, 0.25), (3, 0.0)):
        for applied in (False, True):
            add(0.5)
            patches = stream.changes()
            for number in range(taken):
                patch = next(patches)
                if number + 1 < taken or applied:
                    apply_delta(tensors, patch)
            # Values return to what the snapshot has, or stay, and receivers may not have them.
            add(then)
            for other in stream.changes():
                apply_delta(tensors, other)
            if taken:
                with pytest.raises(RuntimeError, match="another round began"):
                    list(patches)
            # This rank's part is right; the other rank's tensors are its own affair.
            for name, parameter in model.named_parameters():
                start, stop = parameter.layerzero.range
                assert_bitwise(
                    tensors[name].reshape(-1)[start:stop], parameter.detach().bfloat16(), name
                )


@on_ranks(2)
def test_rounds_survive_edits_loads_and_resharding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ZeRO3(TiedAcrossUnits(), auto_wrap_policy={Block}, zero3_size=None)
    stream = DeltaStream(model)
    receiver = Receiver(model, stream)
    assert receiver.aliases == {"blocks.2.up.weight": "blocks.0.up.weight"}, "it is tied"
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    checkpoint.save(tmp_path, model, step=1)
    train(model, optimizer, 1)
    receiver.round("trained")
    train(model, optimizer, 1)
    late = Receiver(model, stream)  # before the round: values of now
    checkpoint.load(tmp_path, model)  # back to where the snapshot was not
    late.apply(receiver.round("loaded"))
    late.check("loaded")
    full = checkpoint.get_model_state_dict(model, full=True)
    model.load_state_dict({name: value + 1 for name, value in full.items()})
    receiver.round("load_state_dict")
    with model.summon_full_params():
        model.blocks[1].up.weight.data[2].mul_(3)
        with pytest.raises(RuntimeError, match="summon_full_params"):
            stream.changes()
    receiver.round("summon_full_params")
    # No longer tied, the first block's weight moves to another unit, and so to other ranks.
    model.blocks[2].up = nn.Linear(*reversed(model.blocks[2].up.weight.layerzero.shape))
    rewrap(model)
    receiver.tensors["blocks.2.up.weight"] = receiver.tensors["blocks.0.up.weight"].clone()
    receiver.aliases.clear()
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)
    receiver.apply(gathered(stream.changes()))
    receiver.check("rewrap")


@on_ranks(2)
def test_buffers_and_ignored_parameters_come_from_the_first_rank() -> None:
    torch.manual_seed(0)
    module = Parts(
        lambda own, x: own.inner(x),
        inner=nn.Linear(3, 3),
        ignored=nn.Linear(2, 2),
        mean=nn.Buffer(torch.zeros(5)),
        count=nn.Buffer(torch.zeros((), dtype=torch.int64)),
        mask=nn.Buffer(torch.zeros(3, dtype=torch.bool)),
        wave=nn.Buffer(torch.zeros(2, dtype=torch.complex128)),
        scratch=nn.Buffer(torch.zeros(4), persistent=False),
    )
    model = ZeRO3(module, ignored_modules=[module.ignored])
    without = {patch.name for patch in gathered(DeltaStream(model).full())}
    assert without == {"inner.weight", "inner.bias", "ignored.weight", "ignored.bias"}
    receiver = Receiver(model, DeltaStream(model, buffers=True))
    assert "count" in receiver.compared and "scratch" not in receiver.tensors
    for step in range(3):
        module.count += 1
        module.mask[step] = True
        module.wave[1] += 1j
        module.mean = module.mean + torch.nan if step == 1 else torch.ones(5) * (step + 1)
        with torch.no_grad():
            module.ignored.weight.add_(1)
        patches = receiver.round(f"buffers {step}")
        names = [patch.name for patch in patches]
        assert {*names} == {"count", "mask", "wave", "mean", "ignored.weight"}
        assert len({*names}) == len(names), "from the first rank alone"
        assert {patch.link.sender for patch in patches} == {0}


@on_ranks(3)
def test_no_call_is_collective() -> None:
    torch.manual_seed(0)
    model = ZeRO3(Mlp(), auto_wrap_policy={Block}, zero3_size=1, outer="replicate")
    if dist.get_rank() == 0:
        stream = DeltaStream(model)
        assert stream.snapshot_nbytes and list(stream.full()) and not list(stream.changes())
        list(stream.changes())
    elif dist.get_rank() == 1:
        stream = DeltaStream(model)
        assert not stream.snapshot_nbytes and not list(stream.full()), "copies send nothing"
        assert not list(stream.changes())


@on_ranks(1)
def test_dtypes_hold_what_they_can_and_refuse_the_rest() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float16, torch.float64):
        model = ZeRO3(Mlp(), auto_wrap_policy={Block})
        receiver = Receiver(model, DeltaStream(model, dtype), dtype)
        edit(model, 0)
        receiver.round(str(dtype))
    parameter = next(model.parameters())
    stream = DeltaStream(model, torch.float16)
    with torch.no_grad():
        parameter.fill_(70000.0)
    with pytest.raises(
        DeltaError, match=r"'stem.weight': torch.float16 cannot hold 70000 \(element"
    ):
        list(stream.changes())
    with pytest.raises(DeltaError, match="cannot hold 70000"):
        list(stream.full())
    with pytest.raises(DeltaError, match="cannot hold 70000"):
        DeltaStream(model, torch.float16)


@on_ranks(1)
def test_bad_input_is_refused_with_names() -> None:
    with pytest.raises(ValueError, match="expected a ZeRO3 module, got Linear"):
        DeltaStream(nn.Linear(2, 2))
    model = ZeRO3(Mlp(), auto_wrap_policy={Block})
    for dtype in (torch.int8, torch.float8_e4m3fn, torch.complex64):
        with pytest.raises(ValueError, match=f"{dtype} cannot hold"):
            DeltaStream(model, dtype)
    with pytest.raises(ValueError, match="patch_bytes"):
        DeltaStream(model, patch_bytes=10)
    stream = DeltaStream(model)

    def hook(grad: Tensor) -> None:
        with pytest.raises(RuntimeError, match="in backward"):
            stream.changes()

    out = model(torch.randn(2, 5))
    out.register_hook(hook)
    loss_of(out).backward()


@on_ranks(1)
def test_patches_are_bounded_and_small() -> None:
    torch.manual_seed(0)
    model = ZeRO3(nn.Linear(300, 40))
    stream = DeltaStream(model, patch_bytes=1000)
    change(model, lambda parameter: parameter.add_(1))
    for patches in (stream.changes(), stream.full()):
        found = list(patches)
        assert len(found) >= 12040 / 100 and all(patch.nbytes <= 1000 for patch in found)
        assert all(len(pickle.dumps(patch)) < 4000 for patch in found), "no memory of others"
    with torch.no_grad():
        weight = next(model.parameters())
        chosen = torch.rand(weight.numel()) < 0.02
        weight[chosen] += 1
    nbytes = sum(patch.nbytes for patch in stream.changes())
    assert nbytes <= 0.11 * 2 * weight.numel()
    assert stream.snapshot_nbytes == 2 * 12040


@on_ranks(1)
def test_a_receiver_begins_with_the_weights_of_its_stream() -> None:
    torch.manual_seed(0)
    models = [ZeRO3(Mlp(1), auto_wrap_policy={Block}) for _ in range(2)]
    streams = [DeltaStream(model) for model in models]
    for dtype in (BF16, torch.float32):
        tensors = {name: value.to(dtype) for name, value in expected(models[0]).items()}
        for model in models:
            change(model, lambda parameter: parameter.add_(1))
        first, other = ([*stream.changes()] for stream in streams)
        with pytest.raises(DeltaError, match="do not hold the values that the model had"):
            apply_delta(tensors, other[0])
        apply_delta(tensors, first[0])
        streams = [DeltaStream(model) for model in models]
