"""python -m layerzero.plan plans the model that a transformers config names, whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from layerzero.memory_plan.command import main

pytestmark = pytest.mark.slow

_SMALL = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)


def _config(name: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    """Made only in the test: transformers takes seconds to import."""
    return name, fields


def _plan(config: tuple[str, dict[str, Any]], folder: Path, *more: str) -> int:
    name, fields = config
    getattr(pytest.importorskip("transformers"), name)(**fields).save_pretrained(folder)
    return main(["--model", str(folder), "--ranks", "4", *more])


@pytest.mark.parametrize(
    ("config", "said"),
    [
        # As long as its positions allow: 2048 tokens would be too many for its table.
        (
            _config("BertConfig", **_SMALL, architectures=["BertForMaskedLM"]),
            "BertForMaskedLM, 1.0 M parameters; input_ids [1, 512], labels [1, 512]",
        ),
        (
            _config(
                "T5Config",
                d_model=32,
                num_layers=1,
                d_ff=64,
                decoder_start_token_id=0,
                architectures=["T5ForConditionalGeneration"],
            ),
            "T5ForConditionalGeneration, ",
        ),
    ],
    ids=["masked", "encoder and decoder"],
)
def test_the_model_that_the_config_names_is_planned(
    config: tuple[str, dict[str, Any]],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _plan(config, tmp_path) == 0
    out = capsys.readouterr().out
    assert out.startswith(said) and "peak: " in out


def test_a_length_that_is_given_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _config("BertConfig", **_SMALL, architectures=["BertForSequenceClassification"])
    assert _plan(config, tmp_path, "--length", "64", "--batch-size", "3") == 0
    assert "input_ids [3, 64], labels [3]" in capsys.readouterr().out
    assert _plan(config, tmp_path, "--length", "513") == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("python -m layerzero.plan: ")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (_config("BertConfig", architectures=["NoSuchModel"]), "(architectures) is NoSuchModel"),
        (
            _config("Wav2Vec2Config", **_SMALL, architectures=["Wav2Vec2ForCTC"]),
            "no batch is known for Wav2Vec2ForCTC, which takes 'input_values'; pass package.module",
        ),
        # Some models ask their config for what a config need not have.
        (
            _config(
                "T5Config", d_model=32, num_layers=1, architectures=["T5ForConditionalGeneration"]
            ),
            "'decoder_start_token_id'",
        ),
    ],
    ids=["class", "batch", "model"],
)
def test_what_cannot_be_planned_is_refused(
    config: tuple[str, dict[str, Any]],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _plan(config, tmp_path) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("python -m layerzero.plan: --model") and said in last
