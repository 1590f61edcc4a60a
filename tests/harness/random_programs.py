"""Random programs beside one process that sees all batches: settings of a model are drawn from a
table, and actions from another.

In float64, so that the order of sums does not matter: what differs is an error.
"""

import contextlib
import copy
import functools
import inspect
import random
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as theirs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import (
    ModuleWrapPolicy,
    always_wrap_policy,
    size_based_auto_wrap_policy,
)
from torch.nn.utils.parametrize import is_parametrized

import layerzero
from layerzero import (
    BackwardPrefetch,
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ReductionPolicy,
    ZeRO3,
    checkpoint,
    fully_shard,
    rewrap,
    units,
)
from layerzero.optim import AdamW, WholeTensorOptimizer
from tests.harness.checks import assert_close_in_float64
from tests.harness.internals import get_info, inner_units
from tests.harness.random_models import WIDTH, Branches, Tied, on_meta, random_model
from tests.harness.ranks import of_all_ranks
from tests.harness.reference import full_gradients

STEPS = 6
Rng = random.Random


def _policy(rng: Rng, model: nn.Module, world_size: int) -> Any:
    names = {name for name, _ in model.named_modules() if name and rng.random() < 0.4}
    return rng.choice(
        [
            None,
            {Branches, Tied},
            {nn.Linear},
            lambda module, fqn: fqn in names,
            ModuleWrapPolicy({Branches, nn.Sequential}),
            functools.partial(size_based_auto_wrap_policy, min_num_params=rng.choice([30, 90])),
            always_wrap_policy,
        ]
    )


def _groups(rng: Rng, model: nn.Module, world_size: int) -> dict[str, Any]:
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    zero3_size = rng.choice([None, None, *divisors])
    outer = rng.choice(["zero1", "replicate", "shard"])
    return {
        "zero3_size": zero3_size,
        "outer": outer if zero3_size not in (None, world_size) else "zero1",
    }


def _some_resharded(rng: Rng, model: nn.Module, world_size: int) -> Any:
    odd = rng.randrange(2)
    return rng.choice([True, True, False, lambda module, fqn: zlib.crc32(fqn.encode()) % 2 == odd])


def _optional(rng: Rng, model: nn.Module, world_size: int) -> list[nn.Module]:
    """Modules, of which every rank runs the same ones here."""
    if rng.random() < 0.75 or any(_way_of(part) == "slope" for part in model.modules()):
        return []  # Without gradients nothing holds a part until a backward inside the forward.
    parts = [part for name, part in model.named_modules() if name and [*part.parameters()]]
    return rng.sample(parts, min(len(parts), rng.randint(1, 2)))


def _of(*values: Any) -> Callable[[Rng, nn.Module, int], Any]:
    return lambda rng, model, world_size: rng.choice(values)


SETTINGS: dict[str, Callable[[Rng, nn.Module, int], Any]] = {
    "auto_wrap_policy": _policy,
    "groups": _groups,
    "forward_prefetch": _of(False, True, 2, 3),
    "backward_prefetch": _of(None, *BackwardPrefetch),
    "limit_all_gathers": _of(False, True, 1, 2, "1KB"),
    "reshard_after_forward": _some_resharded,
    "accumulation": _of("auto", "sharded", "unsharded"),
    "deterministic": _of(False, False, True),
    "gradient_reduction": _of("mean", "sum"),
    "verify": _of(None, None, "sampled", "always"),
    "layout": _of("elements", "elements", "rows", "rows(2)", "rows(4)", "rows(32)"),
    "arena": _of(False, False, False, True),
    "on_nonfinite": _of(None, None, "raise", "skip"),
    "memory_budget": _of(*[None] * 7, "1GB", "80kB"),
    "offload": _of(None, None, OffloadPolicy(params=True, grads=True)),
    "reduction": _of(
        None, None, ReductionPolicy(in_flight="1KB"), ReductionPolicy(separate_groups=True)
    ),
    "optional_modules": _optional,
    "optional_mean": _of("all", "participants"),
}
"""Arguments of `ZeRO3`, each drawn by itself."""


def settings_of_passes(rng: Rng, model: nn.Module, world_size: int) -> dict[str, Any]:
    """Those of `SETTINGS` that suit any mesh and any kind of parallelism."""
    names = ("reshard_after_forward", "forward_prefetch", "backward_prefetch", "limit_all_gathers")
    names += ("accumulation", "deterministic", "layout", "verify")
    return {name: SETTINGS[name](rng, model, world_size) for name in names}


WAYS = ["zero3", "zero3", "zero3", "nested", "fully_shard", "fully_shard"]
STARTS = ["given", "given", "written", "emptied", "emptied inside", "later", "first rank"]
"""Where a model's values come from."""


