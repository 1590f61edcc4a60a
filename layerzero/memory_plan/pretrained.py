"""The model and the batch that a transformers config describes, without memory."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch import Tensor, nn

_AUTO_CLASSES = (
    "AutoModelForImageTextToText",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForSeq2SeqLM",
    "AutoModelForCausalLM",
    "AutoModelForMaskedLM",
    "AutoModelForImageClassification",
    "AutoModelForSequenceClassification",
    "AutoModel",
)
"""Asked in turn where a config does not name its class. A class that is in several is a whole model
in the first: a decoder is also planned by itself if it is in AutoModelForCausalLM."""
_DEFAULT_LENGTH = 2048


class UnknownModel(ValueError):
    """There is no such config, or no batch is known for its model."""


def model_of(path: str) -> nn.Module:
    """The model of a config (a folder, a config.json or a name) on the meta device, for training.

    Its class is the first of the config's `architectures`, else what transformers has for it.

    Raises:
        ImportError: transformers is not installed.
        UnknownModel: there is no such config, or no such class.
    """
    transformers = importlib.import_module("transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model: nn.Module = _class_of(transformers, config)(config)
    except (OSError, ValueError) as error:
        raise UnknownModel(str(error).splitlines()[0]) from None
    return model.train()


def _class_of(transformers: Any, config: Any) -> Any:
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
        raise UnknownModel(
            f"its class is {name}, which transformers {transformers.__version__} does not have"
        )
    for name in _AUTO_CLASSES:
        found = getattr(transformers, name)._model_mapping.get(type(config), None)
        if found is not None:
            return found[0] if isinstance(found, tuple) else found
    raise UnknownModel(f"transformers has no model for {type(config).__name__}")


def batch_of(model: Any, batch_size: int, length: int | None) -> dict[str, Any]:
    """Keyword arguments of a training step, on the meta device.

    Of the inputs only the main one: a model that sees and reads gets text. With labels where the
    forward takes some.

    Args:
        batch_size: sequences, images or recordings.
        length: tokens of a sequence; None: 2048, or as many as the model has positions for.

    Raises:
        UnknownModel: no batch is known for this kind of input.
    """
    config, takes = model.config, inspect.signature(model.forward).parameters
    num_tokens = _num_tokens(config, length)
    text = _integers(batch_size, num_tokens)
    kind = model.main_input_name
    batch: dict[str, Any] = {}
    if kind == "input_ids":
        batch[kind] = text
    elif kind == "pixel_values" and hasattr(config, "image_size"):
        size = config.image_size
        sides = (size, size) if isinstance(size, int) else tuple(size)
        batch[kind] = torch.empty(batch_size, config.num_channels, *sides, device="meta")
    elif kind == "input_features" and hasattr(config, "num_mel_bins"):
        frames = 2 * config.max_source_positions
        batch[kind] = torch.empty(batch_size, config.num_mel_bins, frames, device="meta")
    else:
        raise UnknownModel(
            f"no batch is known for {type(model).__name__}, which takes {kind!r}; pass "
            "package.module:callable that returns (module, batch)"
        )
    if "labels" in takes:
        is_classifier = type(model).__name__.endswith("Classification")
        of_tokens = not is_classifier or "TokenClassification" in type(model).__name__
        batch["labels"] = text if of_tokens else _integers(batch_size)
    elif config.is_encoder_decoder:
        batch["decoder_input_ids"] = text
    if "use_cache" in takes:
        batch["use_cache"] = False
    return batch


def _num_tokens(config: Any, length: int | None) -> int:
    if length is not None:
        return length
    text = config.get_text_config()
    names = ("max_target_positions", "max_position_embeddings", "n_positions")
    known = [getattr(text, name, None) for name in names]
    return min([_DEFAULT_LENGTH, *filter(None, known)])


def _integers(*sizes: int) -> Tensor:
    return torch.empty(sizes, dtype=torch.int64, device="meta")
