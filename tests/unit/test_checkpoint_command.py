"""python -m layerzero.checkpoint: inspect and verify, on checkpoints good and bad."""

import json
import random
import runpy
import shutil
import sys
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from layerzero.checkpoint import save
from layerzero.checkpoint.__main__ import main
from tests.harness.models import WIDTH, TiedAcrossUnits
from tests.harness.ranks import run_ranks
from tests.harness.saved_models import build, train


class Tied(TiedAcrossUnits):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(3))


def _save_twice(root: Path) -> None:
    model, optimizer = build(Tied)
    for step in (4, 8):
        train(model, optimizer, 1)
        extra = {"random": torch.get_rng_state(), "rank": dist.get_rank()}
        save(root, model, optimizer, step=step, extra=extra, max_file_size="300B")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("written") / "run"
    run_ranks(2, _save_twice, root)
    return root


@pytest.fixture
def latest(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "run") / "step-00000008"


def test_inspect_tells_what_is_there(latest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(latest.parent)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["path"], found["step"], found["world_size"]) == (str(latest), 8, 2)
    assert found["files"].keys() == {p.name for p in latest.iterdir()} - {"checkpoint.json"}
    assert found["tensors"]["model"]["blocks.1.up.weight"] == f"F32 [7, {WIDTH}]"
    assert found["tensors"]["model"]["count"] == "I64 []"
    assert "blocks.1.up.weight/exp_avg_sq" in found["tensors"]["optimizer"]
    assert found["aliases"] == {"blocks.2.up.weight": "blocks.0.up.weight"}
    assert found["optimizer_groups"][0]["options"]["weight_decay"] == 0.01
    assert [each["rank"] for each in found["extras"]] == [0, 1]
    assert len(found["extras"][0]["random"]["$tensor"][2]) == 300, "long texts are cut"


def _damaged(latest: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(["verify", str(latest)]) == 1
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if "DAMAGED" in line]


def test_every_flipped_bit_is_found_and_named(
    latest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file after the other: the damages add up, and all are reported."""
    assert main(["verify", str(latest.parent)]) == 0
    files = sorted(path for path in latest.iterdir() if path.name != "checkpoint.json")
    assert capsys.readouterr().out.count("  OK       ") == len(files) + 1
    for name, record in json.loads((latest / "checkpoint.json").read_text())["files"].items():
        assert zlib.crc32((latest / name).read_bytes()) == record["crc32"], "for any program"
    generator, expected = random.Random(0), []
    for path in files:
        damaged = bytearray(path.read_bytes())
        damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        expected.append(f"  DAMAGED  {path}: damaged")
    found = _damaged(latest, capsys)
    assert all(line.startswith(text) for line, text in zip(found, expected, strict=True))
    assert 5 < len(files) > sum(text.endswith(".json: damaged") for text in expected)
    cut = files[0]
    cut.write_bytes(cut.read_bytes()[:-1])
    size = cut.stat().st_size
    text = "".join(_damaged(latest, capsys))
    assert f"{cut}: damaged: it has {size} bytes, but {size + 1} were written" in text


def test_nothing_there_is_one_line(
    latest: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (latest / "checkpoint.json").write_text("{}")
    nowhere = latest.parent / "nowhere"
    for path, text in ((nowhere, "no such folder"), (latest, "checkpoint.json: damaged")):
        for command in ("inspect", "verify"):
            assert main([command, str(path)]) == 1
            error = capsys.readouterr().err
            assert error.startswith("python -m layerzero.checkpoint: error: ") and text in error
            assert error.count("\n") == 1
    monkeypatch.delitem(sys.modules, "layerzero.checkpoint.__main__")
    monkeypatch.setattr(sys, "argv", ["layerzero.checkpoint", "verify", str(nowhere)])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("layerzero.checkpoint", run_name="__main__", alter_sys=True)
    assert stop.value.code == 1
