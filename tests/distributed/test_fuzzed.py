"""Damaged checkpoints, and odd arguments, plans and YAML: the error of their kind or a right
result, soon, in little memory, and nothing changes. And what SECURITY.md promises: nothing from a
file is executed, no path leads out, modes are the user's, and nothing listens."""

import ast
import contextlib
import copy
import json
import logging
import os
import random
import re
import resource
import shutil
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import layerzero
from layerzero import (
    BackwardPrefetch,
    MixedPrecision,
    OffloadPolicy,
    ShardingPlan,
    ZeRO3,
    shard_with_plan,
)
from layerzero.checkpoint import CheckpointError, load, save
from layerzero.checkpoint.__main__ import verify
from layerzero.checkpoint.format.folder import resolve
from tests.harness.models import Parts
from tests.harness.ranks import on_ranks, run_ranks

NAMES = (
    "",
    ".",
    "..",
    "../../x.safetensors",
    "/etc/passwd",
    "a/b.safetensors",
    "\u202e\u0000",
    "é",
)


DEEP = {"@deep@": 100_000, "@less deep@": 900, "@hardly deep@": 60}
"""Stand for so many lists in one another, which Python's own functions cannot copy."""


def odd_value(rng: random.Random) -> Any:
    """What stands where something else is meant."""
    numbers = (-1, 0, 1, 7, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), 10**40)
    others: tuple[Any, ...] = (
        *(0.5, -0.0, 1e308, float("nan"), float("inf"), True, False, None),
        *(
            "x" * 5000,
            "F32",
            "BF16",
            "F99",
            "step-00000001",
            "checkpoint.json",
            "model.safetensors",
        ),
        *([], {}, [[]], {"a": 1}, [1, 2], [-1], [2**62, 2**62], [0, 2**63], ["a"], {"": {}}),
        *({"$tensor": ["F32", [2**40], ""]}, {"$array": ["<f8", [-1], "AAAA"]}, {"$array": "O"}),
        *({"$array": ["|O", [1], "AAAAAAAAAAA="]}, {"$set": [[1]]}, {"$nothing": 0}, {"$tuple": 3}),
        *({"$dict": [[[1], 2]]}, {"$float": "x"}, {"$bytes": "%"}, {"$dtype": "F99"}),
        *DEEP,
    )
    return copy.deepcopy(rng.choice(rng.choice((numbers, NAMES, others))))


def mutate_json(rng: random.Random, value: Any) -> Any:
    """A copy with one to three changes at random places: replaced, removed, added, swapped."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = _changed_once(rng, value)
    return value


def _changed_once(rng: random.Random, value: Any) -> Any:
    holder, key = _place_in(rng, value)
    if holder is None:
        return odd_value(rng)
    way = rng.randrange(6)
    if way == 0:
        del holder[key]
    elif way == 1 and isinstance(holder[key], int):
        holder[key] += rng.choice((-1, 1, 2**20, -holder[key] * 2))
    elif way == 2 and isinstance(holder, MutableMapping):
        holder[rng.choice((*NAMES, "new", *map(str, holder)))] = copy.deepcopy(holder[key])
    elif way == 3 and isinstance(holder, MutableSequence):
        holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
    elif way == 4 and isinstance(holder[key], (str, list)):
        holder[key] = holder[key][: rng.randrange(len(holder[key]) + 1)]
    else:
        holder[key] = odd_value(rng)
    return value


def _place_in(rng: random.Random, value: Any) -> tuple[Any, Any]:
    """A random container in the value and a key of it; (None, None): the value itself."""
    holder, key = None, None
    while isinstance(value, (dict, list)) and value and (holder is None or rng.random() < 0.8):
        holder = value
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        value = value[key]
    return holder, key


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Flipped, truncated, extended, or with a piece that is there twice."""
    way, place = rng.randrange(5), rng.randrange(len(data) + 1)
    if way == 0 and data:
        flipped = bytearray(data)
        flipped[min(place, len(data) - 1)] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    if way == 1:
        return data[:place]
    if way == 2:
        return data + rng.randbytes(rng.randrange(1, 100))
    if way == 3:
        return data[:place] + data[max(0, place - rng.randrange(1, 50)) :]
    return rng.randbytes(rng.randrange(0, 20)) + data[place:]


