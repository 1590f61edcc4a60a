"""What users of transformers and accelerate do around training: counts, second trainers, names."""

import importlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from layerzero import ZeRO3, checkpoint, rewrap
from layerzero.optim import attach
from tests.harness.checks import assert_bitwise, assert_close_in_float64, assert_same_parameters
from tests.harness.hugging_face import in_default_dtype
from tests.harness.ranks import on_ranks
from tests.harness.recording import logged as logged_by

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import ProjectConfiguration
from transformers import Trainer

from layerzero.integrations.accelerate import prepare
from layerzero.integrations.transformers import ZeRO3Trainer, save_pretrained, shard
from tests.integrations.test_transformers import (
    Sentences,
    arguments,
    as_if_launched,
    build,
    logged,
    needs_peft,
    plain_trainer,
    sharded_trainer,
    stored,
    trained,
    weights_of,
)


@needs_peft
@on_ranks(2, timeout=120)
def test_counts_are_whole(tmp_path: Path) -> None:
    import peft

    plain, module = build("qwen2"), build("qwen2")
    for each in (plain, module):
        each.model.layers[0].requires_grad_(False)
    ours = sharded_trainer(module, tmp_path, max_steps=1)
    with logged_by("transformers.trainer") as lines:
        ours.train()
    trained = plain.num_parameters(only_trainable=True)
    assert ours.get_num_trainable_parameters() == trained < plain.num_parameters()
    for options in ({}, {"only_trainable": True}, {"exclude_embeddings": True}):
        assert module.num_parameters(**options) == plain.num_parameters(**options)
    assert module.model.num_parameters() == plain.model.num_parameters()
    assert [line for line in lines if f"Number of trainable parameters = {trained:,}" in line]

    config = peft.LoraConfig(r=3, target_modules=["q_proj"], task_type="CAUSAL_LM")
    plain = peft.get_peft_model(build("llama"), config)
    model = shard(peft.get_peft_model(build("llama"), config))
    assert model.get_nb_trainable_parameters() == plain.get_nb_trainable_parameters()
    # Adapters of a base that is sharded already, chosen by its class: its dtypes stay.
    linear = {"r": 3, "target_modules": "all-linear"}
    plain = peft.get_peft_model(build("llama"), peft.LoraConfig(**linear))
    adapted = peft.get_peft_model(shard(build("llama")).module, peft.LoraConfig(**linear))
    with logged_by("layerzero.integrations.transformers.trainer") as lines:
        ours = sharded_trainer(adapted, tmp_path, bf16=True)
    assert any("bf16=True has no effect" in each for each in lines) == (dist.get_rank() == 0)
    assert ours.get_num_trainable_parameters() == plain.get_nb_trainable_parameters()[0]


@on_ranks(2, timeout=120, in_float64=True)
def test_a_model_goes_from_trainer_to_trainer(tmp_path: Path) -> None:
    """Train, evaluate with another trainer, train on with a third: as plain ones do."""
    evaluated, losses, weights = [], [], []
    for make, accumulation in ((sharded_trainer, 1), (plain_trainer, 2)):
        model = in_default_dtype(build("llama"))
        options = {"gradient_accumulation_steps": accumulation}
        first = trained(make(model, tmp_path, **options))
        del first
        second = make(model, tmp_path, per_device_eval_batch_size=4, eval_dataset=Sentences())
        evaluated.append(second.evaluate()["eval_loss"])
        third = trained(make(model, tmp_path, seed=7, **options))
        losses.append(logged(third, "loss"))
        sharded = getattr(third, "sharded_model", None)
        weights.append(model.state_dict() if sharded is None else weights_of(sharded))
    # A mean over the batches of two ranks, or over those of one.
    assert_close_in_float64(*map(torch.tensor, evaluated), "eval loss")
    assert losses[0] == losses[1]
    assert_same_parameters(*weights)

    as_if_launched(True)
    model = build("llama")
    options = {"forward_prefetch": 2}
    one = ZeRO3Trainer(model, arguments(tmp_path), zero3=options)
    assert ZeRO3Trainer(model, arguments(tmp_path)).sharded_model is one.sharded_model
    with pytest.raises(ValueError, match="this LlamaForCausalLM is sharded already"):
        ZeRO3Trainer(model, arguments(tmp_path), zero3=options)
    with logged_by("layerzero.integrations.transformers.trainer") as lines:
        ZeRO3Trainer(model, arguments(tmp_path, bf16=True))
    assert [line[:23] for line in lines] == ["bf16=True has no effect"][dist.get_rank() :]


