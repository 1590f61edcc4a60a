"""transformers and accelerate with the engine inside, beside the same without it on one process.

Two ranks see what one process sees as two micro-batches of a step: losses are then sums of the same
numbers in the same order, and equal bit for bit, as long as nothing is clipped.
"""

import json
import os
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from layerzero import ZeRO3, checkpoint, fully_shard, units
from layerzero.checkpoint import CheckpointError
from layerzero.optim import WholeTensorOptimizer
from tests.harness.checks import (
    assert_bitwise,
    assert_close_in_float64,
    assert_same_parameters,
    assert_within,
    recorded_warnings,
)
from tests.harness.hugging_face import in_default_dtype
from tests.harness.internals import get_info, inner_units
from tests.harness.ranks import on_ranks, run_ranks
from tests.harness.recording import recorded_operations, recorded_regions, reduced

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("accelerate")

import transformers as hf
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState
from transformers import Trainer, TrainingArguments

from layerzero.integrations.accelerate import prepare
from layerzero.integrations.transformers import (
    ZeRO3Trainer,
    load_pretrained,
    save_pretrained,
    shard,
)

needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
VOCAB = 37
SIZES = {"vocab_size": VOCAB, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = {**SIZES, "hidden_size": 24, "intermediate_size": 40, "num_key_value_heads": 1}
GPT2 = {"vocab_size": VOCAB, "n_embd": 24, "n_layer": 2, "n_head": 2, "n_positions": 32}
TOKENS = {"bos_token_id": None, "eos_token_id": None}


def build(kind: str, dropout: float = 0.0, **changes: Any) -> Any:
    """A tiny model, the same on every call."""
    torch.manual_seed(0)
    if kind == "gpt2":
        drops = {f"{place}_pdrop": dropout for place in ("resid", "embd", "attn")}
        return hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2, **TOKENS, **drops))
    if kind == "qwen2":
        return hf.Qwen2ForCausalLM(
            hf.Qwen2Config(**LLAMA, **TOKENS, tie_word_embeddings=True, **changes)
        )
    if kind == "mixtral":
        return hf.MixtralForCausalLM(
            hf.MixtralConfig(**LLAMA, **TOKENS, num_local_experts=4, **changes)
        )
    return hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA, **TOKENS, **changes))


class Sentences(torch.utils.data.Dataset[dict[str, Any]]):
    """Random tokens, and a column that no model knows."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.randint(VOCAB, (9,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids, "source": index}


def arguments(folder: str | Path, **changes: Any) -> Any:
    chosen = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 1e3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(output_dir=str(folder), **{**chosen, **changes})


LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def as_if_launched(launched: bool) -> None:
    """What torchrun would have told this rank; or nothing, for a process on its own."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    numbers = (dist.get_rank(), dist.get_rank(), dist.get_world_size(), dist.get_world_size())
    for name, number in zip(LAUNCHED, numbers, strict=True):
        os.environ.pop(name, None)
        if launched and dist.get_world_size() > 1:
            os.environ[name] = str(number)
    AcceleratorState._reset_state(True)


OWN = ("callbacks", "eval_dataset", "model_init", "optimizer_cls_and_kwargs", "zero3")
"""Arguments of trainers; all others are those of TrainingArguments."""


def _trainer(cls: Any, model: nn.Module | None, folder: str | Path, options: dict[str, Any]) -> Any:
    own = {name: options.pop(name) for name in OWN if name in options}
    return cls(model, arguments(folder, **options), train_dataset=Sentences(), **own)


def plain_trainer(model: nn.Module | None, folder: str | Path, **options: Any) -> Any:
    as_if_launched(False)
    return _trainer(Trainer, model, folder, options)


def sharded_trainer(model: nn.Module | None, folder: str | Path, **options: Any) -> Any:
    as_if_launched(True)
    return _trainer(ZeRO3Trainer, model, folder, options)


def trained(trainer: Any) -> Any:
    trainer.train()
    return trainer


