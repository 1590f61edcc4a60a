"""A model of transformers with images trains like one process where some ranks' batches have none.

Nothing of the model is changed, and no dummy image is passed.
"""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from layerzero import ZeRO3
from tests.harness.checks import assert_bitwise
from tests.harness.compare import assert_clips, assert_same_gradients, assert_same_values, follow
from tests.harness.ranks import on_ranks
from tests.harness.reference import backward_of_all_ranks

transformers = pytest.importorskip("transformers")

_IMAGE = 60
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_HAS_IMAGES = ((1, 1), (0, 1), (1, 0), (0, 0), (0, 1), (1, 0))
"""Of each step: whether the batch of each rank has images."""
_BLOCKS = ("DecoderLayer", "EncoderLayer", "VisionBlock", "Embeddings", "Projector")


def _llava() -> nn.Module:
    text = transformers.LlamaConfig(**_SIZES, vocab_size=64, num_key_value_heads=2)
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**_SIZES, image_size=16, patch_size=8),
        text_config=text,
        image_token_index=_IMAGE,
        vision_feature_layer=-1,
    )
    return transformers.LlavaForConditionalGeneration(config).train()


def _batch(seed: int, has_images: int) -> dict[str, Tensor]:
    """Two sequences of 12 tokens, with an image of four tokens each, or without."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 50, (2, 12), generator=generator)
    batch = {"labels": tokens.clone(), "input_ids": tokens}
    if has_images:
        tokens[:, 2:6] = _IMAGE
        batch["pixel_values"] = torch.randn(2, 3, 16, 16, generator=generator)
    return batch


def _run(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss = model(**batch).loss
    loss.backward()
    return loss.detach()


@pytest.mark.slow
@on_ranks(2, timeout=240)
def test_batches_without_images_train_like_one_process() -> None:
    torch.manual_seed(0)
    module, twin = _llava(), _llava()
    twin.load_state_dict(module.state_dict())
    module.gradient_checkpointing_enable()
    model = ZeRO3(
        module,
        auto_wrap_policy={type(m) for m in module.modules() if type(m).__name__.endswith(_BLOCKS)},
        optional_modules=[module.model.vision_tower, module.model.multi_modal_projector],
        timeout=timedelta(seconds=30),
    )
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (model, twin)]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step, has_images in enumerate(_HAS_IMAGES):
        batches = [_batch(10 * step + r, has_images[r]) for r in range(world_size)]
        losses = backward_of_all_ranks(twin, batches, _run)
        assert_bitwise(_run(model, batches[rank]), losses[rank], f"{step}: loss")
        assert_same_gradients(model, twin, what=f"{step}: gradient of")
        assert_clips(model, 1.0)
        follow(model, twin)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_values(model, twin, f"after {step}: parameter")