class _Preferences(Trainer):
    """Like TRL's trainers: other arguments, and changes of the model before `Trainer` has it.

    Like LLaMA-Factory's: the model is not the first argument.
    """

    def __init__(self, reference: Any, model: Any = None, args: Any = None, **named: Any) -> None:
        model.resize_token_embeddings(model.config.vocab_size + 3)
        super().__init__(model=model, args=args, **named)
        reference.resize_token_embeddings(reference.config.vocab_size + 3)
        self.reference = reference
        self.reference = self.accelerator.prepare_model(self.reference, evaluation_mode=True)
        self.teacher = self.accelerator.prepare_model(build("llama"), evaluation_mode=True)
        self.distances: list[float] = []

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
        with torch.no_grad():
            reference = self.reference(**inputs).logits
            # As in DistillationTrainer, which projects by the teacher's head itself.
            taught = self.teacher.model(inputs["input_ids"])[0] @ self.teacher.lm_head.weight.T
            reference[..., : taught.shape[-1]] += taught
        loss, outputs = super().compute_loss(model, inputs, True, **named)
        self.distances.append((outputs.logits - reference).abs().max().item())
        return loss

    def training_step(self, *args: Any, **named: Any) -> Any:
        loss = super().training_step(*args, **named)
        with torch.no_grad():  # Of the weights before this step.
            for own, trained in zip(
                self.reference.parameters(), self.model.parameters(), strict=True
            ):
                own.data.mul_(0.5).add_(trained.data, alpha=0.5)
        return loss


class _ShardedFirst(ZeRO3Trainer, _Preferences):
    pass


@on_ranks(2, timeout=120)
def test_a_derived_trainer_changes_its_model_first_and_has_a_reference_and_a_teacher(
    tmp_path: Path,
) -> None:
    results = []
    for cls in (_Preferences, _ShardedFirst):
        as_if_launched(True)
        torch.manual_seed(0)  # New rows of the embedding are drawn.
        model, reference = build("llama"), build("llama")
        named = {"model": model, "args": arguments(tmp_path), "train_dataset": Sentences()}
        ours = trained(cls(reference=reference, **named))
        if cls is not _Preferences:
            sizes = zip(model.parameters(), reference.parameters(), strict=True)
            assert all(trained.shape == frozen.shape for trained, frozen in sizes)
        results.append((logged(ours, "loss"), ours.distances))
    assert results[0] == results[1]


@on_ranks(2, timeout=120)
def test_a_sharded_model_is_moved_nested_and_given_to_a_second_trainer(tmp_path: Path) -> None:
    class Outer(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, input_ids: Any = None, labels: Any = None) -> Any:
            return self.inner(input_ids=input_ids, labels=labels)

    as_if_launched(True)
    inside = shard(build("llama"))
    for each in (inside, inside.module, Outer(inside), Outer(inside.module)):
        assert each.to("cpu") is each and each.float() is each and each.cpu() is each
        with pytest.raises(RuntimeError, match=r"embed_tokens.* nothing was converted"):
            each.bfloat16()
    around = trained(sharded_trainer(Outer(inside), tmp_path))
    plain = trained(sharded_trainer(build("llama"), tmp_path))
    assert logged(around, "loss") == logged(plain, "loss")
    # The root's own parameter: the module itself shows it, beside what the trainer remembers.
    model = build("llama")
    model.scale = torch.nn.Parameter(torch.ones(3))
    for _ in range(2):
        rooted = trained(sharded_trainer(model, tmp_path))
    assert model.float() is model
    assert_bitwise(weights_of(rooted.sharded_model)["scale"], torch.ones(3), "scale")


