"""Models of transformers with images train like one process where some ranks' batches have none.

Nothing of the models is changed, and no dummy image is passed.
"""

from datetime import timedelta
from typing import Any

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

_IMAGE, _VISION_START, _VISION_END = 60, 58, 59
_TEXT = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
_HAS_IMAGES = ((1, 1), (0, 1), (1, 0), (0, 0), (0, 1), (1, 0))
"""Of each step: whether the batch of each rank has images."""
_BLOCKS = ("DecoderLayer", "EncoderLayer", "VisionBlock", "Embeddings", "Projector")


def _llava() -> tuple[nn.Module, list[str]]:
    vision = transformers.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=16,
        patch_size=8,
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=transformers.LlamaConfig(**_TEXT),
        image_token_index=_IMAGE,
        vision_feature_layer=-1,
    )
    model = transformers.LlavaForConditionalGeneration(config)
    return model, ["vision_tower", "multi_modal_projector"]


def _qwen2_vl() -> tuple[nn.Module, list[str]]:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2]}
    config = transformers.Qwen2VLConfig(
        text_config={**_TEXT, "rope_scaling": rope, "bos_token_id": 1, "eos_token_id": 2},
        vision_config=dict(
            depth=2, embed_dim=32, hidden_size=32, num_heads=4, mlp_ratio=2, patch_size=4
        ),
        image_token_id=_IMAGE,
        video_token_id=_IMAGE + 1,
        vision_start_token_id=_VISION_START,
        vision_end_token_id=_VISION_END,
    )
    return transformers.Qwen2VLForConditionalGeneration(config), ["visual"]


def _batch(model: nn.Module, seed: int, has_images: int) -> dict[str, Tensor]:
    """Two sequences of 12 tokens, with an image of four tokens each, or without."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 50, (2, 12), generator=generator)
    batch = {"labels": tokens.clone(), "input_ids": tokens}
    is_qwen = isinstance(model, transformers.Qwen2VLForConditionalGeneration)
    if has_images:
        tokens[:, 1], tokens[:, 2:6] = _VISION_START, _IMAGE
        if is_qwen:  # Each image has 4 x 4 patches of 4 x 4 pixels, in two frames.
            batch["pixel_values"] = torch.randn(32, 3 * 2 * 4 * 4, generator=generator)
            batch["image_grid_thw"] = torch.tensor([[1, 4, 4]] * 2)
        else:
            batch["pixel_values"] = torch.randn(2, 3, 16, 16, generator=generator)
    if is_qwen:
        batch["mm_token_type_ids"] = (tokens == _IMAGE).long()
    return batch


def _run(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss = model(**batch).loss
    loss.backward()
    return loss.detach()


def _train(make: Any, recomputes: bool) -> None:
    torch.manual_seed(0)
    module, optional = make()
    twin, _ = make()
    twin.load_state_dict(module.state_dict())
    if recomputes:
        module.gradient_checkpointing_enable()
    for each in (module, twin):
        each.train()
    model = ZeRO3(
        module,
        auto_wrap_policy={type(m) for m in module.modules() if type(m).__name__.endswith(_BLOCKS)},
        optional_modules=[module.model.get_submodule(name) for name in optional],
        timeout=timedelta(seconds=30),
    )
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (model, twin)]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step, has_images in enumerate(_HAS_IMAGES):
        batches = [_batch(twin, 10 * step + r, has_images[r]) for r in range(world_size)]
        losses = backward_of_all_ranks(twin, batches, _run)
        assert_bitwise(_run(model, batches[rank]), losses[rank], f"{step}: loss")
        assert_same_gradients(model, twin, what=f"{step}: gradient of")
        assert_clips(model, 1.0)
        follow(model, twin)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_values(model, twin, f"after {step}: parameter")


@pytest.mark.slow
@on_ranks(2, timeout=240)
def test_batches_without_images_train_like_one_process() -> None:
    _train(_llava, recomputes=False)
    _train(_qwen2_vl, recomputes=True)
