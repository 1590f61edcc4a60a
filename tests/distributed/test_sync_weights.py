"""examples/sync_weights.py and delta_folder.py: a consumer has the weights of ranks that train."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch.multiprocessing

from tests.harness import ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = ["--steps", "4", "--layers", "1", "--width", "64", "--seq", "16", "--tokens", "2"]


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    for module in (multiprocessing, torch.multiprocessing):
        # Their processes are forked from the server, which has loaded torch.
        monkeypatch.setattr(module, "get_context", lambda _: ranks.context)


def test_a_reader_of_the_folder_ends_with_the_bits_of_the_trainer(
    examples: None, capsys: pytest.CaptureFixture[str]
) -> None:
    import delta_folder

    with ranks.server_finds_the_repository():
        delta_folder.main(["--steps", "2"])
    assert "the reader has the bits of the trainer's weights" in capsys.readouterr().out


def test_the_consumer_ends_with_the_bits_of_the_trainer_and_a_picture(
    tmp_path: Path, examples: None
) -> None:
    import sync_weights

    picture = tmp_path / "deep" / "picture.png"
    with ranks.server_finds_the_repository():
        found = sync_weights.main([*SMALL, "--picture", str(picture)])
    assert found["equal"] and found["texts"] >= 1 and len(found["rounds"]) == 4
    for each in found["rounds"]:
        assert 0 < each["bytes"] < 0.25 * each["full_bytes"]
    assert picture.read_bytes()[:4] == b"\x89PNG"