@on_ranks(2, timeout=120)
def test_bf16_has_float32_main_weights_whatever_the_models_dtype(tmp_path: Path) -> None:
    def low() -> Any:
        model = build("qwen2").bfloat16()
        model.model.layers[0].requires_grad_(False)
        return model

    with logged_by("layerzero.integrations.transformers.accelerator") as lines:
        ours = sharded_trainer(low(), tmp_path, bf16=True)
        assert len(lines) == (1 if dist.get_rank() == 0 else 0), lines
        seen: set[torch.dtype] = set()
        ours.model.lm_head.register_forward_hook(lambda module, args, out: seen.add(out.dtype))
        ours.train()
        assert seen == {torch.bfloat16}
        as_if_launched(True)
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        module = low()
        model, _ = prepare(accelerator, module, torch.optim.AdamW(module.parameters()))
    for sharded in (ours.sharded_model, model):
        for name, parameter in sharded.named_parameters():
            expected = torch.float32 if parameter.requires_grad else torch.bfloat16
            assert parameter.dtype is expected, name
    # The same numbers in float32, cast to the same numbers in bfloat16.
    upcast = trained(sharded_trainer(low().float(), tmp_path, bf16=True))
    assert logged(ours, "loss") == logged(upcast, "loss")
    pure = sharded_trainer(low(), tmp_path)
    assert {p.dtype for p in pure.sharded_model.parameters()} == {torch.bfloat16}


@on_ranks(2, timeout=120)
def test_shards_are_not_saved_as_if_they_were_whole(tmp_path: Path) -> None:
    as_if_launched(True)
    root, first = tmp_path, dist.get_rank() == 0
    plain = build("llama")
    layers = {type(plain.model.layers[0])}
    model = ZeRO3(build("llama"), auto_wrap_policy=layers)
    for save in (model.save_pretrained, model.module.save_pretrained):
        with pytest.raises(RuntimeError, match=r"transformers\.save_pretrained"):
            save(root / "refused")
    with pytest.raises(RuntimeError, match=r"get_model_state_dict"):
        model.module.model.save_pretrained(root / "refused")
    pieces = {name: p.detach().clone() for name, p in model.named_parameters()}
    for sharded in (model, shard(build("llama"))):
        with pytest.raises(RuntimeError, match=r"has a piece of 'model\.embed_tokens\.weight', of"):
            sharded.save_pretrained(root / "refused", state_dict=pieces)

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = build("llama")

        def save_pretrained(self, what: Any) -> Any:
            if what != "its own":  # It takes no state dict, as SentenceTransformer's.
                self.inner.save_pretrained(what / "inner")
            return what

    assert ZeRO3(Own()).save_pretrained("its own") == "its own"
    assert shard(Own()).save_pretrained("its own") == "its own"
    save_pretrained(shard(Own()), root / "around")
    assert not (root / "refused").exists()
    full = checkpoint.get_model_state_dict(model, full=True, cpu_offload=True)
    model.save_pretrained(root / "given", is_main_process=first, state_dict=full)
    with model.summon_full_params(writeback=False):
        model.model.save_pretrained(root / "inside", is_main_process=first)
    ready = shard(build("llama"))
    ready.save_pretrained(root / "ours", max_shard_size="10KB", variant="own")
    with pytest.raises(NotImplementedError, match="distributed_checkpoint"):
        ready.save_pretrained(root / "refused", distributed_checkpoint=True)
    dist.barrier()
    assert len(list((root / "ours").glob("model.own-*.safetensors"))) > 1
    expected = dict(sorted(plain.state_dict().items()))
    assert_same_parameters(stored(root / "given"), expected)
    assert_same_parameters(stored(root / "around" / "inner"), expected)
    assert_same_parameters(stored(root / "inside"), dict(sorted(plain.model.state_dict().items())))
    assert not (root / "refused").exists()