class Smooth(torch.optim.Optimizer):
    """As users write them: no option of torch's, a count that is no tensor, state of one step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state["mean"] = state.get("mean", torch.zeros_like(p)).lerp(p.grad, 0.1)
                p.sub_(torch.tanh(state["mean"]) / state["count"], alpha=group["lr"])


# `eps` bounds how much they magnify a rounding.
ELEMENT_WISE: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"eps": 1e-4}),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True, "eps": 1e-4}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    "plain sgd": (torch.optim.SGD, {"weight_decay": 0.1}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"weight_decay": 0.1, "eps": 1e-4}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.9, "eps": 1e-2}),
    "adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1, "eps": 1e-4}),
    "adamax": (torch.optim.Adamax, {"eps": 1e-4}),
    "nadam": (torch.optim.NAdam, {"decoupled_weight_decay": True, "eps": 1e-4}),
    "radam": (torch.optim.RAdam, {"eps": 1e-4}),
    "adadelta": (torch.optim.Adadelta, {"eps": 1e-4}),
    "smooth": (Smooth, {}),
}
if torch.__version__ < "2.13":  # A group that is added later has no state there.
    del ELEMENT_WISE["adagrad"]
WHOLE = ELEMENT_WISE | {"adafactor": (torch.optim.Adafactor, {}), "muon": (torch.optim.Muon, {})}
SCHEDULES: list[Any] = [
    functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2),
    functools.partial(torch.optim.lr_scheduler.CosineAnnealingWarmRestarts, T_0=3),
    functools.partial(torch.optim.lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.03, step_size_up=3),
]


def _draw(rng: Rng, model: nn.Module, world_size: int) -> dict[str, Any]:
    drawn = {name: draw(rng, model, world_size) for name, draw in SETTINGS.items()}
    drawn |= drawn.pop("groups")
    if drawn["outer"] == "shard" and rng.random() < 0.5:
        drawn["reshard_after_forward"] = "compute_shard"
    if drawn["memory_budget"] is not None:  # They are what it chooses.
        for name in ("reshard_after_forward", "forward_prefetch", "backward_prefetch"):
            del drawn[name]
        del drawn["limit_all_gathers"], drawn["arena"]
    return drawn


def _draw_in_place(rng: Rng, model: nn.Module, world_size: int) -> dict[str, Any]:
    """Of `fully_shard`; what differs by module is drawn there."""
    offload = rng.choice([None, None, CPUOffloadPolicy(pin_memory=False)])
    return {"copies": world_size == 4 and rng.random() < 0.5, "offload": offload}


_OF_TWIN = ["_twin", "_twin_optimizers", "_steps", "_groups", "_schedule", "_clips", "_generator"]
_OF_TWIN += ["_scaler"]  # The model's, but it may be enabled only with some of these.


class Boom(Exception):
    pass


class Run:
    """One model, sharded, and its twin that is not.

    Args:
        start: one of `STARTS`; None: any.
        given: arguments of `ZeRO3` that are not drawn.
    """

    ways: Sequence[str] = WAYS

    def __init__(
        self, seed: int, dtype: torch.dtype = torch.float64, start: str | None = None, **given: Any
    ) -> None:
        self.rng = Rng(seed)
        self._dtype = dtype
        self._start, self._given = start, given
        self.log: list[Any] = []
        self._twin = self._unsharded(seed)
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._hooked: set[str] = set()
        self._keeps_full = False
        """Whether a backward may leave units unsharded that it did not come to."""
        self._scaled: list[Any] = []
        self._build()
        self._steps, self._schedule = self._draw_optimizers(), None
        self._groups = self.rng.choice(["one"] * 4 + ["two", "later"])
        if self._groups != "later" and self.rng.random() < 0.5:
            self._schedule = self.rng.choice(SCHEDULES)
        self._make_optimizers()
        after_backward = self._steps[0][1] != "in backward"
        self._clips = self.rng.random() < 0.3 and after_backward
        scales = self.rng.random() < 0.2 and after_backward and self._groups != "later"
        scales &= "process_group" not in self._given  # It steps host memory on a device's stream.
        self._scaler = layerzero.GradScaler(init_scale=8.0, growth_interval=2, enabled=scales)
        self._to_none = self.rng.random() < 0.7
        self._generator = torch.Generator().manual_seed(seed)
        if seed % 2:  # the others may grow, and shards that are laid out anew lose their hooks
            self._put_hooks(random.Random(~seed))

    # What the model is

    def _unsharded(self, seed: int) -> nn.Module:
        return random_model(seed, self._dtype)

    def _build(self) -> None:
        rng = self.rng
        is_simulated = "process_group" in self._given
        self._way = "zero3" if is_simulated else rng.choice(self.ways)
        draw = _draw_in_place if self._way == "fully_shard" else _draw
        self._settings = draw(rng, self._twin, self._world) | self._given
        start = rng.choice(STARTS) if self._start is None else self._start
        self.log.append([self._way, start, self._settings])
        self._is_mean = self._settings.get("gradient_reduction") != "sum"
        while self._scaled:
            self._scaled.pop().remove()
        self._model: Any = self._sharded(start)
        if self._settings.get("memory_budget") is None:
            self._set_lists()
            if rng.random() < 0.15 and not is_simulated:
                self._compile()
        if self._way == "fully_shard":
            self._set_by_unit()
        elif rng.random() < 0.2:
            self._try(self._register_hook)

    @property
    def _divisor(self) -> int:
        return self._world if self._is_mean else 1

    @property
    def _own_divisor(self) -> float:
        """Of the model's losses; a power of two, or the mean's."""
        return 1 / self._scaler.scale(torch.ones(())).item()  # Only this sets its scale up.

    def _sharded(self, start: str) -> nn.Module:
        """A copy of the twin, sharded; its values reach it in one of the ways of `STARTS`."""
        module = copy.deepcopy(self._twin)
        module.zero_grad()
        if self._way == "fully_shard":
            return self._sharded_in_place(module, start)
        if start == "given":
            return self._wrapped(module)
        if start == "first rank":
            for parameter in module.parameters():
                parameter.data.add_(dist.get_rank())
            return self._wrapped(module, sync_module_states=True)
        module = on_meta(self._twin)
        if start == "later":
            model = self._wrapped(module, param_init_fn="later")
            with pytest.raises(RuntimeError, match="has no value yet"):
                model(torch.zeros(1, WIDTH, dtype=self._dtype))
            model.load_state_dict(self._twin.state_dict())
            return model
        twins = dict(zip(module.modules(), self._twin.modules(), strict=True))

        def initialise(part: nn.Module) -> None:
            own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
            if start != "written":
                if not any(each.is_meta for each in own):
                    return
                part.to_empty(device="cpu", recurse=start == "emptied inside")
            _copy_values(twins[part], part)

        return self._wrapped(module, param_init_fn=initialise)

    def _wrapped(self, module: nn.Module, **more: Any) -> nn.Module:
        parts = dict(module.named_modules())
        names = {id(part): name for name, part in self._twin.named_modules()}
        settings = self._settings | more
        optional = [parts[names[id(part)]] for part in settings.pop("optional_modules", ())]
        if self._way == "nested":
            chosen = [name for name, part in parts.items() if isinstance(part, Branches)]
            chosen = [name for name in chosen if self.rng.random() < 0.5]
            chosen = [name for name in chosen if _is_closed(module, [parts[name]])]
            of_root = ("arena", "memory_budget")
            inner = {key: value for key, value in settings.items() if key not in of_root}
            for name in reversed(chosen):
                around, _, own = name.rpartition(".")
                found = self._try(lambda part=parts[name]: ZeRO3(part, **inner))
                if found is not None:
                    setattr(module.get_submodule(around), own, found)
        built = self._try(lambda: ZeRO3(module, optional_modules=optional, **settings))
        if "optional_modules" in self._given:
            more["optional_modules"] = optional
        elif built is None and optional:
            built = self._try(lambda: ZeRO3(module, **settings))
        if built is not None:
            return built
        kept = ("gradient_reduction", "param_init_fn", "sync_module_states", *self._given)
        self._settings = {name: settings[name] for name in kept if name in settings}
        return ZeRO3(module, **self._settings | more)

    def _sharded_in_place(self, module: nn.Module, start: str) -> nn.Module:
        rng, twin = self.rng, self._twin
        is_meta = start not in ("given", "first rank")
        if is_meta:
            module = on_meta(twin)
        mesh = None
        if self._settings["copies"]:
            mesh = init_device_mesh("cpu", (2, self._world // 2), mesh_dim_names=("r", "s"))
        values = [None, True, False] + ([1, self._world] if mesh is None else [])
        policies = {"offload_policy": self._settings["offload"]}
        if (precision := self._settings.get("mixed_precision")) is not None:
            policies["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=precision.param_dtype,
                reduce_dtype=precision.reduce_dtype,
                cast_forward_inputs=precision.cast_forward_inputs,
            )
        parts = (
            (n, p) for n, p in module.named_modules() if n and not isinstance(p, nn.ModuleDict)
        )
        named = [name for name, _ in parts if name and rng.random() < 0.4]

        def shard(what: Any) -> None:
            fully_shard(what, mesh=mesh, reshard_after_forward=rng.choice(values), **policies)

        for name in reversed(named):
            siblings = [module.get_submodule(name)]
            if rng.random() < 0.3:
                siblings = [*module.get_submodule(name.rpartition(".")[0]).children()]
            siblings = [e for e in siblings if not isinstance(e, (FSDPModule, nn.ModuleDict))]
            if any(isinstance(module.get_submodule(each), FSDPModule) for each in _above(name)):
                continue
            self.log.append(("in place", name, len(siblings)))
            if siblings and _is_closed(module, siblings):
                shard(siblings if len(siblings) > 1 else siblings[0])
        if not isinstance(module, FSDPModule):
            shard(module)
        if is_meta and start == "later":
            with pytest.raises(RuntimeError, match="has no value yet"):
                module(torch.zeros(1, WIDTH, dtype=self._dtype))
            module.load_state_dict(twin.state_dict())
        elif is_meta:
            module.to_empty(device="cpu")
            _copy_values(twin, module, recurse=True)
        if rng.random() < 0.3:
            self._keeps_full = True
            module.set_reshard_after_backward(False, recurse=rng.random() < 0.5)
        return module

    def _try(self, action: Callable[[], Any]) -> Any:
        """Do it, or be refused alike on all ranks, with nothing changed."""
        before = {name: p.detach().clone() for name, p in self._shown()}
        text, value = None, None
        try:
            value = action()
        except (ValueError, NotImplementedError, RuntimeError, TypeError) as error:
            text = f"{type(error).__name__}: {error}"
        texts = of_all_ranks(text)
        assert (texts[0] is None) == (text is None), texts
        if text is not None:
            self.log.append(("refused", text))
            for name, p in self._shown():
                assert torch.equal(p.detach(), before[name]), name
        return value

    def _shown(self) -> Iterator[tuple[str, Tensor]]:
        model = getattr(self, "_model", None)
        return iter(()) if model is None else model.named_parameters()

    def _compile(self) -> None:
        parts = [part for part in self._inner.modules() if isinstance(part, Branches)]
        # Compiled, a reentrant one has gradients that it lacks if no input has any.
        parts = [part for part in parts if "reentrant" not in map(_way_of, part.modules())]
        if parts:
            self.log.append("compiles")
            # Else a module compiled before `_fail` put its hook runs without it, unless torch's
            # limit of recompilations was reached, which ranks may do apart.
            torch._dynamo.config.skip_nnmodule_hook_guards = False
            self.rng.choice(parts).compile(backend="eager")

    def _register_hook(self) -> None:
        divisor = self._divisor

        def hook(state: object, sent: Tensor, *chunk: Tensor) -> None:
            dist.all_reduce(sent)
            sent /= divisor
            if chunk:
                chunk[0].copy_(sent.chunk(self._world)[self._rank])

        self._model.register_comm_hook(None, hook)
        self.log.append("hook")

    def _set_by_unit(self) -> None:
        """What `fully_shard` sets for each unit: the factor that sums are divided by, and code that
        reduces, or follows a reduction."""
        twins = dict(self._twin.named_parameters())
        for unit in (unit for unit in inner_units(self._model) if unit.handles):
            module: Any = unit.module
            ways = {way for way in ("factor", "instead", "after") if self.rng.random() < 0.2}
            self.log.append((unit.label, ways))
            scale = 0.5 ** len(ways - {"instead"})
            if "factor" in ways:
                module.set_gradient_divide_factor(2.0 * self._world)
            if "instead" in ways:
                module.set_custom_reduce_scatter(_ByAllReduce())
            if "after" in ways:
                module.set_all_reduce_hook(lambda chunk: chunk.mul_(0.5))
            names = {name for handle in unit.handles for name in handle.fqns}
            for name in names if scale != 1.0 else ():
                self._scale(twins[name], scale)

    def _scale(self, parameter: nn.Parameter, scale: float) -> None:
        """Multiply the gradients that it gets from now on, also if it is frozen now."""
        requires_grad = parameter.requires_grad
        parameter.requires_grad_(True)
        self._scaled.append(parameter.register_hook(functools.partial(_scaled, scale)))
        parameter.requires_grad_(requires_grad)

    @property
    def _inner(self) -> nn.Module:
        return self._model.module if isinstance(self._model, ZeRO3) else self._model

    def _draw_optimizers(self) -> list[tuple[str, str, str]]:
        """Of each: which parameters it has, where it runs, and its formula."""
        rng = self.rng
        way = rng.choice(["shards", "shards", "native", "whole", "split", "in backward"])
        if way == "split":
            first = "matrices", "whole", rng.choice(sorted(WHOLE))
            return [first, ("rest", "shards", rng.choice(sorted(ELEMENT_WISE)))]
        known: Any = ("adamw", "amsgrad") if way == "native" else ELEMENT_WISE
        return [("all", way, rng.choice(sorted(known)))]

    def _make_optimizers(self) -> None:
        ours, twins = dict(self._model.named_parameters()), dict(self._twin.named_parameters())
        pairs, self._later, self._steps_in_backward = [], list[list[str]](), False
        for part, way, formula in self._steps:
            names = [
                n for n, p in twins.items() if part in ("all", ["rest", "matrices"][p.ndim == 2])
            ]
            kind, options = WHOLE[formula]
            makes = [functools.partial(kind, lr=1e-2, **options)] * 2
            known = inspect.signature(kind).parameters
            if way == "whole":
                makes[0] = functools.partial(_whole, kind, options)
            elif way == "native" or (kind is torch.optim.AdamW and self.rng.random() < 0.3):
                makes[0] = functools.partial(AdamW, lr=1e-2, **options)
            elif flags := [
                # torch's fused SGD fails on a momentum that begins later than others.
                each
                for each in ("foreach", "fused")[: 1 if kind is torch.optim.SGD else 2]
                if each in known
            ]:
                flag = {self.rng.choice(flags): self.rng.choice([True, True, False])}
                makes[0] = functools.partial(makes[0], **flag)
            if names:
                half = 0 if self._groups == "one" else len(names) // 2
                of_both = zip(makes, (ours, twins), strict=True)
                pairs.append([make([of[name] for name in names[half:]]) for make, of in of_both])
                self._later.append(names[:half])
                for optimizer, of in zip(pairs[-1], (ours, twins), strict=True):
                    if self._groups == "two":
                        _add_group(optimizer, of, names[:half])
        self._optimizers, self._twin_optimizers = (list(each) for each in zip(*pairs, strict=True))
        if self._steps[0][1] == "in backward" and isinstance(self._model, ZeRO3):
            self._try(self._step_in_backward)
        schedule = self._schedule
        if schedule is not None and schedule.func is torch.optim.lr_scheduler.CyclicLR:
            schedule = functools.partial(schedule, cycle_momentum=False)
        self._schedulers = [
            [schedule(each) for each in every] if schedule is not None else []
            for every in (self._optimizers, self._twin_optimizers)
        ]
        self.log.append((self._steps, self._optimizers, schedule, self._steps_in_backward))

    def _add_groups(self) -> None:
        """Parameters that were in no optimizer so far."""
        if self._groups == "later":
            self._groups = "two"
            for model, optimizers in self._pairs():
                for optimizer, names in zip(optimizers, self._later, strict=True):
                    _add_group(optimizer, dict(model.named_parameters()), names)

    def _step_in_backward(self) -> None:
        self._model.step_in_backward(self._optimizers[0])
        self._steps_in_backward = True

    def _put_hooks(self, rng: Rng) -> None:
        """Hooks that scale gradients on both: the model's see the sum, the twin's each summand."""
        twins = dict(self._twin.named_parameters())
        for name, sharded_param in self._model.named_parameters():
            if sharded_param.requires_grad and rng.random() < 0.15:
                self._hooked.add(name)
                for parameter in (sharded_param, twins[name]):
                    parameter.register_hook(functools.partial(_scaled, 0.5))

    def _set_lists(self) -> None:
        """Of modules to gather ahead, which may name what is not needed, or in a wrong order."""
        every = units(self._model)
        for unit in every:
            if self.rng.random() < 0.1:
                chosen = self.rng.sample(every, self.rng.randint(0, min(3, len(every))))
                modules = [each.module for each in chosen if each is not unit]
                if self.rng.random() < 0.5:
                    unit.set_modules_to_forward_prefetch(modules)
                else:
                    unit.set_modules_to_backward_prefetch(modules)

    # A step

    def train(self, actions: list[str], steps: int = STEPS) -> None:
        if self._settings.get("memory_budget") is not None:
            steps += 3  # It chooses after five.
        for _ in range(steps):
            self._zero_grad()
            action = self.rng.choice(actions)
            self.log.append(action)
            getattr(self, f"_{action}", lambda: None)()
            self._step()
            self._compare()

    def _compare(self) -> None:
        sharded_params = dict(self._model.named_parameters())
        names = [name for name, _ in self._twin.named_parameters()]
        assert list(sharded_params) == names, [*set(sharded_params) ^ set(names)]
        for name, parameter in self._twin.named_parameters():
            info = get_info(sharded_params[name])
            whole = parameter.detach().reshape(-1)
            # None: explicitly unsharded, and no pass has used it or gone backward since.
            if info is None and self._keeps_full:
                continue  # As with torch, it has the values from before the step.
            own = whole if info is None else whole[slice(*info.range)]
            assert (sharded_params[name] if info is None else info).shape == parameter.shape
            assert info is None or info.fqn == name
            assert_close_in_float64(sharded_params[name].detach().reshape(-1), own, name)

    def _zero_grad(self) -> None:
        for each in (*self._optimizers, *self._twin_optimizers, self._model, self._twin):
            each.zero_grad(set_to_none=self._to_none)  # Some parameters may be in no optimizer.

    def _batches(self) -> list[Tensor]:
        """Every rank's."""
        shape = (self._world, 2, WIDTH)
        return list(torch.randn(shape, generator=self._generator, dtype=self._dtype))

    def _of_both(self) -> Iterator[tuple[Any, Tensor, float]]:
        """The model with its own batch, then the twin with every rank's, in turn; and what a loss
        is divided by."""
        batches = self._batches()
        yield self._model, batches[self._rank], self._own_divisor
        for batch in batches:
            yield self._twin, batch, self._divisor

    def _end_step(self) -> None:
        """Of an action that trains by itself."""
        self._run_optimizers()
        self._compare()
        self._zero_grad()

    @contextlib.contextmanager
    def _no_sync(self, waits: bool) -> Iterator[None]:
        if not waits:
            yield
        elif isinstance(self._model, ZeRO3):
            with self._model.no_sync():
                yield
        else:
            sharded = [part for part in self._model.modules() if isinstance(part, FSDPModule)]
            some = self.rng.sample(sharded, self.rng.randint(1, len(sharded)))
            recurse, hops = self.rng.random() < 0.5, self.rng.random() < 0.3
            self.log.append(("wait", len(some), recurse, hops))
            for part in some if self.rng.random() < 0.5 else [self._model]:
                waits_for = (
                    part.set_requires_all_reduce if hops else part.set_requires_gradient_sync
                )
                waits_for(False, recurse=recurse or part is self._model)
            try:
                yield
            finally:
                self._model.set_requires_gradient_sync(True)

    @property
    def _is_sloped(self) -> bool:
        return any(_way_of(module) == "slope" for module in self._twin.modules())

    def _step(self) -> None:
        Branches.uses_all = self.rng.random() < 0.7
        count = 1 if self._steps_in_backward else self.rng.choice([1, 1, 2, 3])
        waits = self.rng.random() < 0.7
        for number in range(count):
            is_last = number + 1 == count
            flipped = self._some_names() if self.rng.random() < 0.2 else set()
            if self._is_sloped:
                flipped = set()  # No hook gathers again what a graph of a backward reads.
            stays = self.rng.random() < 0.5 and not self._steps_in_backward
            stays &= not {"recomputed", "reentrant", "entered"} & {
                *map(_way_of, self._twin.modules())
            }
            writes = self.rng.random() < 0.2 and not self._steps_in_backward
            way = self.rng.choice(["one"] * 3 + ["sum", "in order", "reversed", "one by one"])
            if (self._steps_in_backward and way != "sum") or (
                self._is_sloped and way == "reversed"
            ):
                way = "one"
            self.log.append((way, len(flipped), stays, writes, Branches.uses_all))
            several = [self._batches() for _ in range(1 if way == "one" else 2)]
            offload = self._settings.get("offload")
            # A copy to the device may still read weights on the host (migrating.md).
            if writes and way == "one" and not getattr(offload, "params", offload):
                self._write_inside_next_forward(self._some_names())
            with self._no_sync(waits and not is_last):
                batches = [each[self._rank] for each in several]
                self._pass(self._model, batches, way, self._own_divisor, flipped, stays)
            for rank in range(self._world):
                own = [each[rank] for each in several]
                self._pass(self._twin, own, way, self._divisor, flipped, stays)
            if not is_last and self.rng.random() < 0.3:
                self._act_on_gradients()
            if not is_last and self.rng.random() < 0.4:
                # What waits on the host is of what was trained before (migrating.md).
                between = self.rng.choice(BETWEEN[1:] if offload else BETWEEN)
                self.log.append(between)
                getattr(self, f"_{between}")()
        if waits and count > 1 and isinstance(self._model, ZeRO3) and self.rng.random() < 0.2:
            with self._no_sync(True):
                for model, batch, divisor in self._of_both():
                    self._pass(model, [batch], "one", divisor)
            self._model.reduce_gradients()
        self._clip()
        self._run_optimizers()

    def _pass(
        self,
        model: Any,
        batches: list[Tensor],
        way: str,
        divisor: float,
        flipped: Collection[str] = (),
        stays: bool = False,
    ) -> None:
        """Forwards, and backwards in an order that `way` says. After each forward `flipped` are
        frozen, or trainable, for another one; `stays`: and while they go backward."""
        if way == "one by one":  # The second forward runs between the first one's two passes.
            for batch in batches:
                output = self._forward(model, batch, flipped)
                with _flipped(model, flipped if stays else ()):
                    _backward(output, divisor)
            return
        outputs = [self._forward(model, batch, flipped) for batch in batches]
        self._went_back = outputs[0].requires_grad
        if way == "sum":
            outputs = [torch.stack(outputs)]
        with _flipped(model, flipped if stays else ()):
            for output in outputs if way != "reversed" else outputs[::-1]:
                _backward(output, divisor)

    def _clip(self) -> None:
        if not self._clips or all(each.grad is None for each in self._twin.parameters()):
            return
        for optimizer in self._optimizers:
            self._scaler.unscale_(optimizer)
        if isinstance(self._model, ZeRO3):
            norm = self._model.clip_grad_norm_(0.5)
        else:
            norm = nn.utils.clip_grad_norm_(self._model.parameters(), 0.5)
        twin_norm = nn.utils.clip_grad_norm_(self._twin.parameters(), 0.5)
        assert_close_in_float64(norm, twin_norm, "norm")

    def _run_optimizers(self) -> None:
        # Where our gradient is zeros and the twin's is None, its optimizer steps as well.
        ours = dict(self._model.named_parameters())
        for name, parameter in self._twin.named_parameters():
            gradient = ours[name].grad
            if parameter.grad is None and gradient is not None:
                assert not gradient.any(), name
                parameter.grad = torch.zeros_like(parameter)
        if self._steps_in_backward and not self._went_back:
            return
        for optimizer in self._twin_optimizers:
            optimizer.step()
        if not self._steps_in_backward:
            self._step_scaled()
        for schedule in (each for every in self._schedulers for each in every):
            schedule.step()

    def _step_scaled(self) -> None:
        for optimizer in self._optimizers:
            self._scaler.step(optimizer)
        self._scaler.update()

    def _some_names(self) -> set[str]:
        return {name for name, _ in self._twin.named_parameters() if self.rng.random() < 0.5}

    @staticmethod
    def _forward(model: nn.Module, batch: Tensor, flipped: Collection[str]) -> Tensor:
        """A forward; before its backward another one may run, with other parameters frozen."""
        output: Tensor = model(batch)
        if flipped:
            with _flipped(model, flipped), torch.no_grad():
                model(batch)
        return output

    def _write_inside_next_forward(self, names: set[str]) -> None:
        """As momentum encoders do: when the model's next forward has begun, scale weights of units
        whose own has not. The twin's, which runs after it, change with them."""
        twins = dict(self._twin.named_parameters())

        @torch.no_grad()
        def scale(*_: object) -> None:
            handle.remove()
            for name, parameter in self._model.named_parameters():
                if name in names and hasattr(parameter, "layerzero"):
                    for each in (parameter, twins[name]):
                        each.mul_(0.9)

        handle = self._inner.register_forward_pre_hook(scale)

    def _act_on_gradients(self) -> None:
        """Between micro-batches: scale what has been accumulated, or clear all or some of it."""
        way, names = self.rng.choice(["scale", "zero", "some", "all"]), self._some_names()
        self.log.append(("gradients", way))
        for model in (self._model, self._twin):
            for name, parameter in model.named_parameters():
                if way == "some" and name in names:
                    parameter.grad = None
                elif way in ("scale", "zero") and parameter.grad is not None:
                    parameter.grad.mul_(0.5 if way == "scale" else 0.0)
        if way == "all":
            self._zero_grad()

    # Actions between steps

    def _evaluate(self) -> None:
        self._model.eval()
        batch = self._batches()[self._rank]
        with self.rng.choice([torch.no_grad, torch.inference_mode])():
            assert_close_in_float64(self._model(batch), self._twin(batch), "output")
        self._model.train()

    def _fail(self) -> None:
        """A pass that raises on all ranks, which leaves what earlier passes added up."""
        error = self.rng.choice([Boom, KeyboardInterrupt])
        modules = dict(self._model.named_modules())
        name = self.rng.choice([name for name, _ in self._twin.named_modules() if name])
        where = self.rng.choice(["before", "after", "backward"])
        waits = self.rng.random() < 0.5
        self.log.append(("fails", where, name))

        def boom(*_: object) -> None:
            raise error

        def later(module: nn.Module, given: Any, output: Tensor) -> None:
            if where == "backward" and output.requires_grad:
                output.register_hook(boom)
            else:
                boom()

        module = modules[name]
        register = (
            module.register_forward_pre_hook if where == "before" else module.register_forward_hook
        )
        batches, fails = self._batches(), True
        with contextlib.suppress(error), register(boom if where == "before" else later):
            with self._no_sync(waits):
                output = self._model(batches[self._rank])
                if where == "backward":
                    _backward(output, self._own_divisor)
            fails = False
        for batch in batches if not fails and where == "backward" else ():
            _backward(self._twin(batch), self._divisor)

    def _raise(self) -> None:
        self._fail()
        if isinstance(self._model, FSDPModule) and self.rng.random() < 0.5:
            self._model.reset_iter_state()
        self._zero_grad()

    def _freeze(self) -> None:
        """Freeze or thaw a parameter, or a part of the model; some parameter stays trainable."""
        ours, twins = (dict(each.named_parameters()) for each in (self._model, self._twin))
        name = self.rng.choice(sorted(twins))
        names = {name} if self.rng.random() < 0.5 else _beside(name, twins)
        requires_grad = not twins[name].requires_grad
        rest = any(twin.requires_grad for other, twin in twins.items() if other not in names)
        for each in names if requires_grad or rest else ():
            for parameters in (ours, twins):
                parameters[each].requires_grad_(requires_grad)

    def _summon(self) -> None:
        """Full parameters, of which some are written."""
        names = self._some_names() if self.rng.random() < 0.5 else set()
        with self._model.summon_full_params(), torch.no_grad():
            full = dict(self._model.named_parameters())
            for name, parameter in self._twin.named_parameters():
                assert_close_in_float64(full[name].detach(), parameter.detach(), name)
                if name in names:
                    full[name].mul_(0.9)
                    parameter.mul_(0.9)

    @torch.no_grad()
    def _write(self) -> None:
        """Other weights, perhaps for an evaluation alone."""
        if self._keeps_full:
            return  # As with torch, what stays full has the values from before.
        way, comes_back = self.rng.choice([*WEIGHTS]), self.rng.random() < 0.5
        self.log.append(("writes", way, comes_back))
        both = [*self._model.parameters()], [*self._twin.parameters()]
        kept = [(p, p.data, p.data.clone()) for each in both for p in each]
        for each in both:
            WEIGHTS[way](each)
        self._evaluate()
        for parameter, data, value in kept if comes_back else ():
            parameter.data = data.copy_(value)

    def _unshard(self) -> None:
        every = units(self._model)
        for unit in self.rng.sample(every, self.rng.randint(1, len(every))):
            waiting = unit.unshard(async_op=self.rng.random() < 0.5)
            if waiting is not None and self.rng.random() < 0.7:
                waiting.wait()
            if self.rng.random() < 0.5:
                unit.reshard()

    def _gather(self) -> None:
        checkpoint.get_model_state_dict(self._model, full=True, cpu_offload=True)

    def _copies(self) -> None:
        with pytest.raises((TypeError, RuntimeError), match="cannot be copied or pickled"):
            copy.deepcopy(self._model)

    def _reshards(self) -> None:
        if not isinstance(self._model, FSDPModule):
            return
        flag, recurse = self.rng.random() < 0.5, self.rng.random() < 0.5
        if self.rng.random() < 0.5:
            self._model.set_reshard_after_forward(flag, recurse)
        else:
            self._keeps_full |= not flag
            self._model.set_reshard_after_backward(flag, recurse=recurse)

    def _phase(self) -> None:
        if isinstance(self._model, ZeRO3):
            with self._model.timeout(seconds=60):
                self._evaluate()

    def _call_part(self) -> None:
        """A part of the model, called by itself, forward and backward."""
        names = [n for n, part in self._twin.named_modules() if isinstance(part, Branches)]
        if not names or self._steps_in_backward:
            return
        name = self.rng.choice(names)
        self.log.append(("part", name))
        for model, batch, divisor in self._of_both():
            _backward(dict(model.named_modules())[name](batch), divisor)
        self._end_step()

    def _retain(self) -> None:
        """Two backwards of one graph."""
        if self._steps_in_backward or self._is_sloped:
            return
        Branches.uses_all = True
        for model, batch, divisor in self._of_both():
            loss = _loss(model(batch)) / divisor
            if loss.requires_grad:
                loss.backward(retain_graph=True)
                loss.backward()
        self._end_step()

    def _input_gradient(self) -> None:
        """Of the batch alone, as for saliency; the parameters get none."""
        if any(_way_of(module) in _ONCE for module in self._twin.modules()):
            return
        batch = self._batches()[0].requires_grad_()
        found = []
        for model in (self._model, self._twin):
            loss = _loss(model(batch))
            found += torch.autograd.grad(loss, batch)
            assert not any(p.grad is not None and p.grad.any() for p in model.parameters())
        assert_close_in_float64(*found, "gradient of the batch")

    def _penalty(self) -> None:
        """The gradient with regard to the batch is part of the loss, or all of it."""
        if self._steps_in_backward or any(_way_of(m) in _ONCE for m in self._twin.modules()):
            return
        Branches.uses_all, is_alone = True, self.rng.random() < 0.5
        for model, batch, divisor in self._of_both():
            batch = batch.clone().requires_grad_()
            output = model(batch)
            (slope,) = torch.autograd.grad(output.sum(), batch, create_graph=True)
            _backward(slope if is_alone else output + slope, divisor)
        self._end_step()

    def _second_model(self) -> None:
        """Another engine with the same weights: a teacher, a judge, an encoder, or its equal."""
        if self._steps_in_backward:
            return
        rng, twin = self.rng, copy.deepcopy(self._twin)
        if is_frozen := rng.random() < 0.5:
            twin.requires_grad_(False)
        twin.zero_grad()
        settings = settings_of_passes(rng, twin, self._world) | _groups(rng, twin, self._world)
        settings["auto_wrap_policy"] = _policy(rng, twin, self._world)
        group = self._given.get("process_group")
        other = self._try(lambda: ZeRO3(copy.deepcopy(twin), group, **settings))
        if other is None:
            return
        Branches.uses_all = True
        for _ in range(2):
            way = rng.choice(["teacher", "judge", "encoder", "beside"])
            self.log.append(("second", way, is_frozen, settings))
            for model, batch, divisor in self._of_both():
                second = other if model is self._model else twin
                _backward(_together(way, model, second, batch), divisor)
            self._compare_gradients_of(other, twin)
            self._end_step()
            full = checkpoint.get_model_state_dict(self._model, full=True)
            other.load_state_dict(full)
            twin.load_state_dict(self._twin.state_dict())
            for each in (other, twin):
                each.zero_grad()

    def _compare_gradients_of(self, other: ZeRO3, twin: nn.Module) -> None:
        scale = 1.0 if self._is_mean else 1.0 / self._world
        own = full_gradients(other).items()
        for (name, grad), q in zip(own, twin.parameters(), strict=True):
            if grad is None or q.grad is None:
                assert not any(g.any() for g in (grad, q.grad) if g is not None), name
            else:
                assert_close_in_float64(grad * self._own_divisor, q.grad * scale, name)

    def _join(self) -> None:
        """Steps, and micro-batches of a step, of which a rank has fewer, and passes of a rank that
        no other runs."""
        given = self._settings
        of_participants = given.get("optional_mean") == "participants"  # Not those out of batches.
        if self._way == "fully_shard" or (given.get("optional_modules") and of_participants):
            return
        if self._is_sloped:  # Not inside a join (migrating.md).
            return
        Branches.uses_all = True
        most = 1 if self._steps_in_backward else self.rng.choice([1, 3])
        plan = [
            [self.rng.randint(1, most) for _ in range(self.rng.randint(0, 3))]
            for _ in range(self._world)
        ]
        divides, unshards = self.rng.random() < 0.7, self.rng.random() < 0.3
        own, alone = Rng(self.rng.random() + self._rank), self.rng.choice([0.0, 0.4])
        batches = [[self._batches() for _ in range(most)] for _ in range(max(map(len, plan)))]
        had: list[set[str]] = []
        self.log.append(("join", plan, divides, unshards, alone))
        with layerzero.join(self._model, *self._optimizers, divide_by_initial_world_size=divides):
            for unit in units(self._model) if unshards else ():
                unit.unshard()
            for step, count in enumerate(plan[self._rank]):
                for micro, batch in enumerate(batches[step][:count]):
                    with self._no_sync(waits=True), torch.set_grad_enabled(own.random() < 0.5):
                        while own.random() < alone:
                            self._model(batch[self._rank])
                    with self._no_sync(waits=micro + 1 < count):
                        _backward(self._model(batch[self._rank]))
                named = self._model.named_parameters()
                had.append({name for name, p in named if p.grad is not None})
                if self._clips:
                    self._model.clip_grad_norm_(0.5)
                if not self._steps_in_backward:
                    for optimizer in self._optimizers:
                        optimizer.step()
                self._model.zero_grad(set_to_none=True)
        named_of = max(of_all_ranks(had), key=len)
        self._twin.zero_grad(set_to_none=True)
        for step, of_step in enumerate(batches):
            present = [rank for rank in range(self._world) if len(plan[rank]) > step]
            divisor = self._divisor
            if self._is_mean and not divides:
                divisor = len(present)
            for rank in present:
                for batch in of_step[: plan[rank][step]]:
                    _backward(self._twin(batch[rank]), divisor)
            if self._clips and any(p.grad is not None for p in self._twin.parameters()):
                nn.utils.clip_grad_norm_(self._twin.parameters(), 0.5)
            for name, parameter in self._twin.named_parameters():
                if parameter.grad is None and name in named_of[step]:
                    parameter.grad = torch.zeros_like(parameter)
            for optimizer in self._twin_optimizers:
                optimizer.step()
            self._twin.zero_grad(set_to_none=True)
        self._compare()

    def _not_finite(self) -> None:
        """On one rank; with `on_nonfinite` the step is none."""
        way = self._settings.get("on_nonfinite")
        if (way is None and not self._scaler.is_enabled()) or self._steps_in_backward:
            return
        batch = self._batches()[self._rank]
        factor = float("nan") if self._rank == self._world - 1 else 1.0
        loss = _loss(self._model(batch)) * factor / self._own_divisor
        if not loss.requires_grad:
            return
        if way == "raise":
            with pytest.raises(FloatingPointError):
                loss.backward()
        else:
            loss.backward()
            self._step_scaled()
        self._zero_grad()
        self._clear_alike()

    def _clear_alike(self) -> None:
        """The twin's gradients that the engine dropped, which `zero_grad` may leave as zeros."""
        for name, parameter in self._model.named_parameters():
            if parameter.grad is None:
                self._twin.get_parameter(name).grad = None

    def _keep_graph(self) -> None:
        """A graph from before a step goes backward after it: torch's error, or, where a unit stayed
        full, the gradients of the weights that it was made with."""
        if self._steps_in_backward or self._is_sloped:
            return
        batch, raised = self._batches()[0], []
        before = copy.deepcopy(self._twin)
        outputs = [each(batch) for each in (self._model, self._twin)]
        _backward(before(batch), self._divisor)
        self._step()
        self._zero_grad()
        for output in outputs:
            try:
                _backward(output)
                raised.append(False)
            except RuntimeError as error:
                # Nothing gathers an optional module again once it was freed, as by a failed pass.
                allowed = "modified by an inplace operation", "freed before its backward"
                assert any(each in str(error) for each in allowed)
                raised.append(True)
        recomputes = {"recomputed", "reentrant"} & {*map(_way_of, self._twin.modules())}
        # What is recomputed reads the weights of then, as with plain `checkpoint`.
        if raised == [False, True] and not (self._hooked or self._scaled or recomputes):
            own = full_gradients(self._model).items()
            for (name, gradient), other in zip(own, before.parameters(), strict=True):
                if other.grad is not None and gradient is not None:
                    assert_close_in_float64(gradient, other.grad * self._world, name)
        self._zero_grad()

    def _spoil(self) -> None:
        """What changes a parameter is refused; undone, it has done no harm."""
        owners = [
            m for m in self._model.modules() if any(True for _ in m.parameters(recurse=False))
        ]
        owner = self.rng.choice(owners)
        name, sharded_param = next(iter(owner.named_parameters(recurse=False)))
        with pytest.raises(RuntimeError, match="the model changed after wrapping: replaced"):
            setattr(owner, name, nn.Parameter(torch.zeros(1, dtype=torch.float64)))
            self._model(self._batches()[0])
        setattr(owner, name, sharded_param)
        owner.late = nn.Linear(2, 2)
        with pytest.raises(
            RuntimeError, match=r"the model changed after wrapping: added .*late\.weight"
        ):
            self._model.state_dict()
        del owner.late

    def _patch(self) -> None:
        for each in (self._model, self._twin):
            each.forward = functools.partial(lambda before, x: 0.9 * before(x), each.forward)

    def _grow(self) -> None:
        """A layer more: new optimizers, since the root's own parameters are laid out anew."""
        if self._hooked or self._way != "zero3" or self._steps_in_backward:
            return
        torch.manual_seed(self.rng.randrange(1000))
        layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        for each in (self._model, self._twin):
            each.append(copy.deepcopy(layer))
        rewrap(self._model)
        self._clear_alike()
        self._make_optimizers()

    def _reload(self) -> None:
        """Both through torch's own state dicts, into weights of zero and fresh optimizers."""
        if any(way == "whole" for _, way, _ in self._steps) or self._steps_in_backward:
            return
        for unit in units(self._model):
            unit.reshard()  # Else full parameters, which no optimizer has, are in the model.
        options = theirs.StateDictOptions(
            # torch's needs a state that is a tensor, and Adagrad's second group has none at first.
            full_state_dict=self._steps[0][2] not in ("plain sgd", "adagrad")
            and self.rng.random() < 0.5,
            strict=False,  # a parameter that had no gradient yet has no state
        )
        by_name = self.rng.random() < 0.7
        for each in (self._model, self._twin):
            each.zero_grad()  # torch's functions make state only where there is no gradient
        saved = []
        for model, optimizers in self._pairs():
            weights, state = theirs.get_state_dict(model, optimizers, options=options)
            own = [each.state_dict() for each in optimizers]
            saved.append(copy.deepcopy((weights, state, own)))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
        schedules = copy.deepcopy([[each.state_dict() for each in e] for e in self._schedulers])
        self._make_optimizers()
        for (model, optimizers), (weights, state, own) in zip(self._pairs(), saved, strict=True):
            for group in (group for each in optimizers for group in each.param_groups):
                group["lr"] = 1.0
            if by_name:
                theirs.set_optimizer_state_dict(model, optimizers, state, options=options)
            for optimizer, of_it in zip(optimizers, own, strict=True):
                if not by_name:
                    optimizer.load_state_dict(of_it)
            theirs.set_model_state_dict(model, weights, options=options)
        for every, states in zip(self._schedulers, schedules, strict=True):
            for schedule, state in zip(every, states, strict=True):
                schedule.load_state_dict(state)

    def _pairs(self) -> list[tuple[nn.Module, list[Any]]]:
        return [(self._model, self._optimizers), (self._twin, self._twin_optimizers)]

    def _save_and_rebuild(self) -> None:
        """Continue from a checkpoint with another model: other units, layout, groups, engine."""
        if self._hooked or any(
            "forward" in part.__dict__ or is_parametrized(part) for part in self._twin.modules()
        ):
            return
        with folder_of_ranks() as folder:
            self.save(folder)
            del self._model
            self.load(folder)
            self._zero_grad()
            self._compare()

    def save(self, folder: str) -> None:
        """The model as a checkpoint; the twin and its optimizers as they are."""
        checkpoint.save(folder, self._model, step=1, **self._named())
        if self._rank == 0:
            twin = [getattr(self, name) for name in _OF_TWIN]
            torch.save((twin, self._schedulers[1]), f"{folder}/twin")
        dist.barrier()

    def load(self, folder: str) -> None:
        twin, schedulers = torch.load(f"{folder}/twin", weights_only=False)
        for name, value in zip(_OF_TWIN, twin, strict=True):
            setattr(self, name, value)
        twin_optimizers = self._twin_optimizers
        values = copy.deepcopy(self._twin.state_dict())
        with torch.no_grad():
            for parameter in self._twin.parameters():
                parameter.add_(1.0)
        self._build()
        self._make_optimizers()
        for group in (group for each in self._optimizers for group in each.param_groups):
            group["lr"] = 1.0
        checkpoint.load(folder, self._model, **self._named())
        self._twin.load_state_dict(values)
        self._twin_optimizers, self._schedulers[1] = twin_optimizers, schedulers

    def _named(self) -> dict[str, Any]:
        """For `checkpoint.save` and `load`."""
        schedules = self._schedulers[0]
        named = {"optimizer": self._optimizers, "scheduler": schedules or None}
        return {k: each and dict(zip("01", each, strict=False)) for k, each in named.items()}

    def _states(self) -> None:
        """State dicts, whole and in shards, are those of the twin, and load again."""
        full = checkpoint.get_model_state_dict(self._model, full=True)
        for name, value in self._twin.state_dict().items():
            assert_close_in_float64(full[name], value, name)
        self._model.load_state_dict(self._model.state_dict() if self.rng.random() < 0.5 else full)