def mutate_head(rng: random.Random, path: Path) -> None:
    """Change the JSON head of a safetensors file, or the length before it."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    if rng.random() < 0.15:
        length = rng.choice((0, 7, length - 1, length + 1, 10**8, 2**63, 2**64 - 1))
        path.write_bytes(length.to_bytes(8, "little") + data[8:])
        return
    text = dump(mutate_json(rng, json.loads(data[8 : 8 + length])))
    text += b" " * max(0, length - len(text))
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def dump(value: Any) -> bytes:
    text = json.dumps(value, separators=(",", ":")).encode()
    for name, depth in DEEP.items():
        text = text.replace(json.dumps(name).encode(), b"[" * depth + b"]" * depth)
    return text


def replace_file(rng: random.Random, path: Path, elsewhere: Path) -> None:
    """Something else than a file with these contents: nothing, a link, a folder, a pipe."""
    ways: tuple[Callable[[], None], ...] = (
        lambda: None,
        path.mkdir,
        lambda: path.symlink_to(elsewhere),
        lambda: path.symlink_to("/dev/zero"),
        lambda: path.symlink_to(path.name),
        lambda: os.mkfifo(path),
        lambda: path.write_bytes(b""),
    )
    path.unlink()
    rng.choice(ways)()


LIMIT_S = 1.0
MOST_NBYTES = 64 << 20
"""By which the memory of a process may grow over all cases, each of which has a few kilobytes."""
_HANGS_S = 30.0
_LEAK = re.compile(r"rank \d+: (?!CheckpointError|DeltaError|OSError)[A-Z]\w*(Error|Exception)\b")
"""The name of an exception that nobody meant to raise, in a message."""


def outcome(
    attempt: Callable[[], Any], allowed: tuple[type[Exception], ...] = (CheckpointError,)
) -> tuple[bool, str | None]:
    """Whether `attempt` returned instead of raising one of `allowed`, and what is wrong or None."""
    begin, returned, problem = time.process_time(), False, None
    signal.signal(signal.SIGALRM, _hangs)
    signal.setitimer(signal.ITIMER_REAL, _HANGS_S)
    try:
        attempt()
        returned = True
    except allowed as error:
        leak = _LEAK.search(str(error))
        problem = f"a message names {leak[0]}: {error!s:.300}" if leak else None
    except Exception as error:
        problem = f"raised {type(error).__name__}: {error!s:.300}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    took = time.process_time() - begin
    return returned, problem or (f"took {took:.1f} s" if took > LIMIT_S else None)


def _hangs(*_: object) -> None:
    raise RuntimeError(f"it hangs for {_HANGS_S} s")


def peak_nbytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@contextlib.contextmanager
def limited_memory(problems: list[str], more_nbytes: int = 1 << 30) -> Iterator[None]:
    """Let allocations fail that would take this process's address space so far beyond today's; what
    it has grown by is a problem, if it is much."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    former, before = resource.getrlimit(resource.RLIMIT_AS), peak_nbytes()
    resource.setrlimit(resource.RLIMIT_AS, (now + more_nbytes, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, former)
    grown = peak_nbytes() - before
    if grown > MOST_NBYTES:
        problems.append(f"host memory grew by {grown} bytes")


FEW = 40
EXTRA = {
    "step": 3,
    "seen": (1, {2, 3}, b"bytes", float("nan")),
    "generator": torch.arange(5),
    3: None,
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 4)
        self.b = nn.Linear(4, 3)
        self.b.register_buffer("scale", torch.ones(3))
        self.state = {"seen": 1}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x))) * self.b.scale

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