def logged(trainer: Any, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def weights_of(model: ZeRO3) -> dict[str, Tensor]:
    return checkpoint.get_model_state_dict(model, full=True)


@pytest.mark.slow
@on_ranks(2, timeout=120)
def test_losses_and_weights_are_those_of_a_trainer_on_one_process(tmp_path: Path) -> None:
    for kind in ("gpt2", "llama"):
        plain = trained(plain_trainer(build(kind), tmp_path, gradient_accumulation_steps=2))
        ours = trained(sharded_trainer(build(kind), tmp_path))
        assert type(ours.model) is type(plain.model) and len(units(ours.sharded_model)) == 3
        for what in ("loss", "total_flos"):
            assert logged(ours, what) == logged(plain, what), kind
        assert_same_parameters(weights_of(ours.sharded_model), plain.model.state_dict())
        assert ours.label_names == plain.label_names == ["labels"]
    losses = logged(plain, "loss")
    # Compiled; and made by the trainer, which seeds once more, hence another order of data.
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
    ours = trained(sharded_trainer(build("llama"), tmp_path, **compiled))
    assert logged(ours, "loss") == losses
    made = {"model_init": lambda: build("llama")}
    plain = trained(plain_trainer(None, tmp_path, gradient_accumulation_steps=2, **made))
    ours = trained(sharded_trainer(None, tmp_path, **made))
    assert logged(ours, "loss") == logged(plain, "loss")


@on_ranks(2, timeout=120, in_float64=True)
def test_micro_batches_are_reduced_once_and_clipped_by_the_norm_of_all(tmp_path: Path) -> None:
    steps, micro_batches = 3, 2
    options = {
        "max_grad_norm": 0.5,
        "max_steps": steps,
        "label_smoothing_factor": 0.1,
        "eval_dataset": Sentences(),
    }
    model = in_default_dtype(build("llama"))
    accumulates = {"gradient_accumulation_steps": 2 * micro_batches}
    plain = trained(plain_trainer(model, tmp_path, **accumulates, **options))
    model = in_default_dtype(build("llama"))
    accumulates = {"gradient_accumulation_steps": micro_batches}
    ours = sharded_trainer(model, tmp_path, activation_checkpointing=True, **accumulates, **options)
    with recorded_operations(ours.sharded_model) as operations:
        ours.train()
    assert len(reduced(operations)) == steps * len(units(ours.sharded_model))
    norms = torch.tensor([logged(ours, "grad_norm"), logged(plain, "grad_norm")])
    assert bool((norms > 0.5).all())
    # The norm is a sum over other parts, gradients one over four micro-batches in another order.
    assert_close_in_float64(norms[0], norms[1], "gradient norm")
    # The label smoother adds up losses of one sign in float32: over symbols, then over the batch.
    losses = torch.tensor([logged(ours, "loss"), logged(plain, "loss")])
    evaluated = [torch.tensor(trainer.evaluate()["eval_loss"]) for trainer in (ours, plain)]
    for own, expected, what in ((losses[0], losses[1], "loss"), (*evaluated, "eval loss")):
        additions = VOCAB + 2 * 9
        bound = additions * torch.finfo(torch.float32).eps * expected.abs()
        assert_within(own, expected, bound, what)
    predicted = ours.predict(Sentences())
    assert predicted.predictions.shape == (32, 9, VOCAB)


@pytest.mark.slow
@on_ranks(2, timeout=120)
def test_the_example_trains_resumes_saves_and_loads(tmp_path: Path) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
    import train_hf

    as_if_launched(True)
    answer = train_hf.train(tmp_path, 10, use_cpu=True)
    assert len(answer) == 5 and (tmp_path / "checkpoint-10" / "training_args.json").exists()


def _resumes(folder: str) -> None:
    root = Path(folder)
    tied = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    options = {"optimizer_class": torch.optim.Adafactor, "lr": 1e-2}
    whole = {"optimizer_cls_and_kwargs": (WholeTensorOptimizer, options)}
    straight = trained(sharded_trainer(build("gpt2", dropout=0.2), root / "a", **tied, **whole))
    state = straight.optimizer.optimizer.state
    assert all("row_var" in state[p] for p in state if p.layerzero.ndim == 2)
    expected = weights_of(straight.sharded_model)
    saved = root / "a" / "checkpoint-2"
    dist.barrier()
    if dist.get_rank() == 0:
        (root / "a" / "checkpoint-3").mkdir()  # killed while it was written
        (root / "a" / "checkpoint-4" / "trainer_state.json").unlink()
    dist.barrier()
    assert not [path for path in saved.rglob("*") if path.suffix in (".pt", ".pth", ".bin")]
    weights = saved / "model.safetensors"
    assert weights.samefile(saved / "layerzero" / "step-00000002" / "model.safetensors")
    other = build("gpt2", dropout=0.2)
    with torch.no_grad():
        other.transformer.wte.weight.zero_()
    resumed = sharded_trainer(other, root / "a", **tied, **whole)
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed, "loss") == logged(straight, "loss")
    assert_same_parameters(weights_of(resumed.sharded_model), expected)
    # Another folder, for one process; no dropout, whose masks are other ones there.
    torch.set_default_dtype(torch.float64)
    trained(sharded_trainer(in_default_dtype(build("llama")), root / "b", **tied))