_ONCE = ("without gradients", "reentrant")
"""Ways that have no gradient with regard to the batch, or no second one."""


def _together(way: str, own: Any, other: Any, batch: Tensor) -> Tensor:
    if way == "teacher":
        with torch.no_grad():
            target = other(batch)
        return own(batch) - 0.5 * target
    if way == "judge":
        return other(own(batch))
    return own(other(batch)) if way == "encoder" else own(batch) + other(batch)


WEIGHTS: dict[str, Callable[[list[Any]], object]] = {
    "data": lambda each: [p.data.mul_(0.9) for p in each],
    "assigned": lambda each: [setattr(p, "data", p.data * 0.9) for p in each],
    "foreach": lambda each: torch._foreach_copy_(each, [p.detach() * 0.9 for p in each]),
}
"""How programs write weights."""

ACTIONS = [
    *("nothing", "evaluate", "raise", "freeze", "summon", "reload", "spoil", "patch", "grow"),
    *("keep_graph", "unshard", "copies", "reshards", "call_part", "retain", "join"),
    *("add_groups", "add_groups", "input_gradient", "penalty", "second_model", "second_model"),
    *("not_finite", "save_and_rebuild", "save_and_rebuild", "states", "phase", "write"),
]
BETWEEN = ["freeze", "fail", "fail", "evaluate", "unshard", "phase", "gather"]
"""Actions between micro-batches, while gradients may wait for a reduction."""