class Trainer:
    """All that a load may change."""

    def __init__(self) -> None:
        self.model = ZeRO3(Model(), auto_wrap_policy={nn.Linear})
        self.optimizer = torch.optim.AdamW(
            [{"params": self.model.a.parameters()}, {"params": self.model.b.parameters()}], lr=0.1
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.model(torch.ones(2, 5)).sum().backward()
        self.optimizer.step()
        self.scheduler.step()

    def state(self) -> str:
        """Equal for equal states."""
        signature = self.model.step_signature(self.optimizer)
        buffers = [b.tolist() for b in self.model.buffers()]
        groups = self.optimizer.state_dict()["param_groups"]
        rest = self.scheduler.state_dict(), self.model.module.state
        return repr((signature, buffers, groups, *rest))


def damage(rng: random.Random, root: Path, elsewhere: Path) -> str:
    """Change one thing in a copy of a root of checkpoints; returns what, for messages."""
    folder = next(root.glob("step-*"))
    files = sorted(folder.iterdir())
    weights = [path for path in files if path.suffix == ".safetensors"]
    manifest = folder / "checkpoint.json"
    way = rng.choice(("bytes", "bytes", "head", "replaced", "latest"))
    if way == "bytes":
        path = rng.choice(files)
        path.write_bytes(mutate_bytes(rng, path.read_bytes()))
    elif way == "head":
        mutate_head(rng, rng.choice(weights))
    elif way == "replaced":
        replace_file(rng, rng.choice(files), elsewhere)
    else:
        text = rng.choice((*NAMES, "step-00000007", "step-../..", "step-" + "9" * 5000))
        (root / "latest").write_text(text, errors="surrogatepass")
    if rng.random() < 0.2 and not manifest.is_dir():
        manifest.unlink(missing_ok=True)  # Weights from another source.
        way += ", without a manifest"
    return way


def tree_of(root: Path) -> dict[str, tuple[int, int]]:
    found = ((path, path.lstat()) for path in sorted(root.rglob("*")))
    return {str(path): (status.st_size, status.st_mtime_ns) for path, status in found}


def check_case(seed: int, template: Path, root: Path, trainer: Trainer) -> str | None:
    """None, or what is wrong with the outcome."""
    rng = random.Random(seed)
    shutil.copytree(template, root)
    way = damage(rng, root, template / "latest")
    tree, begun = tree_of(root), trainer.state()
    arguments: dict[str, Any] = {"strict": rng.random() < 0.7}
    if rng.random() < 0.8:
        arguments["optimizer"] = trainer.optimizer
    if rng.random() < 0.8:
        arguments["scheduler"] = trainer.scheduler

    def verifies() -> None:
        for _, damage in verify(resolve(root)):
            if damage:
                raise CheckpointError(damage)

    _, problem = outcome(verifies)
    if problem is None:
        loaded, problem = outcome(lambda: load(root, trainer.model, **arguments))
        if loaded:  # Something harmless.
            load(template, trainer.model, trainer.optimizer, scheduler=trainer.scheduler)
        elif problem is None and trainer.state() != begun:
            problem = "a failed load changed something"
    if problem is None and tree_of(root) != tree:
        problem = "files were written"
    shutil.rmtree(root)
    return problem and f"case {seed} ({way}): {problem}"


def check_cases(seeds: range, template: Path, scratch: Path) -> list[str]:
    logging.getLogger("layerzero").setLevel(logging.CRITICAL)
    trainer = Trainer()
    save(template, trainer.model, trainer.optimizer, scheduler=trainer.scheduler, extra=EXTRA)
    problems: list[str] = []
    with limited_memory(problems):
        for seed in seeds:
            problem = check_case(seed, template, scratch / "case", trainer)
            if problem is not None:
                problems.append(problem)
                trainer = Trainer()
    return problems


def test_damaged_checkpoints_are_refused_and_change_nothing(
    tmp_path: Path, seeds_or: Callable[[int], range]
) -> None:
    (tmp_path / "scratch").mkdir()
    arguments = (seeds_or(FEW), tmp_path / "root", tmp_path / "scratch")
    (problems,) = run_ranks(1, check_cases, *arguments, timeout=3600.0)
    assert not problems, "\n".join(problems[:20])


FEW_ARGUMENTS = 25
ALLOWED = (ValueError, TypeError, NotImplementedError)
RIGHT: dict[str, tuple[Any, ...]] = {
    "auto_wrap_policy": (None, {nn.Linear}),
    "zero3_size": (None, 1),
    "outer": ("zero1", "replicate"),
    "mixed_precision": (None, MixedPrecision(param_dtype=torch.bfloat16)),
    "forward_prefetch": (True, False, 2),
    "backward_prefetch": (None, BackwardPrefetch.BACKWARD_PRE),
    "limit_all_gathers": (True, 2, "1MB"),
    "device": (None, "cpu"),
    "gradient_reduction": ("mean", "sum"),
    "timeout": (None, timedelta(minutes=1)),
    "param_init_fn": (None,),
    **dict.fromkeys(
        ("reshard_after_forward", "sync_module_states", "deterministic"), (True, False)
    ),
    **dict.fromkeys(("ignored_modules", "ignored_parameters", "optional_modules"), ((),)),
    "offload": (None, OffloadPolicy()),
    "accumulation": ("auto",),
    "optional_mean": ("all",),
}
PLAN: dict[str, Any] = {
    "apply_modules": {"inner.*": {"reshard_after_forward": True}, "outer": None},
    "defaults": {"forward_prefetch": 1, "limit_all_gathers": "1MB", "gradient_reduction": "mean"},
    "ignored_modules": [],
    "ignored_parameters": ["outer.bias"],
    "optional": [],
    "hook_modules": [],
    "param_dtype": "bf16",
    "reduce_dtype": "float32",
    "reshard_after_forward": True,
    "cpu_offload": False,
    "act_ckpt": "composable",
    "pregather": False,
    "num_to_forward_prefetch": 1,
}
TEXTS = (
    "!!python/object/apply:os.system ['true']",
    "&a [*a, *a]",
    "{a: 1, a: 2}",
    "\t- x",
    "- -\n -",
)


def wrapped() -> nn.Module:
    return Parts(inner=nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), outer=nn.Linear(3, 2))


