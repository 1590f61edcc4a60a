"""python -m layerzero.checkpoint: inspect and verify, on checkpoints good and bad."""

import json
import random
import resource
import runpy
import shutil
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from layerzero import ZeRO3
from layerzero.checkpoint import save
from layerzero.checkpoint.__main__ import main
from layerzero.checkpoint.format.safetensors_file import make_head
from tests.harness.models import WIDTH, Block
from tests.harness.ranks import run_ranks

VOCABULARY = 40


class Tied(nn.Module):
    """A tied pair, a unit, an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.block = Block()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.embed(x)))


def _save_twice(root: Path) -> dict[str, Tensor]:
    model = ZeRO3(Tied(), auto_wrap_policy={Block})
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for step in (4, 8):
        model(torch.arange(6)).square().mean().backward()
        optimizer.step()
        scheduler.step()
        extra = {"seen": 10 * step, "random": torch.get_rng_state(), "rank": dist.get_rank()}
        save(
            root, model, optimizer, step=step, scheduler=scheduler, extra=extra, max_file_size="1KB"
        )
    with model.summon_full_params():
        return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A folder of checkpoints that two ranks wrote, and the weights of the last."""
    root = tmp_path_factory.mktemp("written") / "run"
    return root, run_ranks(2, _save_twice, root)[0]