def _stateful_and_local(accelerator: Any, model: Any, folder: Path) -> None:
    """A loader's place is saved; weights are not averaged as if they were whole."""
    # What accelerate makes of a loader with `use_stateful_dataloader` (torchdata).
    loader = mock.Mock(use_stateful_dataloader=True, batch_sampler=None)
    loader.state_dict.return_value = {"_num_yielded": 3, "_snapshot": {"rank": dist.get_rank()}}
    accelerator._dataloaders.append(loader)
    accelerator.project_configuration.automatic_checkpoint_naming = False
    accelerator.save_state(folder / "stateful")
    accelerator.load_state(folder / "stateful")
    loader.load_state_dict.assert_called_once_with(loader.state_dict.return_value)
    accelerator._dataloaders.clear()
    with pytest.raises(ValueError, match=r"zip\(\)"):
        accelerator.load_state(folder / "stateful")
    with (
        pytest.raises(NotImplementedError, match="LocalSGD needs whole weights"),
        LocalSGD(accelerator, model, local_sgd_steps=1) as local,
    ):
        local.step()
    assert accelerator.reduce(torch.ones(2)).tolist() == [2.0, 2.0]


@on_ranks(2, timeout=120)
def test_an_accelerator_names_its_checkpoints(tmp_path: Path) -> None:
    as_if_launched(True)
    root, ids = tmp_path / "checkpoints", torch.arange(6).view(1, -1)

    def started(**changes: Any) -> tuple[Any, Any, Any]:
        named = ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True, **changes)
        accelerator = Accelerator(cpu=True, project_config=named)
        module = build("llama")
        head = [*module.lm_head.parameters()]
        optimizers = [
            torch.optim.AdamW(module.model.parameters(), 1e-2),
            torch.optim.SGD(head, 1e-2, 0.9),
        ]
        # They were made before the model was sharded, and are known all the same.
        model, *prepared = prepare(accelerator, module, *optimizers)
        assert all(attach.holds_sharded_params(each.optimizer) for each in prepared)
        return accelerator, model, prepared

    def step(accelerator: Any, model: Any, optimizers: Any) -> dict[str, Any]:
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        for each in optimizers:
            each.step()
            each.zero_grad()
        return weights_of(model)

    run = accelerator, model, _ = started(total_limit=2)
    with pytest.raises(ValueError, match="that saved one"):
        accelerator.load_state()
    weights = []
    for _ in range(3):
        weights.append(step(*run))
        accelerator.save_state()
    assert sorted(path.name for path in root.iterdir()) == ["checkpoint_1", "checkpoint_2"]
    weights.append(step(*run))
    if dist.get_rank() == 0:
        (root / "checkpoint_7").mkdir()  # killed while it was written
    dist.barrier()
    run = accelerator, model, _ = started(iteration=2)
    accelerator.load_state()
    assert_same_parameters(weights_of(model), weights[2])
    assert_same_parameters(step(*run), weights[3])
    accelerator.load_state(root / "checkpoint_1")
    assert_same_parameters(weights_of(model), weights[1])
    with pytest.raises(ValueError, match=r"checkpoint_2: exists already"):
        accelerator.save_state()
    with pytest.raises(checkpoint.CheckpointError):
        accelerator.load_state(root / "checkpoint_9")
    _stateful_and_local(accelerator, model, tmp_path)
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: None)
    with pytest.raises(NotImplementedError, match="register_save_state_pre_hook"):
        accelerator.save_state()


PROMPT = torch.arange(3, 13).view(1, -1)
TARGETS = ["q_proj", "k_proj", "down_proj"]