def _goes_on_alone(folder: str) -> tuple[list[float], dict[str, Tensor]]:
    changes = {"per_device_train_batch_size": 4, "max_steps": 4}
    model = in_default_dtype(build("llama"))
    one = sharded_trainer(model, Path(folder, "c"), **changes)
    one.train(resume_from_checkpoint=str(Path(folder, "b", "checkpoint-2")))
    return logged(one, "loss"), weights_of(one.sharded_model)


def test_a_run_resumes_exactly_and_at_another_world_size(tmp_path: Path) -> None:
    run_ranks(2, _resumes, str(tmp_path), timeout=120)
    ((losses, weights),) = run_ranks(1, _goes_on_alone, str(tmp_path), in_float64=True)
    state = (tmp_path / "b" / "checkpoint-4" / "trainer_state.json").read_text()
    logs = json.loads(state)["log_history"]
    expected = [entry["loss"] for entry in logs if "loss" in entry]
    assert losses[:2] == expected[:2]
    # A mean over four rows at once is another order of sums.
    wide = [torch.tensor(each, dtype=torch.float64) for each in (losses, expected)]
    assert_close_in_float64(*wide, "loss")
    assert [*stored(tmp_path / "b" / "checkpoint-4")] == sorted(weights)


@on_ranks(2, timeout=120)
def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    changes = {
        "max_steps": 4,
        "save_steps": 2,
        "save_strategy": "steps",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # so that it is not the last one
        "learning_rate": 1e-3,
        "save_total_limit": 1,
    }
    for save_only_model in (False, True):
        options = {"save_only_model": save_only_model, "eval_dataset": Sentences()}
        root = tmp_path / str(save_only_model)
        ours = trained(sharded_trainer(build("qwen2"), root, **options, **changes))
        best = Path(ours.state.best_model_checkpoint)
        assert best.name == "checkpoint-2"
        found = weights_of(ours.sharded_model)
        for name, value in stored(best).items():
            assert_bitwise(found[name], value, name)
    with pytest.raises(ValueError, match="has no layerzero, the optimizer state"):
        ours.train(resume_from_checkpoint=str(best))


def stored(folder: Path, name: str = "model") -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return dict(sorted(load_file(folder / f"{name}.safetensors").items()))