@pytest.fixture
def root(written: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(written[0], tmp_path / "run")


@pytest.fixture
def latest(root: Path) -> Path:
    return root / "step-00000008"


@pytest.fixture
def weights(written: tuple[Path, dict[str, Tensor]]) -> dict[str, Tensor]:
    return {**written[1], "count": torch.tensor(3)}


def _description(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    assert main(["inspect", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def _fails(capsys: pytest.CaptureFixture[str], status: int, *arguments: object) -> str:
    """Run a command that must fail; returns its one line on stderr."""
    assert main([*map(str, arguments)]) == status
    error = capsys.readouterr().err
    assert error.startswith("python -m layerzero.checkpoint: error: ")
    assert error.count("\n") == 1
    return error


def test_inspect_tells_what_is_there(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / ".writing-step-00000012").mkdir()
    (root / ".writing-step-00000012" / "model.safetensors").write_bytes(bytes(100))
    found = _description(capsys, root)
    assert [(each["step"], each["latest"]) for each in found["checkpoints"]] == [
        (4, False),
        (8, True),
    ]
    on_disk = sum(path.stat().st_size for path in (root / "step-00000008").iterdir())
    assert found["checkpoints"][1]["nbytes"] == on_disk
    assert found["leftovers"] == [{"name": ".writing-step-00000012", "nbytes": 100}]
    checkpoint = found["checkpoint"]
    assert (checkpoint["step"], checkpoint["world_size"]) == (8, 2)
    elements = sum(p.numel() for p in Tied().parameters())
    assert checkpoint["model"] == {
        "F32": {"tensors": 5, "elements": elements, "nbytes": 4 * elements},
        "I64": {"tensors": 1, "elements": 1, "nbytes": 8},
    }
    assert checkpoint["optimizer"]["F32"]["elements"] == 2 * elements + 5
    (group,) = checkpoint["optimizer_groups"]
    assert group["params"] == 5 and group["options"]["weight_decay"] == 0.01
    assert checkpoint["scheduler"]["last_epoch"] == 2
    assert [each["rank"] for each in checkpoint["extra"]] == [0, 1]
    assert checkpoint["aliases"] == {"head.weight": "embed.weight"}
    assert "tensors" not in checkpoint

    state = checkpoint["extra"][0]["random"]
    assert len(state["$tensor"][2]) > 5000
    assert main(["inspect", str(root), "--tensors"]) == 0
    short = json.loads(capsys.readouterr().out)
    assert len(short["checkpoint"]["extra"][0]["random"]["$tensor"][2]) == 300
    names = {each["name"] for each in short["checkpoint"].pop("tensors")}
    assert {"block.up.weight", "block.up.weight/exp_avg_sq"} <= names
    short["checkpoint"].pop("extra"), checkpoint.pop("extra")
    assert short == found, "all else in full"


def test_inspect_lists_each_tensor_where_it_is(
    latest: Path, weights: dict[str, Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    found = _description(capsys, latest, "--tensors")
    assert "checkpoints" not in found
    rows = {each["name"]: each for each in found["checkpoint"]["tensors"]}
    assert rows["block.up.weight"]["shape"] == [7, WIDTH]
    for name in set(weights) - {"head.weight"}:
        row = rows[name]
        data = (latest / row["file"]).read_bytes()[row["offset"] :][: row["nbytes"]]
        assert data == weights[name].numpy().tobytes()
        assert zlib.crc32(data) == row["crc32"]
    manifest = json.loads((latest / "checkpoint.json").read_text())
    for name, record in manifest["files"].items():  # as any program can tell
        assert zlib.crc32((latest / name).read_bytes()) == record["crc32"]


def test_a_damaged_latest_does_not_hide_the_others(
    root: Path, latest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (latest / "checkpoint.json").write_text("{}")
    assert main(["inspect", str(root)]) == 1
    text = capsys.readouterr().out
    assert "step-00000004" in text
    assert text.count("checkpoint.json: damaged") == 2
    assert "checkpoint.json: damaged" in _fails(capsys, 1, "inspect", latest)


def test_verify_reads_every_checkpoint(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(root)]) == 0
    text = capsys.readouterr().out
    files = list((root / "step-00000008").iterdir())
    assert text.count("  OK       ") == len(files) > 6
    assert "step-00000004" not in text
    (root / "step-00000004" / "optimizer-00001-of-00003.safetensors").unlink()
    assert main(["verify", str(root)]) == 0
    capsys.readouterr()
    assert main(["verify", str(root), "--all"]) == 1
    text = capsys.readouterr().out
    assert "optimizer-00001-of-00003.safetensors: missing" in text
    assert "damaged: 1 of 8 files" in text
    assert text.count("  OK       ") == 2 * len(files) - 1


def _tensor_at(description: Any, file: str, offset: int) -> str | None:
    for each in description["checkpoint"]["tensors"]:
        if each["file"] == file and 0 <= offset - each["offset"] < each["nbytes"]:
            return str(each["name"])
    return None


def test_one_flipped_bit_anywhere_is_found_and_named(
    latest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    description = _description(capsys, latest, "--tensors")
    generator = random.Random(0)
    files = sorted(latest.iterdir())
    in_tensors = 0
    for number in range(64):
        path = files[number % len(files)]
        data = path.read_bytes()
        offset = generator.randrange(len(data))
        damaged = bytearray(data)
        damaged[offset] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        assert main(["verify", str(latest)]) == 1
        found = [line for line in capsys.readouterr().out.splitlines() if "DAMAGED" in line]
        assert len(found) == 1
        tensor = _tensor_at(description, path.name, offset)
        in_tensors += tensor is not None
        assert found[0].startswith(f"  DAMAGED  {path}: {f'{tensor}: ' if tensor else ''}damaged")
        path.write_bytes(data)
    assert 16 < in_tensors < 60
    assert main(["verify", str(latest)]) == 0


def test_all_damage_is_reported_not_only_the_first(
    latest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = _description(capsys, latest, "--tensors")["checkpoint"]["tensors"]
    for row in rows[1:4]:
        data = bytearray((latest / row["file"]).read_bytes())
        data[row["offset"]] ^= 1
        (latest / row["file"]).write_bytes(data)
    cut = latest / rows[-1]["file"]
    cut.write_bytes(cut.read_bytes()[:-1])
    assert main(["verify", str(latest)]) == 1
    text = capsys.readouterr().out
    assert all(f"{latest / row['file']}: {row['name']}: damaged" in text for row in rows[1:4])
    size = cut.stat().st_size
    assert f"{cut}: damaged: it has {size} bytes, but {size + 1} were written" in text
    assert "damaged: 2 of 8 files" in text


class Planted:
    """Its pickle, opened, makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_a_planted_pickle_is_reported_and_never_opened(
    latest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = tmp_path / "opened"
    torch.save(Planted(mark), latest / "pytorch_model.bin")
    assert main(["verify", str(latest)]) == 0
    assert "not part of the checkpoint, never opened: pytorch_model.bin" in capsys.readouterr().out
    assert main(["inspect", str(latest)]) == 0
    for planted in ("model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        torch.save(Planted(mark), latest / planted)
        assert main(["verify", str(latest)]) == 1
        assert f"{latest / planted}: damaged" in capsys.readouterr().out
        assert main(["inspect", str(latest)]) == 1
    torch.save(Planted(mark), tmp_path / "weights.pt")
    capsys.readouterr()
    assert "weights.pt" in _fails(capsys, 1, "inspect", tmp_path / "weights.pt")
    assert not mark.exists()
    torch.load(tmp_path / "weights.pt", weights_only=False)
    assert mark.exists()  # the trap works


def test_weights_from_elsewhere_are_read_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "foreign"
    folder.mkdir()
    save_file(
        {"a": torch.ones(3), "b": torch.ones(2, 2, dtype=torch.int8)}, folder / "x.safetensors"
    )
    for path in (folder, folder / "x.safetensors"):
        checkpoint = _description(capsys, path)["checkpoint"]
        assert [each["elements"] for each in checkpoint["model"].values()] == [3, 4]
        assert not checkpoint["checksums"]
        assert main(["verify", str(path)]) == 0
        assert "only sizes and headers can be checked" in capsys.readouterr().out
    data = (folder / "x.safetensors").read_bytes()
    (folder / "x.safetensors").write_bytes(data[:-1])
    assert main(["verify", str(folder)]) == 1
    assert "x.safetensors: damaged: its header describes" in capsys.readouterr().out
    (folder / "x.safetensors").write_bytes(data)
    index = {"weight_map": {"a": "x.safetensors", "c": "y.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert main(["verify", str(folder)]) == 1
    text = capsys.readouterr().out
    assert "OK       x.safetensors" in text
    assert "y.safetensors: missing" in text


def test_a_save_that_did_not_end_is_no_folder_of_weights(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its files are whole to look at: heads and full lengths come first, zeros where values go."""
    left = root / ".writing-step-00000012"
    shutil.copytree(root / "step-00000008", left)
    (left / "checkpoint.json").unlink()
    assert "has no checkpoint.json: its save or rem" in _fails(capsys, 1, "inspect", left)
    assert main(["verify", str(left)]) == 1
    assert "its save or removal" in capsys.readouterr().out


def test_nothing_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file.pt").touch()
    for command in ("inspect", "verify"):
        assert "no such folder" in _fails(capsys, 2, command, tmp_path / "nowhere")
        assert "found file.pt" in _fails(capsys, 2, command, tmp_path)


def test_all_wants_a_folder_of_checkpoints(
    latest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--all needs a folder of checkpoints" in _fails(capsys, 2, "verify", latest, "--all")
    (latest.parent / "latest").write_text("step-00000099")
    assert "names step-00000099" in _fails(capsys, 2, "verify", latest.parent)
    assert main(["verify", str(latest.parent), "--all"]) == 0  # needs no latest


def _peak_growth(paths: list[Path]) -> int:
    """Bytes by which the process grows with the last file, after those before."""

    def peak() -> int:
        nbytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return nbytes if sys.platform == "darwin" else nbytes * 1024

    before = 0
    for path in paths:
        before = peak()
        assert main(["verify", str(path)]) == 0
    return peak() - before


def test_memory_does_not_grow_with_a_tensor(tmp_path: Path) -> None:
    paths = []
    for numel in (10**7, 4 * 10**7):
        head, entries = make_head([("w", torch.float32, (numel,))], {"format": "pt"})
        paths.append(tmp_path / f"{numel}.safetensors")
        paths[-1].write_bytes(head)
        with paths[-1].open("r+b") as file:
            file.truncate(entries["w"].end)  # zeros that take no place on the disk
    (grown,) = run_ranks(1, _peak_growth, paths)
    # The first file, of 40 MB, has loaded what is loaded once. 120 MB more then need no more than
    # what the allocator keeps of a few chunks of 8 MB.
    assert grown < 30_000_000


def test_it_is_a_program(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "layerzero.checkpoint.__main__")
    monkeypatch.setattr(sys, "argv", ["layerzero.checkpoint", "verify", str(root)])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("layerzero.checkpoint", run_name="__main__", alter_sys=True)
    assert stop.value.code == 0
    assert "OK: 8 files" in capsys.readouterr().out