def _adapted(config: Any, **changes: Any) -> Any:
    """A model whose adapters have an effect, the same on every call."""
    model = importlib.import_module("peft").get_peft_model(build("llama", **changes), config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return in_default_dtype(model).eval()


@torch.no_grad()
def _logits(model: Any) -> Any:
    return model(input_ids=PROMPT).logits


@needs_peft
@on_ranks(2, timeout=120, in_float64=True)
def test_adapters_are_merged_into_whole_weights(tmp_path: Path) -> None:
    import peft

    as_if_launched(True)
    lora = peft.LoraConfig(r=4, target_modules=TARGETS)
    for config in (
        lora,
        peft.LoraConfig(r=4, target_modules=[*TARGETS, "embed_tokens"], use_dora=True),
        peft.IA3Config(target_modules=TARGETS, feedforward_modules=["down_proj"]),
    ):
        what = type(config).__name__
        expected = _logits(_adapted(config))
        layers = {type(build("llama").model.layers[0])}
        model = ZeRO3(_adapted(config), auto_wrap_policy=layers)
        before = weights_of(model)
        model.merge_adapter()
        merged = weights_of(model)
        assert any(not torch.equal(merged[name], before[name]) for name in before)
        assert_close_in_float64(_logits(model), expected, f"{what}, merged")
        model.unmerge_adapter()
        assert_close_in_float64(_logits(model), expected, f"{what}, unmerged")
        with model.summon_full_params():
            model.merge_adapter()
        assert_close_in_float64(_logits(model), expected, f"{what}, merged inside")
        # What a merge changed cannot be taken back inside a forward, whose weights are copies.
        with model.disable_adapter(), pytest.raises(RuntimeError, match=r"unmerge: .*FORWARD"):
            _logits(model)
        assert_close_in_float64(_logits(model), expected, f"{what}, still merged")
        plain = model.merge_and_unload()
        with pytest.raises(RuntimeError, match="rewrap"):
            _logits(plain)
        with pytest.raises(RuntimeError, match=r"save it within one `with model\.summon_full"):
            plain.save_pretrained(tmp_path / what)
        rewrap(model)
        assert_close_in_float64(_logits(plain), expected, f"{what}, unloaded")
        model = ZeRO3(_adapted(config), auto_wrap_policy=layers)
        with model.summon_full_params(writeback=False):
            plain = model.merge_and_unload()
            plain.save_pretrained(tmp_path / what, is_main_process=dist.get_rank() == 0)
            assert_close_in_float64(_logits(plain), expected, f"{what}, unloaded inside")
        dist.barrier()
        again = in_default_dtype(type(plain).from_pretrained(tmp_path / what)).eval()
        assert_close_in_float64(_logits(again), expected, f"{what}, saved")


@needs_peft
@on_ranks(2, timeout=120)
def test_adapters_of_every_kind_are_saved_as_peft_saves_them(tmp_path: Path) -> None:
    import peft

    as_if_launched(True)
    first = dist.get_rank() == 0
    prompts = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
    vectors = {"num_vectors": 8, "vector_length": 4, "target_modules": ["q_proj"], "r": 4}
    for name, config in {
        "prompts": peft.PromptTuningConfig(**prompts),
        "prefixes": peft.PrefixTuningConfig(**prompts),
        "projections in every layer": peft.VeraConfig(r=4, target_modules=["q_proj"]),
        "a bank": peft.VBLoRAConfig(**vectors),
        "computed": peft.VBLoRAConfig(**vectors, save_only_topk_weights=True),
        "tied": peft.LoraConfig(
            r=4, target_modules=TARGETS, modules_to_save=["embed_tokens", "lm_head"]
        ),
    }.items():
        tied = {"tie_word_embeddings": name == "tied"}
        plain, model = _adapted(config, **tied), shard(_adapted(config, **tied))
        model.save_pretrained(tmp_path / name)
        if first:
            plain.save_pretrained(tmp_path / "plain" / name)
        dist.barrier()
        found, expected = (
            stored(tmp_path / part / name, "adapter_model") for part in ("", "plain")
        )
        assert_same_parameters(found, expected, what=name)
        again = peft.PeftModel.from_pretrained(build("llama", **tied), tmp_path / name)
        if name != "computed":  # Its file has a softmax instead of logits.
            assert_bitwise(_logits(again), _logits(model), name)