def odd_argument(rng: random.Random) -> Any:
    others: tuple[Any, ...] = (
        *(object(), lambda: 3, torch.float32, torch.int8, torch.ones(2), nn.Linear(2, 2), b"x"),
        *(nn.Linear, timedelta(0), timedelta(days=-1), timedelta.max, [None], {None: None}, 1j),
        *(BackwardPrefetch, MixedPrecision, range(3), "bf16", "cuda:99", "meta", "1 XB", "-1MB"),
    )
    return rng.choice(others) if rng.random() < 0.5 else odd_value(rng)


def build(rng: random.Random, _: Path) -> Callable[[], Any]:
    names = rng.sample(sorted(RIGHT), rng.randrange(1, 6))
    arguments = {name: rng.choice(RIGHT[name]) for name in names}
    for name in rng.sample(names, min(len(names), rng.choice((1, 1, 2)))):
        arguments[name] = odd_argument(rng)
    if rng.random() < 0.1:
        arguments[rng.choice(("reshard_after", "mp_policy", "timeouts", "x" * 3000))] = 1
    return lambda: ZeRO3(wrapped(), **arguments)


def make_plan(rng: random.Random, _: Path) -> Callable[[], Any]:
    plan = mutate_json(rng, PLAN)
    return lambda: shard_with_plan(wrapped(), ShardingPlan.from_dict(plan))


def read_yaml(rng: random.Random, folder: Path) -> Callable[[], Any]:
    path = folder / "plan.yaml"
    text = dump(mutate_json(rng, PLAN))
    if rng.random() < 0.4:
        text = mutate_bytes(rng, text)
    elif rng.random() < 0.2:
        text = rng.choice(TEXTS).encode()
    path.write_bytes(text)
    return lambda: shard_with_plan(wrapped(), ShardingPlan.from_yaml(path))


def check_arguments(seeds: range, folder: Path) -> list[str]:
    problems: list[str] = []
    ZeRO3(wrapped())
    with limited_memory(problems):
        for seed in seeds:
            for make in (build, make_plan, read_yaml):
                rng = random.Random(seed)
                attempt = make(rng, folder)
                _, problem = outcome(attempt, ALLOWED)
                if problem is not None:
                    problems.append(f"{make.__name__} {seed}: {problem}")
    return problems


def test_odd_arguments_and_plans_are_refused(
    tmp_path: Path, seeds_or: Callable[[int], range]
) -> None:
    (problems,) = run_ranks(1, check_arguments, seeds_or(FEW_ARGUMENTS), tmp_path, timeout=7200.0)
    assert not problems, "\n".join(problems[:20])


PACKAGE = Path(layerzero.__file__).parent
FORBIDDEN_MODULES = {
    *("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"),
    *("subprocess", "pty", "runpy", "code", "codeop", "http", "socketserver", "xmlrpc", "urllib"),
}
FORBIDDEN_CALLS = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "os.chmod", "os.umask"),
    *("torch.save", "pickle.load", "pickle.loads", "numpy.load", "np.load", "yaml.unsafe_load"),
    *("socket.socket", "socket.create_server", "asyncio.start_server", "tempfile.mktemp"),
}
MAY_UNPICKLE = {
    "integrations/lightning/checkpoints.py": "torch.load",  # Lightning's own files.
}
# Between ranks of one job, which trust each other.
OBJECTS = {"uneven/joinable.py", "parallel/manager.py", "integrations/shared.py"}


