"""The model and the batch that a transformers config of a text model describes, without memory."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch import Tensor, nn

_DEFAULT_LENGTH = 2048
_NAMES_OF_LENGTH = ("max_target_positions", "max_position_embeddings", "n_positions")


class UnknownModel(ValueError):
    """There is no such config, or no batch is known for its model."""


def model_of(path: str) -> nn.Module:
    """The model of a config (a folder, a config.json or a name) on the meta device, for training.

    Its class is the first of the config's `architectures`.

    Raises:
        ImportError: transformers is not installed.
        UnknownModel: there is no such config, or no such class.
    """
    transformers = importlib.import_module("transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(path)
        name, *_ = config.architectures or [None]
        if not hasattr(transformers, str(name)):
            raise UnknownModel(
                f"its class (architectures) is {name}, which transformers "
                f"{transformers.__version__} does not have"
            )
        with torch.device("meta"):
            model: nn.Module = getattr(transformers, name)(config)
    except (OSError, ValueError) as error:
        raise UnknownModel(str(error).splitlines()[0]) from None
    return model.train()


def batch_of(model: Any, batch_size: int, length: int | None) -> dict[str, Any]:
    """Keyword arguments of a training step, on the meta device; with labels where the forward takes
    some.

    Args:
        batch_size: sequences.
        length: tokens of a sequence; None: 2048, or as many as the model has positions for.

    Raises:
        UnknownModel: its main input is no text.
    """
    config, takes = model.config, inspect.signature(model.forward).parameters
    if model.main_input_name != "input_ids":
        raise UnknownModel(
            f"no batch is known for {type(model).__name__}, which takes "
            f"{model.main_input_name!r}; pass package.module:callable that returns (module, batch)"
        )
    if length is None:
        text = config.get_text_config()
        known = (getattr(text, name, None) for name in _NAMES_OF_LENGTH)
        length = min([_DEFAULT_LENGTH, *filter(None, known)])
    batch: dict[str, Any] = {"input_ids": _integers(batch_size, length)}
    if "labels" in takes:
        is_of_sequences = type(model).__name__.endswith("SequenceClassification")
        batch["labels"] = _integers(*(batch_size,) if is_of_sequences else (batch_size, length))
    elif config.is_encoder_decoder:
        batch["decoder_input_ids"] = batch["input_ids"]
    if "use_cache" in takes:
        batch["use_cache"] = False
    return batch


def _integers(*sizes: int) -> Tensor:
    return torch.empty(sizes, dtype=torch.int64, device="meta")