@on_ranks(2, timeout=120)
def test_folders_are_those_of_from_pretrained_and_save_pretrained(tmp_path: Path) -> None:
    as_if_launched(True)
    ids = torch.arange(12).view(2, 6)
    for kind in ("llama", "qwen2", "gpt2", "mixtral"):
        root, plain = tmp_path / kind, build(kind).eval()
        if dist.get_rank() == 0:
            plain.save_pretrained(root / "plain")
            plain.save_pretrained(root / "merged", save_original_format=False)
        model = shard(build(kind))
        with recorded_operations(model) as operations:
            save_pretrained(model, root / "ours")
        assert {operation.verb for operation in operations} == {"stream"}
        model.module.save_pretrained(root / "own")
        for size in ("10KB", "20KB"):  # The second one replaces what the first one wrote.
            save_pretrained(model.module, root / "pieces", max_file_size=size)
        for name in ("ours", "own"):
            assert_same_parameters(*(stored(root / each) for each in (name, "plain")))
            for config in ("config.json", "generation_config.json"):
                text = (root / name / config).read_text()
                assert text == (root / "plain" / config).read_text()
        index = json.loads((root / "pieces" / "model.safetensors.index.json").read_text())
        files = {path.name for path in (root / "pieces").glob("*.safetensors")}
        assert files == set(index["weight_map"].values()) and len(files) > 1
        again = type(plain).from_pretrained(root / "pieces")
        assert_same_parameters(again.state_dict(), plain.state_dict())
        if kind == "mixtral":
            with pytest.raises(NotImplementedError, match="merges or splits tensors"):
                load_pretrained(type(plain), root / "plain")
        torch.manual_seed(dist.get_rank())  # Values come from the folder: no rank draws any.
        with recorded_warnings() as texts:
            loaded = load_pretrained(hf.AutoModelForCausalLM, root / "merged")
        assert not [each for each in texts if "differs between ranks" in each], kind
        with torch.no_grad():
            assert_bitwise(loaded(input_ids=ids).logits, plain(input_ids=ids).logits, kind)
        assert_same_parameters(dict(loaded.named_buffers()), dict(plain.named_buffers()))
    with pytest.raises(CheckpointError, match="Not a directory"):  # The first rank's, on all.
        save_pretrained(shard(build("llama")), tmp_path / "llama" / "plain" / "config.json" / "in")
    # Of the model without its head, whose names lack the prefix; the head is tied to what is there.
    if dist.get_rank() == 0:
        build("gpt2").transformer.save_pretrained(tmp_path / "bare")
    dist.barrier()
    loaded = load_pretrained(hf.GPT2LMHeadModel, tmp_path / "bare")
    assert_same_parameters(weights_of(loaded), build("gpt2").state_dict())
    # Ranks have prompts of other lengths, and stop at other times.
    prompt = torch.arange(1, 4 + dist.get_rank()).view(1, -1)
    chosen = {"max_new_tokens": 6 + 3 * dist.get_rank(), "do_sample": False, "pad_token_id": 0}
    in_place = build("gpt2").eval()
    for part in (*in_place.transformer.h, in_place):
        fully_shard(part)
    for each in (in_place, loaded.module):
        generated = each.generate(prompt, **chosen)
        assert torch.equal(generated, build("gpt2").eval().generate(prompt, **chosen))
    with loaded.summon_full_params(writeback=False):
        if dist.get_rank() == 0:  # Here one rank may generate alone.
            alone = loaded.module.generate(prompt, **chosen, synced_gpus=False)
            assert torch.equal(alone, generated)


def _loop(accelerator: Any, model: Any, optimizer: Any, loader: Any, steps: int) -> list[float]:
    losses = []
    for _, batch in zip(range(steps), loader, strict=False):
        with accelerator.accumulate(model):
            loss = model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1e3)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@on_ranks(2, timeout=120, in_float64=True)
def test_an_accelerators_loop_trains_a_sharded_model(tmp_path: Path) -> None:
    def parts(model: Any) -> tuple[Any, Any]:
        loader = torch.utils.data.DataLoader(Sentences(), batch_size=2)
        return torch.optim.AdamW(model.parameters(), 1e-2), loader

    as_if_launched(False)
    plain = Accelerator(cpu=True, gradient_accumulation_steps=4)
    reference = in_default_dtype(build("llama"))
    all_losses = _loop(plain, *plain.prepare(reference, *parts(reference)), 8)
    as_if_launched(True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    module = in_default_dtype(build("llama"))
    model, optimizer, loader = prepare(accelerator, module, *parts(module))
    assert isinstance(model, ZeRO3) and accelerator.unwrap_model(model) is module
    with recorded_operations(model) as operations:
        losses = _loop(accelerator, model, optimizer, loader, 4)
    assert len(reduced(operations)) == 2 * len(units(model))
    # Micro-batches 0, 2 | 1, 3 instead of 0, 1, 2, 3: of the first step no weight has changed.
    assert losses[:2] == all_losses[dist.get_rank() : 4 : 2]
    expected = torch.tensor(all_losses[4 + dist.get_rank() :: 2])
    assert_close_in_float64(torch.tensor(losses[2:]), expected, "loss")
    everything, whole = accelerator.get_state_dict(model), weights_of(model)
    if accelerator.is_main_process:
        assert_same_parameters(everything, whole)
    else:
        assert everything == {}
    accelerator.backward(model(input_ids=torch.arange(8).view(1, -1)).logits.square().mean())
    with model.summon_full_params(writeback=False, with_grads=True):
        gradients = [parameter.grad for parameter in model.parameters()]
    own = [*model.parameters()]
    for some, wholes in ((own[:1], gradients[:1]), (own, gradients)):
        norm = accelerator.clip_grad_norm_(some, 1e3)
        expected = torch.linalg.vector_norm(torch.stack([*map(torch.linalg.vector_norm, wholes)]))
        assert_close_in_float64(norm, expected, "norm")
    optimizer.zero_grad()

    shuffled, scheduler = accelerator.prepare(
        torch.utils.data.DataLoader(Sentences(), batch_size=2, shuffle=True),
        torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5),
    )

    def go_on() -> tuple[Any, ...]:
        losses = _loop(accelerator, model, optimizer, loader, 2)
        order = [batch["source"].tolist() for batch in shuffled]
        scheduler.step()
        return losses, order, scheduler.get_last_lr(), torch.rand(3).tolist()

    first = go_on()
    accelerator.save_state(str(tmp_path / "state"))
    before = weights_of(model)
    second = go_on()
    assert all(a != b for a, b in zip(first, second, strict=True))
    accelerator.load_state(str(tmp_path / "state"))
    assert_same_parameters(weights_of(model), before)
    for what, got, expected in zip(("loss", "order", "rate", "draw"), go_on(), second, strict=True):
        assert got == expected, f"{what}: {got}, {expected}"

    other = build("llama")
    with pytest.raises(ValueError, match="does not belong to the model"):
        prepare(accelerator, build("llama"), parts(other)[0])
    with pytest.raises(ValueError, match="AdamW has state of whole parameters"):
        prepare(accelerator, other, _stepped(other))
    with (
        mock.patch.object(type(accelerator), "distributed_type", DistributedType.FSDP),
        pytest.raises(ValueError, match=r"set up for FSDP.*pass options of ZeRO3 to prepare\(\)"),
    ):
        prepare(accelerator, build("llama"))