def name_of(function: ast.expr) -> str:
    """Such as "np.load"; of an expression that is no name, only the attributes."""
    if isinstance(function, ast.Attribute):
        return f"{name_of(function.value)}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else ""


def test_nothing_from_a_file_is_executed() -> None:
    found = []
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                modules = [a.name for a in node.names]
                if isinstance(node, ast.ImportFrom):
                    modules = [node.module or ""]
                found += [(name, m) for m in modules if m.split(".")[0] in FORBIDDEN_MODULES]
            if not isinstance(node, ast.Call):
                continue
            call = name_of(node.func)
            last = call.rpartition(".")[2]
            if last.endswith(("_object", "_object_list")) and call.startswith("dist."):
                found += [] if name in OBJECTS else [(name, call)]
            elif call == "torch.load":
                assert name in MAY_UNPICKLE, f"{name} unpickles"
                assert any(k.arg == "weights_only" for k in node.keywords)
            elif call in FORBIDDEN_CALLS or any(k.arg == "shell" for k in node.keywords):
                found.append((name, call))
            elif call.endswith("import_module"):
                # The user names a model on the command line of `python -m layerzero.plan`, and a
                # plan in an argument of `ParallelManager`, which no file of ours sets.
                is_typed = name in ("memory_plan/command.py", "parallel/tp_plans.py")
                is_constant = isinstance(node.args[0], ast.Constant)
                # Public names are imported at their use; a table in the file names modules.
                is_of_table = name in ("__init__.py", "optim/__init__.py")
                assert is_typed or is_constant or is_of_table, f"{name}: imports what data names"
    assert not found


@on_ranks(1, fresh=True)
def test_files_have_the_users_umask_and_are_never_writable_for_all(tmp_path: Path) -> None:
    model = ZeRO3(nn.Sequential(nn.Linear(4, 4)))
    for mask in (0o000, 0o022, 0o077):
        os.umask(mask)
        new = tmp_path / f"{mask:o}"
        save(new / "root", model, torch.optim.AdamW(model.parameters()))
        written = [new, *new.rglob("*")]
        assert len(written) > 5
        for path in written:
            mode, most = stat.S_IMODE(path.stat().st_mode), 0o775 if path.is_dir() else 0o664
            assert mode == most & ~mask, f"{path}: {mode:o}"


@on_ranks(1)
def test_links_and_pipes_inside_a_checkpoint_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    model = ZeRO3(nn.Sequential(nn.Linear(4, 4)))
    folder = save(root, model).path
    elsewhere = shutil.copytree(folder, root.parent / "elsewhere")
    weights = next(folder.glob("*.safetensors"))
    for way in ("link", "absolute link", "pipe", "manifest"):
        path = folder / "checkpoint.json" if way == "manifest" else weights
        data = path.read_bytes()
        path.unlink()
        if way == "pipe":
            os.mkfifo(path)
        else:
            target = elsewhere / path.name
            is_relative = way == "link"
            path.symlink_to(os.path.relpath(target, folder) if is_relative else target)
        with pytest.raises(CheckpointError, match=r"symbolic link|no regular file"):
            load(root, model)
        path.unlink()
        path.write_bytes(data)
    load(root, model)


def listening() -> set[str]:
    """Local addresses on which this process listens, as the kernel lists them."""
    own = set()
    for each in Path("/proc/self/fd").iterdir():
        try:
            own.add(os.readlink(each))
        except OSError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.add(fields[1])
    return found


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="Linux lists sockets there")
@on_ranks(2, fresh=True)
def test_only_gloo_listens_and_on_its_own_address() -> None:
    before = listening()
    model = ZeRO3(nn.Sequential(nn.Linear(4, 4)), auto_wrap_policy={nn.Linear})
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert before, "gloo listens"
    addresses = {address.split(":")[0] for address in before | listening()}
    assert addresses == {socket.inet_aton("127.0.0.1")[::-1].hex().upper()}
