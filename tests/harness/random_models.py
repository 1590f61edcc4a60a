"""Random models: parts that are used in several ways, or not at all; tied, frozen, nested."""

import copy
import functools
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

WIDTH = 6


class Branches(nn.Module):
    """Uses what is inside it in one of several ways, or not at all."""

    uses_all = True  # set for all of them, by `Run`
    batch = ""
    """What the model computes on now, by which ranks differ in what they enter."""

    def __init__(self, rng: random.Random, depth: int) -> None:
        super().__init__()
        self.way = rng.choice([*WAYS])
        self.name = str(rng.getstate()[1][-1])
        self.linear = nn.Linear(WIDTH, WIDTH, bias=rng.random() < 0.7)
        self.norm = nn.LayerNorm(WIDTH) if rng.random() < 0.5 else nn.Identity()
        self.inner = _make(rng, depth - 1)
        self.scale = nn.Parameter(torch.full((), 1.1)) if rng.random() < 0.3 else None
        self.unused = nn.Linear(3, 2) if rng.random() < 0.2 else None
        self.register_buffer("shift", torch.full((WIDTH,), 0.5) if rng.random() < 0.3 else None)

    def once(self, x: Tensor) -> Tensor:
        y = self.norm(torch.sin(self.linear(x)))  # Not tanh, whose output may not be written.
        if self.scale is not None and random.Random(self.name + Branches.batch).random() < 0.7:
            y = y * self.scale
        return self.inner(y if self.shift is None else y + self.shift)

    def forward(self, x: Tensor) -> Tensor:
        return (_entered if self.way == "entered" else WAYS[self.way])(self, x)


def _writes(part: Branches, x: Tensor) -> Tensor:
    """Into a view of what a unit returned."""
    y = part.once(x)[None].squeeze(0)
    y += x
    return y


def _without_gradients(part: Branches, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = part.once(x)
    return x + y


def _in_either_order(part: Branches, x: Tensor) -> Tensor:
    return part.once(x) if Branches.uses_all else part.linear(part.inner(x))


def _hooked(part: Branches, x: Tensor) -> Tensor:
    y = part.once(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 0.5)
    return x + y


def _recomputed(part: Branches, x: Tensor, reentrant: bool) -> Tensor:
    batch = Branches.batch

    def once(x: Tensor) -> Tensor:
        with mock.patch.object(Branches, "batch", batch):
            return part.once(x)

    return x + recompute(once, x, use_reentrant=reentrant)


def _entered(part: Branches, x: Tensor) -> Tensor:
    """As the batch says how often, and how."""
    rng = random.Random(part.name + Branches.batch)
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        use = rng.choice(["added"] * 5 + ["lost", "detached", "no_grad", "part", "recomputed"])
        with torch.set_grad_enabled(torch.is_grad_enabled() and use != "no_grad"):
            run = {"part": part.linear, "recomputed": lambda x: _recomputed(part, x, False)}
            y = run.get(use, part.once)(x)
        if use != "lost":
            x = x + torch.tanh(y.detach() if use == "detached" else y)
    return x


def _with_its_slope(part: Branches, x: Tensor) -> Tensor:
    """A gradient inside the forward, as forces of a potential."""
    grows = torch.is_grad_enabled()
    inside = [each.way for each in part.inner.modules() if isinstance(each, Branches)]
    if torch.is_inference_mode_enabled() or "reentrant" in inside:
        return x + part.once(x)
    with torch.enable_grad():
        at = x if x.requires_grad else x.detach().requires_grad_()
        y = part.once(at)
        if not y.requires_grad:
            return x + y
        (slope,) = torch.autograd.grad(y.sum(), at, create_graph=grows, allow_unused=True)
    y = x + (y if grows else y.detach())
    return y if slope is None else y + 0.1 * slope


WAYS: dict[str, Callable[[Branches, Tensor], Tensor]] = {
    "plain": Branches.once,
    "residual": lambda part, x: x + part.once(x),
    "sometimes": lambda part, x: x + part.once(x) if Branches.uses_all else x * 2,
    "either order": _in_either_order,
    "twice": lambda part, x: part.once(part.once(x) * 0.5),
    "recomputed": functools.partial(_recomputed, reentrant=False),
    "reentrant": functools.partial(_recomputed, reentrant=True),
    "keyword": lambda part, x: x + part.once(x=x),
    # What another unit returned, or the batch.
    "passes": lambda part, x: x + part.once(x) if Branches.uses_all else x,
    "writes": _writes,
    "without gradients": _without_gradients,
    "hooked": _hooked,
    "slope": _with_its_slope,
    "lost": lambda part, x: x if part.once(x) is x else part.once(x),
}
"""Also "entered", which ranks may do apart."""


class Tied(nn.Module):
    def __init__(self, rng: random.Random, depth: int) -> None:
        super().__init__()
        self.inner = _make(rng, depth - 1)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))