class _ByAllReduce:
    """As torch's `ReduceScatter`."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, **_: Any
    ) -> None:
        dist.all_reduce(input_tensor, group=group)
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])
        if op == dist.ReduceOp.AVG:
            output_tensor /= group.size()


@contextlib.contextmanager
def folder_of_ranks() -> Iterator[str]:
    """The same folder on every rank, for a while."""
    names = [tempfile.mkdtemp(prefix="program-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    try:
        yield str(names[0])
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(str(names[0]))


def _beside(name: str, names: Iterable[str]) -> set[str]:
    """Names of the parameters of one module, and of those inside it."""
    prefix = name.rpartition(".")[0]
    return {each for each in names if each.startswith(prefix)}


def _is_closed(model: nn.Module, parts: list[nn.Module]) -> bool:
    """Whether no parameter of `parts` is tied to one outside."""
    own = [p for part in parts for p in part.parameters()]
    inside = Counter(p for part in parts for p in _parameters(part))
    everywhere = Counter(_parameters(model))
    return all(inside[p] == everywhere[p] for p in own)


def _parameters(module: nn.Module) -> list[nn.Parameter]:
    return [p for _, p in module.named_parameters(remove_duplicate=False)]


def _add_group(optimizer: Any, named: dict[str, nn.Parameter], names: list[str]) -> None:
    if names:
        optimizer.add_param_group({"params": [named[name] for name in names], "lr": 2e-2})


def _whole(kind: Any, options: dict[str, Any], given: list[nn.Parameter]) -> Any:
    return WholeTensorOptimizer(given, kind, lr=1e-2, bucket_bytes=300, **options)


def _way_of(module: nn.Module) -> str:
    return getattr(module, "way", "")


def _above(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _copy_values(source: nn.Module, target: nn.Module, recurse: bool = False) -> None:
    with torch.no_grad():
        for name, value in source.named_parameters(recurse=recurse):
            target.get_parameter(name).copy_(value)
        for name, value in source.named_buffers(recurse=recurse):
            target.get_buffer(name).copy_(value)


@contextlib.contextmanager
def _flipped(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Frozen where they are trainable, and the other way round."""
    chosen = [p for name, p in model.named_parameters() if name in names]
    for parameter in chosen:
        parameter.requires_grad_(not parameter.requires_grad)
    yield
    for parameter in chosen:
        parameter.requires_grad_(not parameter.requires_grad)


def _scaled(scale: float, gradient: Tensor | None) -> Tensor | None:
    """A double backward gives hooks None where it has no gradient."""
    return None if gradient is None else gradient * scale


def _loss(output: Tensor) -> Tensor:
    """A mean whose gradients fall as outputs grow: else roundings of some programs grow with their
    weights from step to step, to more than an error would be."""
    return output.square().log1p().mean()


def _backward(output: Tensor, divisor: float = 1) -> None:
    """Where there is something to go back through."""
    loss = _loss(output) / divisor
    if loss.requires_grad:
        loss.backward()
