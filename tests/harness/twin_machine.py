"""TwinMachine: random actions on a sharded model, each repeated on the same model unsharded.

All ranks draw the same actions. After each of them parameters, and gradients that do not wait for a
reduction, are those of the unsharded twin, which every rank has.
"""

import contextlib
import copy
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import layerzero
from layerzero import BackwardPrefetch, ReductionPolicy, ZeRO3, checkpoint
from layerzero.flat.parameter_info import get_info
from tests.harness.checks import assert_bitwise, assert_norm, assert_within
from tests.harness.compare import follow
from tests.harness.fault_at import FaultAt
from tests.harness.models import WIDTH, Block
from tests.harness.reference import Terms, backward_of_all_ranks

_OPTIONS = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.01}


class Told(Exception):
    """Raised where the machine says."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.side = Block()
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.stem.weight
        self.uses_side = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.side(x) if self.uses_side else x)


class TwinMachine:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = dist.get_world_size()
        torch.manual_seed(seed)
        self.twin = Net()
        net = copy.deepcopy(self.twin)
        self.settings = self._settings(net)
        self.model = ZeRO3(net, **self.settings)
        self.saved: tuple[Path, Any] | None = None
        self.terms = Terms()
        """Of the twin's gradients."""
        self._make_optimizers()
        self.waits = False
        """Whether micro-batches wait for a reduction."""
        self.skips = False
        """Whether a gradient of this step was not finite."""
        self.number = 0
        self.folder: Path | None = None
        self.log: list[str] = []

    def _make_optimizers(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), **_OPTIONS)
        self.twin_optimizer = torch.optim.SGD(self.twin.parameters(), **_OPTIONS)
        self.saved = None

    def _settings(self, net: Net) -> dict[str, Any]:
        rng = self.rng
        settings: dict[str, Any] = {
            "auto_wrap_policy": {Block},
            "zero3_size": rng.choice([None, 1]),
            "reshard_after_forward": rng.choice([True, False]),
            "backward_prefetch": rng.choice([None, *BackwardPrefetch]),
            "on_nonfinite": rng.choice([None, "raise", "skip"]),
        }
        settings["accumulation"] = rng.choice(["auto", "sharded", "unsharded"])
        if rng.random() < 0.3:
            settings["reduction"] = ReductionPolicy(in_flight="1MB")
        if settings["zero3_size"] == 1:
            settings["outer"] = rng.choice(["zero1", "replicate"])
        if rng.random() < 0.4:
            settings["optional_modules"] = [net.side]
        return settings

    def run(self, num_actions: int) -> None:
        actions = [
            *[self.micro_batch] * 3,
            *[self.backward] * 3,
            *[self.step] * 3,
            *[self.fails_everywhere] * 4,
            *(self.runs_out_of_memory, self.is_interrupted, self.evaluates, self.freezes),
            *(self.saves, self.loads, self.summons, self.unshards, self.clips, self.norms),
            *(self.under_autocast, self.reduces, self.gives_up, self.toggles_training),
            *(self.is_not_finite, self.gathers_state, self.rewraps, self.skips_side, self.phase),
        ]
        try:
            for _ in range(num_actions):
                action = self.rng.choice(actions)
                self.log.append(action.__name__)
                action()
                self.compare()
            # A rank that failed answers what others wait for when it next uses the model.
            self.evaluates()
        except BaseException as error:
            error.add_note(f"{self.settings}: {self.log}")
            raise
        finally:
            if self.folder is not None and dist.get_rank() == 0:
                shutil.rmtree(self.folder, ignore_errors=True)

    def compare(self) -> None:
        """Values bitwise, and gradients as close as the order of their terms allows."""
        bounds = self.terms.bounds(self.twin)
        full = dict(self.twin.named_parameters())
        for name, sharded in self.model.named_parameters():
            info = get_info(sharded)
            assert info is not None
            mine, whole = slice(*info.range), full[name]
            own = whole.detach().reshape(-1)[mine]
            assert_bitwise(sharded.detach(), own, f"{name} after {self.log[-1]}")
            if self.waits or self.skips:
                continue
            what = f"{name}.grad after {self.log[-1]}"
            assert (sharded.grad is None) == (whole.grad is None), what
            if sharded.grad is not None and whole.grad is not None:
                bound = torch.as_tensor(bounds[name]).expand_as(whole).reshape(-1)[mine]
                assert_within(sharded.grad, whole.grad.reshape(-1)[mine], bound, what)
        if not self.waits and not self.skips:
            # From here on the twin has the model's own gradients, so that rounding does not add up.
            follow(self.model, self.twin)
            self.terms = Terms()
            self.terms.start_from(self.twin.parameters())

    def _batches(self) -> list[torch.Tensor]:
        self.number += 1
        generator = torch.Generator().manual_seed(self.number)
        return [torch.randn(3, WIDTH, generator=generator) for _ in range(self.world)]

    def _pass(self, syncs: bool, autocast: bool = False, factor: float = 1.0) -> None:
        batches = self._batches()

        def run(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            # Units cast a weight at each use, as plain torch does without its cache.
            caches = isinstance(model, ZeRO3)
            with torch.autocast("cpu", torch.bfloat16, autocast, cache_enabled=caches):
                loss = model(batch).float().square().sum() * factor
            loss.backward()
            return loss.detach()

        with contextlib.nullcontext() if syncs else self.model.no_sync():
            loss = run(self.model, batches[dist.get_rank()])
        losses = backward_of_all_ranks(self.twin, batches, run, terms=self.terms)
        assert_bitwise(loss, losses[dist.get_rank()], f"loss of {self.log[-1]}")
        self.waits = not syncs

    def micro_batch(self) -> None:
        self._pass(syncs=False)

    def backward(self) -> None:
        self._pass(syncs=True)

    def under_autocast(self) -> None:
        self._pass(syncs=self.rng.random() < 0.5, autocast=True)

    def reduces(self) -> None:
        self.model.reduce_gradients()
        self.waits = False

    def step(self) -> None:
        if self.waits:
            self.reduces()
        self.optimizer.step()
        if not self.skips:
            self.twin_optimizer.step()
        self._zero()

    def _zero(self) -> None:
        which = self.rng.choice([self.optimizer, self.model])
        which.zero_grad()
        self.twin.zero_grad()
        self.terms = Terms()
        self.waits = self.skips = False

    def evaluates(self) -> None:
        batches = self._batches()
        with torch.no_grad():
            output = self.model(batches[dist.get_rank()])
            assert_bitwise(output, self.twin(batches[dist.get_rank()]), "output")

    def _fails(self, error: type[BaseException], where: str, module: str) -> None:
        """Have a pass fail on all ranks."""

        def fail(*_: Any) -> None:
            raise error("told to")

        def fail_later(module: nn.Module, given: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(fail)
            else:
                fail()

        failing = self.model.module.get_submodule(module)
        hook = failing.register_forward_hook(fail if where == "forward" else fail_later)
        try:
            with contextlib.nullcontext() if self.rng.random() < 0.5 else self.model.no_sync():
                self.model(self._batches()[dist.get_rank()]).square().sum().backward()
        except error:
            pass
        else:
            raise AssertionError("it was told to fail")
        finally:
            hook.remove()

    def fails_everywhere(self) -> None:
        where, block = self.rng.choice(["forward", "backward"]), self.rng.randrange(3)
        self._fails(Told, where, f"blocks.{block}")

    def is_interrupted(self) -> None:
        self._fails(KeyboardInterrupt, self.rng.choice(["forward", "backward"]), "blocks.1")

    def runs_out_of_memory(self) -> None:
        at, syncs = self.rng.randrange(1, 60), self.rng.random() < 0.5
        self.evaluates()  # Orders are recorded: the operation of that number is one on all ranks.
        batch = self._batches()[dist.get_rank()]
        try:
            with FaultAt(at), contextlib.nullcontext() if syncs else self.model.no_sync():
                self.model(batch).square().sum().backward()
            raise AssertionError("there are more operations")
        except (torch.OutOfMemoryError, RuntimeError):
            pass

    def gives_up(self) -> None:
        self.fails_everywhere()
        self._zero()

    def is_not_finite(self) -> None:
        action = self.settings["on_nonfinite"]
        if action is None:
            return
        batches = self._batches()

        def run() -> None:
            scale = float("inf") if dist.get_rank() == self.world - 1 else 1.0
            (self.model(batches[dist.get_rank()]).square().sum() * scale).backward()

        if action == "skip":
            run()
            self.skips, self.waits = True, False
            return
        try:
            run()
        except FloatingPointError:
            return
        raise AssertionError("a gradient is infinite")

    def freezes(self) -> None:
        if self.waits:
            return
        name = self.rng.choice([name for name, _ in self.twin.named_parameters()])
        wanted = not self.twin.get_parameter(name).requires_grad
        for model in (self.twin, self.model):
            dict(model.named_parameters())[name].requires_grad_(wanted)
        if not any(parameter.requires_grad for parameter in self.twin.parameters()):
            raise AssertionError("too few parameters for this test")

    def toggles_training(self) -> None:
        mode = not self.twin.training
        self.twin.train(mode)
        self.model.train(mode)

    def skips_side(self) -> None:
        if self.waits:
            return
        for net in (self.twin, self.model.module):
            net.uses_side = not net.uses_side

    def summons(self) -> None:
        if self.waits:
            return
        with self.model.summon_full_params(), torch.no_grad():
            self.model.blocks[0].up.weight.mul_(0.9)
        with torch.no_grad():
            self.twin.blocks[0].up.weight.mul_(0.9)

    def unshards(self) -> None:
        layerzero.pregather(self.model)
        if self.rng.random() < 0.5:
            self.model.unshard()  # What it shows now is full.
            self.model.reshard()

    def gathers_state(self) -> None:
        checkpoint.get_model_state_dict(self.model, full=True, cpu_offload=True)

    def norms(self) -> None:
        if not self.waits and not self.skips:
            assert_norm(layerzero.global_norm(self.model), self._twin_gradients())

    def clips(self) -> None:
        if self.waits:
            return
        norm = self.model.clip_grad_norm_(0.5)
        if not self.skips:
            gradients = self._twin_gradients()
            assert_norm(norm, gradients)
            for gradient in gradients:
                gradient.mul_(torch.clamp(0.5 / (norm + 1e-6), max=1.0))

    def _twin_gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.twin.parameters() if p.grad is not None]

    def rewraps(self) -> None:
        if self.waits or self.skips:
            return
        self._zero()
        if layerzero.rewrap(self.model):  # Frozen ones lie elsewhere now, without state.
            self._make_optimizers()

    def phase(self) -> None:
        with self.model.timeout(seconds=30):
            self.backward()

    def saves(self) -> None:
        if self.waits or self.skips:
            return
        if self.folder is None:
            names = [tempfile.mkdtemp(prefix="twin-") if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(names)
            self.folder = Path(str(names[0]))
        checkpoint.save(self.folder, self.model, self.optimizer, step=self.number, keep=2)
        values = copy.deepcopy(self.twin.state_dict())
        self.saved = self.folder, (values, copy.deepcopy(self.twin_optimizer.state_dict()))

    def loads(self) -> None:
        if self.saved is None or self.waits:
            return
        folder, (values, state) = self.saved
        checkpoint.load(folder, self.model, self.optimizer)
        self.twin.load_state_dict(values)
        self.twin_optimizer.load_state_dict(copy.deepcopy(state))


def run_machines(seeds: range, num_actions: int) -> int:
    for seed in seeds:
        try:
            machine = TwinMachine(seed)
            machine.run(num_actions)
            del machine
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    return len(seeds)
