"""What SECURITY.md promises: nothing from a file is executed, no path leads out, modes are the
user's, and nothing listens."""

import ast
import os
import shutil
import socket
import stat
from pathlib import Path

import pytest
import torch
from torch import nn

import layerzero
from layerzero import ZeRO3
from layerzero.checkpoint import CheckpointError, load, save
from tests.harness.ranks import on_ranks

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
