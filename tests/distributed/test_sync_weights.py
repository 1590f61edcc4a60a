"""examples/sync_weights.py: a consumer generates with the weights of two ranks that train."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "sync_weights.py"
SMALL = ["--steps", "4", "--layers", "1", "--width", "64", "--seq", "16", "--tokens", "2"]
PROGRAM = """
import json, sys
import sync_weights
if __name__ == "__main__":
    found = sync_weights.main(sys.argv[1:])
    print(json.dumps({"texts": found["texts"], "equal": found["equal"], "rounds": found["rounds"]}))
"""


@pytest.mark.slow  # Four processes load torch.
def test_the_consumer_ends_with_the_bits_of_the_trainer_and_a_picture(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    picture = tmp_path / "deep" / "picture.png"
    done = subprocess.run(
        [sys.executable, str(program), *SMALL, "--picture", str(picture)],
        capture_output=True,
        text=True,
        timeout=120,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(EXAMPLE.parent), str(EXAMPLE.parents[1]), os.environ.get("PYTHONPATH", "")]
            ),
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["equal"] and found["texts"] >= 1 and len(found["rounds"]) == 4
    for each in found["rounds"]:
        assert 0 < each["bytes"] < 0.25 * each["full_bytes"]
    assert picture.read_bytes()[:4] == b"\x89PNG"