def _stepped(model: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    return optimizer


def _nameless() -> Any:
    model = build("llama")
    model._no_split_modules = model.model._no_split_modules = []
    return model


@on_ranks(2, timeout=60)
def test_arguments_reach_the_engine_or_are_refused_with_what_to_use(tmp_path: Path) -> None:
    as_if_launched(False)
    with pytest.raises(ValueError, match="accelerate detects 1, "):
        ZeRO3Trainer(build("llama"), arguments(tmp_path))
    as_if_launched(True)
    fsdp = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": 2}}
    model, quantized = build("llama"), build("llama")
    quantized.is_quantized = True
    for given, changes, options, message in (
        (model, {"optim": "adafactor"}, {}, "on shards: .*schedule_free_radam,.*WholeTensorOpt"),
        (model, {"auto_find_batch_size": True}, {}, "set per_device_train_batch_size"),
        (model, {"bf16_full_eval": True}, {}, "use bf16=True"),
        (model, fsdp, {}, "leave fsdp and fsdp_config out, and pass options as zero3="),
        (nn.Linear(2, 2), {}, {}, "pass auto_wrap_policy"),
        (quantized, {}, {}, "is quantized"),
        (fully_shard(build("llama")), {}, {}, "fully_shard has sharded it; pass it as it was bef"),
        (_nameless(), {}, {}, r"which match no module; .* in zero3={...} of a trainer"),
        (shard(model), {}, {"zero3": {"forward_prefetch": 2}}, "is sharded already"),
    ):
        with pytest.raises(ValueError, match=message):
            ZeRO3Trainer(given, arguments(tmp_path, **changes), **options)
    layers = {type(model.model.layers[0])}
    ZeRO3Trainer(_nameless(), arguments(tmp_path), zero3={"auto_wrap_policy": layers})
    # Models that differ begin with the first rank's values, as under DDP.
    model = build("llama")
    of_first = model.lm_head.weight.detach().clone()
    with torch.no_grad():
        model.lm_head.weight.add_(dist.get_rank())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = sharded_trainer(model, tmp_path, ddp_timeout=77)
    assert_bitwise(ours.model.lm_head.weight.layerzero.full_tensor(), of_first)
    unit = inner_units(ours.sharded_model)[0]
    assert unit.handles[0].placement.shard_group.limit.total_seconds() == 77
    layer = {"model.layers.1": "model.layers.1"}
    with recorded_regions() as found:
        optional = {"optional_modules": [*layer]}
        sharded_trainer(build("llama"), tmp_path, zero3=optional)
        prepare(Accelerator(cpu=True), build("llama"), optional_mean="participants", **optional)
    assert found == [(layer, "all"), (layer, "participants")]
    # An optimizer that was built first goes on with the shards, unless it has stepped.
    model = build("llama")
    adam = torch.optim.AdamW(model.parameters())
    trainer = ZeRO3Trainer(model, arguments(tmp_path), optimizers=(adam, None))
    assert all(get_info(p) is not None for p in adam.param_groups[0]["params"])
    model = build("llama")
    with pytest.raises(RuntimeError, match="built before wrapping and has state"):
        ZeRO3Trainer(model, arguments(tmp_path), optimizers=(_stepped(model), None))
    with pytest.raises(NotImplementedError, match="start one run of all ranks for each trial"):
        trainer.hyperparameter_search()
    with pytest.raises(ValueError, match="expected checkpoint-N"):
        trainer.train(resume_from_checkpoint=True)
    llama, own = type(model), {"distributed_config": {"fsdp_size": 2}}
    with pytest.raises(ValueError, match="snapshot_download"):
        load_pretrained(llama, "meta-llama/Llama-3.1-8B")
    if dist.get_rank() == 0:
        build("llama").save_pretrained(tmp_path)
    dist.barrier()
    with pytest.raises(ValueError, match=r"split it already, by distributed_config.*load_pretrain"):
        shard(llama.from_pretrained(tmp_path, **own))
    with pytest.raises(TypeError, match=r"no argument distributed_config .*: use zero3_size"):
        load_pretrained(llama, tmp_path, **own)


@needs_peft
@on_ranks(2, timeout=120)
def test_adapters_of_peft_train_and_are_saved_alone(tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    config = LoraConfig(r=3, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")

    def adapted() -> Any:
        return get_peft_model(build("llama"), config)

    steps = {"eval_strategy": "steps", "save_strategy": "steps"}
    best = {"load_best_model_at_end": True, "save_only_model": True, **steps}
    as_if_launched(True)
    with pytest.raises(NotImplementedError, match="with peft needs save_only_model=False"):
        ZeRO3Trainer(adapted(), arguments(tmp_path, **best))
    saves = {"save_strategy": "steps", "save_steps": 2}
    ddps = Path(tmp_path, f"plain{dist.get_rank()}")
    plain = trained(plain_trainer(adapted(), ddps, gradient_accumulation_steps=2, **saves))
    ours = trained(sharded_trainer(adapted(), tmp_path, **saves))
    assert logged(ours, "loss") == logged(plain, "loss")
    with pytest.raises(ValueError, match=r"To continue.*PeftModel.from_pretrained\(base, folder, "):
        ours.train(resume_from_checkpoint=str(ddps / "checkpoint-2"))
    adapters = PeftModel.from_pretrained(build("llama"), ddps / "checkpoint-2", is_trainable=True)
    count = adapters.get_nb_trainable_parameters()[0]
    going_on = trained(sharded_trainer(adapters, tmp_path))
    assert going_on.get_num_trainable_parameters() == count > 0
    assert going_on.state.global_step == 3
    with recorded_operations(ours.sharded_model) as operations:
        ours.save_model(str(tmp_path / "adapters"))
    assert {operation.unit for operation in operations} == {
        handle.fqns[0]
        for unit in inner_units(ours.sharded_model)
        for handle in unit.handles
        if "lora_" in handle.fqns[0]
    }
    again = PeftModel.from_pretrained(build("llama"), tmp_path / "adapters")
    assert_same_parameters(again.state_dict(), plain.model.state_dict())
    resumed = sharded_trainer(adapted(), tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert logged(resumed, "loss") == logged(ours, "loss")
    # The base goes straight into shards, and gets its adapters there.
    if dist.get_rank() == 0:
        build("llama").save_pretrained(tmp_path / "base")
    dist.barrier()
    loaded = load_pretrained(type(build("llama")), tmp_path / "base")
    build("llama")  # Draws what `adapted` draws before its adapters.
    into_shards = get_peft_model(loaded, config)
    base = into_shards.active_peft_config.base_model_name_or_path
    assert base == str(tmp_path / "base"), "the name under which peft would load the base again"
    ours = trained(sharded_trainer(into_shards, tmp_path, **saves))
    assert logged(ours, "loss") == logged(plain, "loss")
    ours.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert logged(ours, "loss") == logged(plain, "loss")
