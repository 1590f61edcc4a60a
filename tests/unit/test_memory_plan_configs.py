"""python -m layerzero.plan plans the model that a transformers config names, whole."""

import contextlib
import importlib
import importlib.util
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from layerzero.memory_plan.command import main
from tests.harness.ranks import KeptRanks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
    ),
]

BERT = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
T5 = dict(d_model=32, num_layers=1, d_ff=64)


def _plan(
    folder: Path, name: str, architecture: str, fields: dict[str, Any], *more: str
) -> tuple[int, str, str]:
    config = getattr(importlib.import_module("transformers"), name)
    config(**fields, architectures=[architecture]).save_pretrained(folder)
    said, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors):
        code = main(["--model", str(folder), "--ranks", "4", *more])
    assert code or "peak: " in said.getvalue()
    last = errors.getvalue().splitlines()[-1] if code else ""
    return code, said.getvalue().partition("\n")[0], last


@pytest.fixture
def plan(ranks: KeptRanks, tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """Exit status, first line of the table and last of the errors, from a process that has
    transformers."""
    return lambda *config: ranks(1, _plan, tmp_path, *config)[0]


def test_the_model_that_the_config_names_is_planned(plan: Callable) -> None:
    # As long as its positions allow: 2048 tokens would be too many for its table.
    code, said, _ = plan("BertConfig", "BertForMaskedLM", BERT)
    whole = "BertForMaskedLM, 1.0 M parameters; input_ids [1, 512], labels [1, 512]"
    assert code == 0 and said.startswith(whole)
    decoder = {**T5, "decoder_start_token_id": 0}
    code, said, _ = plan("T5Config", "T5ForConditionalGeneration", decoder)
    assert code == 0 and said.startswith("T5ForConditionalGeneration, ")


def test_a_length_that_is_given_is_taken(plan: Callable) -> None:
    model = ("BertConfig", "BertForSequenceClassification", BERT, "--length")
    code, said, _ = plan(*model, "64", "--batch-size", "3")
    assert code == 0 and "input_ids [3, 64], labels [3]" in said
    code, _, error = plan(*model, "513")
    assert code == 2 and error.startswith("python -m layerzero.plan: ")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (("BertConfig", "NoSuchModel", {}), "(architectures) is NoSuchModel"),
        (
            ("Wav2Vec2Config", "Wav2Vec2ForCTC", BERT),
            "no batch is known for Wav2Vec2ForCTC, which takes 'input_values'; pass package.module",
        ),
        # Some models ask their config for what a config need not have.
        (("T5Config", "T5ForConditionalGeneration", T5), "'decoder_start_token_id'"),
    ],
    ids=["class", "batch", "model"],
)
def test_what_cannot_be_planned_is_refused(config: Any, said: str, plan: Callable) -> None:
    code, _, error = plan(*config)
    assert code == 2 and error.startswith("python -m layerzero.plan: --model") and said in error
