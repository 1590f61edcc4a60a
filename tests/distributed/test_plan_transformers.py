"""Plans on real models: a transformers Llama, and LoRA through peft. Test extras only."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from layerzero import ShardingPlan, shard_with_plan, units
from tests.harness.compare import assert_trains_alike
from tests.harness.internals import inner_units
from tests.harness.ranks import on_ranks, run_ranks
from tests.harness.recording import full_nbytes, gathered, recorded_operations, reduced
from tests.harness.reference import seeded
from tests.harness.traffic import SentBytes

pytest.importorskip("transformers")

VOCAB = 37


def llama(tied: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=tied,
            attn_implementation="eager",
            use_cache=False,
        )
    )


def tied_llama() -> nn.Module:
    return llama(tied=True)


def tokens() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ranks = range(dist.get_world_size())
    return [[torch.randint(VOCAB, (2, 7), generator=generator) for _ in ranks] for _ in range(2)]


def forward_backward(model: nn.Module, ids: Tensor) -> Tensor:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach()


LAYERS = [f"model.layers.{index}" for index in range(3)]


@on_ranks(2, timeout=120)
def test_a_llama_is_sharded_by_its_plan() -> None:
    plan = ShardingPlan.from_dict(
        {
            "apply_modules": {
                "model.embed_tokens": {},
                "model.layers.{*}": {"act_ckpt": "wrapped"},
                "model.layers.{*}.mlp": {"reshard_after_forward": False},
                "lm_head": {},
            },
            "num_to_forward_prefetch": 2,
        }
    )
    model = shard_with_plan(seeded(llama), plan)
    assert_trains_alike(model, seeded(llama), tokens(), run=forward_backward)
    with recorded_operations(model) as operations:
        forward_backward(model, tokens()[0][dist.get_rank()])
    order = ["model.embed_tokens"]
    for layer in LAYERS:
        order += [layer, f"{layer}.mlp"]
    assert gathered(operations)[: len(order) + 2] == ["the root unit", *order, "lm_head"]
    assert sorted(reduced(operations)) == sorted(["the root unit", *order, "lm_head"])
    assert not any(full_nbytes(model).values())
    # Embedding and head are one weight: it goes to the unit around both, though both are named.
    model = shard_with_plan(seeded(tied_llama), plan)
    assert_trains_alike(model, seeded(tied_llama), tokens(), run=forward_backward)


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=3, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(llama(), config)


def _lora() -> None:
    adapters = {"*.layers.{*}": {"reshard_after_forward": False}, "*.lora_?.default": {}}
    for patterns in (adapters, {"*.layers.{*}": {"reshard_after_forward": False}}):
        module = seeded(lora)
        model = shard_with_plan(module, ShardingPlan(apply_modules=patterns))
        frozen = [unit for unit in inner_units(model) if unit.handles and not unit.is_trainable]
        if patterns is adapters:
            names = ["", *(f"base_model.model.{layer}" for layer in LAYERS)]
            assert sorted(unit.fqn for unit in frozen) == names
        assert_trains_alike(model, seeded(lora), tokens(), run=forward_backward)
        ids = tokens()[0][dist.get_rank()]
        loss = model(input_ids=ids, labels=ids).loss
        with recorded_operations(model) as operations, SentBytes() as sent:
            loss.backward()
        trained = [unit for unit in inner_units(model) if unit.is_trainable]
        assert sorted(reduced(operations)) == sorted(unit.fqn for unit in trained)
        # Each rank sends the other half of what it gathers and reduces; names of messages, and
        # which gradients exist, take less than 128 bytes a unit.
        regathered = sum(unit.nbytes for unit in units(model) if unit.fqn in gathered(operations))
        parameters = list(seeded(lora).parameters())
        gradients = sum(p.nbytes for p in parameters if p.requires_grad)
        bases = sum(p.nbytes for p in parameters if not p.requires_grad)
        least = (gradients + regathered) / 2
        assert least <= sent.nbytes < least + 128 * len(trained) < bases / 2


def test_lora_through_peft_reduces_nothing_for_frozen_units() -> None:
    pytest.importorskip("peft")
    run_ranks(2, _lora, timeout=120)