class Shapes(nn.Module):
    """Parameters of no, three and four dimensions, of one row, and one that is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Parameter(torch.ones(1))
        self.cube = nn.Parameter(torch.randn(3, WIDTH, 2) / 3)
        self.transposed = nn.Parameter(torch.randn(WIDTH, 6).t() / 3)
        self.conv = nn.Conv2d(1, 2, (1, 3), padding=(0, 1))
        self.rows = nn.Embedding(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("bw,cwd->bcd", x, self.cube).flatten(1) @ self.transposed
        y = self.conv(torch.tanh(y)[:, None, None]).sum(dim=(1, 2))
        return y * self.single + self.rows(torch.arange(len(x)) % 5)


def _make(rng: random.Random, depth: int) -> nn.Module:
    if depth <= 0:
        return nn.Linear(WIDTH, WIDTH) if rng.random() < 0.8 else Shapes()
    kind = rng.random()
    if kind < 0.6:
        return Branches(rng, depth)
    if kind < 0.75:
        return Tied(rng, depth)
    return nn.Sequential(*(_make(rng, depth - 1) for _ in range(rng.randint(1, 3))))


def _hook(rng: random.Random, model: nn.Module) -> None:
    """Hooks on some modules, if none writes into what another one returned."""
    if any(getattr(part, "way", None) == "writes" for part in model.modules()):
        return
    for part in (part for part in model.modules() if rng.random() < 0.1):
        if rng.random() < 0.5:
            part.register_forward_hook(_scale)
        else:
            part.register_full_backward_hook(_halve)


def _scale(part: nn.Module, given: Any, output: Tensor) -> Tensor:
    return 0.9 * output


def _halve(part: nn.Module, of_inputs: Any, of_outputs: Any) -> Any:
    return tuple(None if each is None else 0.5 * each for each in of_inputs)


def _know(model: nn.Module, given: tuple[Tensor]) -> None:
    Branches.batch = str(given[0].detach().sum().item())


def random_model(seed: int, dtype: torch.dtype, is_entered: bool = False) -> nn.Sequential:
    """`is_entered`: some of its `Branches` only some ranks enter, between two layers of all."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(*(_make(rng, rng.randint(1, 2)) for _ in range(rng.randint(1, 3))))
    if rng.random() < 0.2:
        model.append(model[0])  # one module under two names
    linears = [part for part in model.modules() if isinstance(part, nn.Linear)]
    square = [part for part in linears if part.weight.shape == (WIDTH, WIDTH)]
    if rng.random() < 0.2 and len(square) > 1:
        one, other = rng.sample(square, 2)
        one.weight = other.weight
    if is_entered:
        model.insert(0, nn.Linear(WIDTH, WIDTH))
        model.append(Branches(rng, 2))
        model.register_forward_pre_hook(_know)
        for part in (part for part in model[:-1].modules() if isinstance(part, Branches)):
            part.way = "entered" if rng.random() < 0.5 else part.way
            if part.way == "either order":  # What ranks enter comes at one place in each pass.
                part.way = "residual"
        model[-1].way = "entered"
        model.append(nn.Linear(WIDTH, WIDTH))
    for part in model.modules():
        ways = [getattr(inner, "way", "") for inner in part.modules()]
        for inner in part.modules() if ways[0] in ("recomputed", "entered") else ():
            if getattr(inner, "way", "") == "slope":
                inner.way = "hooked"  # See migrating.md.
        if ways[0] == "slope" and "entered" in ways:  # See optional_modules.md.
            part.way = "hooked"
    if seed % 2:
        _hook(rng, model)
        for part in linears if rng.random() < 0.3 else ():
            if rng.random() < 0.3:
                nn.utils.parametrizations.weight_norm(part)
    model.to(dtype)
    parameters = list(model.parameters())
    if rng.random() < 0.3:
        for parameter in rng.sample(parameters[1:], len(parameters) // 4):
            parameter.requires_grad_(False)
    for parameter in parameters:  # Dense, as the engine lays them out.
        parameter.data = parameter.detach().clone(memory_format=torch.contiguous_format)
    return model


def on_meta(twin: nn.Module) -> nn.Module:
    """A copy without values, of which the same parameters are tied."""
    module = copy.deepcopy(twin)
    made: dict[Any, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if parameter not in made:
                made[parameter] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
            part.register_parameter(name, made[parameter])
        for name, buffer in list(part.named_buffers(recurse=False)):
            part.register_buffer(name, buffer.to("meta"))
    return module
