"""Ceilings that only fall: lines by folder, files that an import loads, what is replaced in torch.

Raising a number, or adding a name to a set, needs a decision record in the same commit.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from tests.unit.test_imports import LAYERS

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "layerzero"

LINES = {
    "": 37_401,
    "flat": 2_233,
    "step": 3_598,
    "comm": 1_375,
    "watch": 865,
    "build": 1_729,
    "ops": 357,
    "guards": 600,
}
"""Lines of Python in the package and in its folders, the folders inside them included."""
ENGINE = 10_857
"""Lines of the engine: the files of the top level, and the folders above except the guards."""
TOUR = 16, 4_087
"""Files in README's tour of a training step, and their lines."""
STEP = 24, 5_234
"""Files that a plain step enters once its orders are recorded, and their lines."""
LOADED_FILES = 71
"""Files of the package that importing `ZeRO3` loads."""
WALKS = {"Sequential": (36, 17, 1), "Unit": (17, 7, 0)}
"""Functions that are given the module while it is wrapped, and a unit in a step; their files; and
how many of these calls lead to a room above the caller's, in the order of test_imports.py."""
REPLACED = {
    # docs/internals/decisions/0018-optimizers-are-recognised-by-their-parameters.md
    "torch.optim.Optimizer.__setstate__",
    "torch.optim.Optimizer.add_param_group",
    # docs/internals/decisions/0019-torch-gathers-our-shards.md
    "torch.distributed._state_dict_utils._gather_state_dict",
    "torch.distributed.checkpoint.state_dict._gather_state_dict",
    # docs/internals/decisions/0024-torchs-gradient-norm-is-the-global-one.md
    "torch.nn.utils.clip_grad._get_total_norm",
    "torch.nn.utils.get_total_norm",
}
"""What a process finds changed in torch and Python once it has built and trained a model."""

_PROGRAM = """
import importlib, json, os, signal, sys, threading
import torch, torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

UNNEEDED = {"layerzero.checkpoint", "layerzero.wrapping.fsdp_arguments"}
OWNERS = '''
sys threading signal builtins
torch torch.autograd torch.linalg torch.nn.functional torch.nn.init torch.utils.checkpoint
torch.nn.utils torch.nn.utils.clip_grad torch.nn.parallel torch.func torch.jit torch.random
torch.distributed torch.distributed.distributed_c10d torch.distributed._state_dict_utils
torch.distributed.checkpoint.state_dict torch.optim.optimizer torch.amp.grad_scaler
torch.Tensor torch.nn.Module torch.nn.Parameter torch.optim.Optimizer torch.optim.AdamW
torch.UntypedStorage torch.amp.GradScaler torch.distributed.ProcessGroup
torch.nn.parallel.DistributedDataParallel torch.optim.lr_scheduler.LRScheduler
'''.split()

def owner_of(name):
    try:
        return importlib.import_module(name)
    except ImportError:
        module, _, attribute = name.rpartition(".")
        return getattr(owner_of(module), attribute)

def look():
    found = {}
    for owner in OWNERS:
        for name, value in list(vars(owner_of(owner)).items()):
            if callable(value) or isinstance(value, (staticmethod, classmethod, property)):
                found[f"{owner}.{name}"] = value
    for number in (signal.SIGINT, signal.SIGTERM):
        found[f"handler of {number}"] = signal.getsignal(number)
    return found

dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
plain = nn.Linear(2, 2)  # What torch itself loads at a first step is there before.
plain(torch.ones(1, 2)).sum().backward()
torch.optim.AdamW(plain.parameters()).step()
before, modules = look(), set(sys.modules)
from layerzero import ZeRO3
loaded = [name for name in sys.modules if name.split(".")[0] == "layerzero"]
root, entered, walks = os.path.dirname(sys.modules["layerzero"].__file__) + os.sep, set(), {}
def enter(frame, event, _):
    code, caller = frame.f_code, frame.f_back.f_code.co_filename
    if code.co_filename.startswith(root):
        entered.add(name := os.path.relpath(code.co_filename, root))
        given = code.co_varnames[:code.co_argcount + code.co_kwonlyargcount]
        if any(frame.f_locals[each] is walked for each in given if each != "self"):
            stay = (os.path.relpath(caller, root), name, code.co_name)
            walks.setdefault(type(walked).__name__, []).append(stay)
walked = module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4))
sys.settrace(enter)
model = ZeRO3(module, auto_wrap_policy={nn.Linear})
sys.settrace(None)
entered, walked = set(), model[1]._layerzero_unit
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    sys.settrace(enter if step == 3 else None)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
sys.settrace(None)
threads = [thread.name for thread in threading.enumerate()]
classes = [type(parameter).__name__ for parameter in model.parameters()]
state = type(optimizer.state_dict()["state"][0]["exp_avg"]).__name__
del model, module, optimizer
after = look()
changed = [name for name in before if after.get(name) is not before[name]]
print(json.dumps({"changed": changed, "threads": threads, "classes": classes,
                  "looked at": len(before), "loaded": len(loaded), "entered": sorted(entered),
                  "walks": walks,
                  "state": state, "unneeded": [*UNNEEDED & sys.modules.keys()]}))
"""


