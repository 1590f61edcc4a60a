"""transformers models through ParallelManager, and LoRA through peft, beside the unsharded model.
Test extras only."""

import functools
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layerzero import ParallelManager, ShardingPlan, units
from layerzero.parallel.tp_plans import resolve_styles
from tests.distributed.test_tensor_parallel import follows
from tests.harness.checks import assert_close_in_float64, assert_same_parameters
from tests.harness.decoder import VOCAB
from tests.harness.hugging_face import in_default_dtype
from tests.harness.ranks import on_ranks
from tests.harness.reference import full_parameters, seeded

pytest.importorskip("transformers")

from layerzero.integrations.transformers import save_pretrained

TIMEOUT = timedelta(seconds=25)


def build(family: str = "Llama", layers: int = 2, **options: Any) -> nn.Module:
    import transformers

    of_text = "Text" if family == "Gemma3" else ""
    config = getattr(transformers, f"{family}{of_text}Config")(
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=options.pop("num_key_value_heads", 2),
        head_dim=6,
        use_cache=False,
        pad_token_id=0,  # Phi3's default is beyond our vocabulary
        initializer_range=0.3,  # with less attention is uniform, and its gradients are roundings
        **options,
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:  # ones and zeros would hide what is not there
            nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    return in_default_dtype(model)


def forward_backward(model: nn.Module, ids: Tensor) -> Tensor:
    ids = ids[:, :-1]  # sequences that two ranks can share
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach()


def _train_one(manager: ParallelManager, family: str, tp_plan: str) -> None:
    """The layers are units, no plan says it; biases of row-wise modules are there once."""
    biases = {"attention_bias": True, **({"mlp_bias": True} if family == "Llama" else {})}
    make = functools.partial(build, family, **biases)
    model = manager.parallelize(seeded(make), tp_plan=tp_plan, timeout=TIMEOUT)
    assert [unit.fqn for unit in units(model)] == ["", "model.layers.0", "model.layers.1"]
    split = {n for n, p in model.named_parameters() if p.layerzero.tensor_parallel}
    assert ("model.norm.weight" in split) == manager.sequence_parallel
    assert {"model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight"} <= split
    what = f"{family}, {tp_plan}, in sequence: {manager.sequence_parallel}"
    follows(model, seeded(make), manager.mesh, what, run=forward_backward)


def _train_tied_by_plan(manager: ParallelManager) -> None:
    plan = ShardingPlan(
        apply_modules={
            "model.embed_tokens": {},
            "model.layers.{*}": {"act_ckpt": "wrapped"},
            "model.layers.{*}.mlp": {"reshard_after_forward": False},
            "lm_head": {},
        },
        defaults={"timeout": TIMEOUT},
    )
    make = functools.partial(build, tie_word_embeddings=True)
    model = manager.parallelize(seeded(make), plan)
    assert "model.layers.1.mlp" in [unit.fqn for unit in units(model)]
    assert "lm_head.weight" not in dict(model.named_parameters())
    what = f"tied, {manager.sequence_parallel}"
    follows(model, seeded(make), manager.mesh, what, run=forward_backward)


@on_ranks(4, timeout=120, in_float64=True)
def test_models_split_by_their_plans_train_as_one_process(in_full: bool) -> None:
    """Either plan, either family, sequences whole and in parts; `make soak`: each with each."""
    manager = ParallelManager(tp_size=2)
    for family in ("Llama", "Qwen3"):  # the latter has norms of each head
        names = [resolve_styles(build(family), plan, False).keys() for plan in ("auto", "llama")]
        assert names[0] == names[1], "with either plan projections share a sum of gradients"
    if in_full:
        _train_one(manager, "Llama", "auto")
        _train_tied_by_plan(manager)
    _train_one(manager, "Qwen3", "llama")
    manager = ParallelManager(tp_size=2, sequence_parallel=True)
    for family in ("Llama", "Qwen3") if in_full else ("Llama",):
        _train_one(manager, family, "auto")
    _train_tied_by_plan(manager)


@on_ranks(2, timeout=120, in_float64=True)
def test_layers_of_other_shapes_train_as_one_process() -> None:
    """Norms around attention and MLP, in sequence; norms that span heads and packed projections, by
    the models' own plans."""
    for family, why in (
        ("Gemma2", ""),
        ("Gemma3", ""),
        ("Olmo2", "does not cover the parameter 'self_attn.q_norm.weight'; pass a mapping"),
        ("Phi3", "does not fit Phi3ForCausalLM: .* pass a mapping"),
    ):
        manager = ParallelManager(tp_size=2, sequence_parallel=True)
        if why:
            with pytest.raises(ValueError, match=why):
                manager.parallelize(build(family))
            manager.sequence_parallel = False
        make = functools.partial(build, family)
        model = manager.parallelize(seeded(make), timeout=TIMEOUT)
        follows(model, seeded(make), manager.mesh, family, steps=1, run=forward_backward)


@on_ranks(2, timeout=120, in_float64=True)
def test_experts_are_refused_but_attention_beside_them_is_split() -> None:
    few = {"num_local_experts": 3, "experts_implementation": "eager"}  # others lack float64
    mixtral = functools.partial(build, "Mixtral", layers=1, **few)
    qwen = functools.partial(build, "Qwen3Moe", moe_intermediate_size=8, num_experts=3)
    manager = ParallelManager(tp_size=2)
    for make, tp_plan, in_sequence in (
        (mixtral, "auto", True),
        (qwen, "llama", False),
        (qwen, "model", False),
    ):
        manager.sequence_parallel = in_sequence
        message = r"(Moe|Mixtral)F.*its experts \('model.layers.0.mlp.experts', .*=1.*ep_plan"
        with pytest.raises(ValueError, match=message):
            manager.parallelize(make(), tp_plan=tp_plan)
    attention = {"model.layers.*.self_attn.?_proj": "colwise"}
    attention |= {"model.layers.*.self_attn.o_proj": "rowwise"}
    model = manager.parallelize(seeded(mixtral), tp_plan=attention, timeout=TIMEOUT)
    follows(model, seeded(mixtral), manager.mesh, "experts", 1, forward_backward)


def _adapted(target_modules: Any = ("q_proj", "v_proj"), **options: Any) -> nn.Module:
    import peft

    config = peft.LoraConfig(r=3, target_modules=target_modules, init_lora_weights=False, **options)
    return peft.get_peft_model(build(), config).to(torch.get_default_dtype())


@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.slow
@on_ranks(4, timeout=120, in_float64=True)
def test_lora_on_split_layers_trains_merges_and_is_saved_as_of_one_process(tmp_path: Path) -> None:
    """Column- and row-wise, with biases, a module trained in full, sequences whole and in parts."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from safetensors.torch import load_file

    everything = functools.partial(_adapted, "all-linear")
    options = {"lora_bias": True, "modules_to_save": ["lm_head"]}
    biased = functools.partial(_adapted, ["v_proj", "o_proj"], **options)
    for in_sequence, tp_plan, make in ((True, None, everything), (False, "model", biased)):
        manager = ParallelManager(tp_size=2, sequence_parallel=in_sequence)
        model, plain = manager.parallelize(seeded(make), tp_plan=tp_plan), seeded(make)
        split = {n for n, p in model.named_parameters() if p.layerzero.tensor_parallel}
        adapters = {name for name, _ in model.named_parameters() if "lora_" in name}
        assert adapters <= split, "replicated ones are DTensors, too"
        what = f"{in_sequence}, {tp_plan}"
        follows(model, plain, manager.mesh, what, run=forward_backward)
        save_pretrained(model, tmp_path)
        saved = load_file(tmp_path / "adapter_model.safetensors")
        expected = get_peft_model_state_dict(plain)
        assert_same_parameters(saved, dict(sorted(expected.items())), what="saved")
        if make is not biased:  # peft refuses to merge these
            for each in (model.module, plain):
                each.merge_adapter()
            assert_close_in_float64(full_parameters(model), full_parameters(plain), "merged")
    for make, message in (
        (functools.partial(_adapted, use_dora=True), "q_proj: .*DoRA; got peft.*magnitude"),
        (functools.partial(_adapted, ["embed_tokens"]), "embed_tokens: .*of linear layers"),
    ):
        with pytest.raises(ValueError, match=message):
            manager.parallelize(make(), tp_plan="model")
    late = manager.parallelize(seeded(build))
    get_peft_model(late.module, LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(RuntimeError, match=r"changed after wrapping: added .*q_proj.lora_A"):
        forward_backward(late, torch.zeros(2, 7).long())


@on_ranks(2, timeout=120)
def test_heads_and_styles_that_do_not_fit_are_named() -> None:
    manager = ParallelManager(tp_size=2)
    one = build(num_key_value_heads=1)
    with pytest.raises(ValueError, match="k_proj: tp_size=2 does not divide its 1 heads"):
        manager.parallelize(one, tp_plan="llama")
    in_sequence = ParallelManager(tp_size=2, sequence_parallel=True)
    with pytest.raises(ValueError, match="does not say which modules compute on parts"):
        in_sequence.parallelize(build(), tp_plan="model")
    model = in_sequence.parallelize(build(), timeout=TIMEOUT)
    with pytest.raises(ValueError, match=r"tp_size=2 divides, got \(2, 5, 24\); pad"):
        model(input_ids=torch.zeros(2, 5, dtype=torch.long))
    odd_norm = build()
    odd_norm.model.layers[1].mlp.norm = nn.LayerNorm(24)
    message = r"layers.1: .*does not cover the parameter 'mlp.norm.weight'; pass a.*, or \"model\""
    with pytest.raises(ValueError, match=message):
        manager.parallelize(odd_norm, tp_plan="llama")
    with pytest.raises(ValueError, match=r"'mlp.norm.weight'; .*, or leave out sequence_parallel"):
        in_sequence.parallelize(odd_norm)