@pytest.fixture(scope="module")
def found() -> dict:
    """What a process found that built, trained and deleted a model."""
    command = [sys.executable, "-W", "ignore", "-c", _PROGRAM]
    run = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_only_what_decisions_allow_is_replaced_in_torch_and_python(found: dict) -> None:
    assert found["looked at"] > 1000
    # A module's function is found under each name that torch gives the module.
    assert set(found["changed"]) == REPLACED


def test_a_plain_loop_runs_one_thread_and_changes_no_class(found: dict) -> None:
    assert found["threads"] == ["MainThread", "layerzero-watchdog"]
    assert set(found["classes"]) == {"Parameter"}


def test_optimizer_states_are_shards_for_torch_whatever_was_imported(found: dict) -> None:
    assert found["state"] == "ParameterShard" and not found["unneeded"]


def test_an_import_loads_no_more_files(found: dict) -> None:
    assert found["loaded"] <= LOADED_FILES


def test_a_plain_step_enters_no_more_files_and_lines(found: dict) -> None:
    entered = found["entered"]
    lines = sum((PACKAGE / name).read_bytes().count(b"\n") for name in entered)
    assert "step/backward.py" in entered, "autograd runs it in this thread"
    assert len(entered) <= STEP[0] and lines <= STEP[1], f"{lines} lines in {entered}"
    names = {name.removesuffix(".py").removesuffix("/__init__") for name in entered}
    assert names <= {*chain(*_tour())}, "README names each"


@pytest.mark.parametrize("what", WALKS)
def test_an_object_passes_through_no_more_functions(found: dict, what: str) -> None:
    def floor(file: str) -> int:
        room = Path(file).parts[0].removesuffix(".py")
        return LAYERS.index(room) if room in LAYERS else len(LAYERS)  # The program is above all.

    stays = {tuple(stay) for stay in found["walks"][what]}
    functions = {(file, name) for _, file, name in stays}
    climbs = [stay for stay in stays if floor(stay[1]) > floor(stay[0])]
    counted = len(functions), len({file for file, _ in functions}), len(climbs)
    pairs = zip(counted, WALKS[what], strict=True)
    assert all(have <= most for have, most in pairs) and functions, (counted, functions, climbs)


@pytest.mark.parametrize("folder", LINES, ids=lambda folder: folder or "all")
def test_a_folder_has_no_more_lines(folder: str) -> None:
    files = (PACKAGE / folder).rglob("*.py")
    lines = sum(path.read_bytes().count(b"\n") for path in files)
    assert lines <= LINES[folder], f"{lines} lines in {folder or 'the package'}"


def test_the_engine_has_no_more_lines() -> None:
    rooms = [PACKAGE / folder for folder in LINES if folder not in ("", "guards")]
    files = chain(PACKAGE.glob("*.py"), *(room.rglob("*.py") for room in rooms))
    lines = sum(path.read_bytes().count(b"\n") for path in files)
    assert lines <= ENGINE


def _tour() -> list[list[str]]:
    """Files that README's tour of a training step lists, and those that it names next to them."""
    tour = (REPOSITORY / "README.md").read_text().partition("## Tour of the code")[2]
    parts = tour.partition("```")[0].split("Next to them")
    return [re.findall(r"`([a-z_]+(?:/\w+)?)`", part) for part in parts]


def test_the_tour_of_a_step_has_no_more_files_and_lines() -> None:
    tour = (REPOSITORY / "README.md").read_text()
    files, _ = _tour()
    lines = sum((PACKAGE / f"{name}.py").read_bytes().count(b"\n") for name in files)
    assert f"These {len(files)} files" in tour
    assert len(files) <= TOUR[0] and lines <= TOUR[1]
