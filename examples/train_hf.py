"""See a Llama learn to count under transformers' Trainer, resume, and be saved and loaded again.

    pip install layerzero[hf]
    torchrun --standalone --nproc-per-node 2 examples/train_hf.py

Sharded by layerzero; nothing is downloaded. It trains in two halves, the second resumed from the
checkpoint of the first, is evaluated, saved to a folder, and loaded from it straight into shards.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from layerzero.integrations.transformers import ZeRO3Trainer, load_pretrained

VOCAB = 64


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count up from a number in steps of one, two or three."""

    def __len__(self) -> int:
        return 3 * VOCAB

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (index % VOCAB + torch.arange(12) * (1 + index // VOCAB)) % VOCAB
        return {"input_ids": ids, "labels": ids}


def make_model() -> LlamaForCausalLM:
    """A model on the meta device; every rank initialises it unit by unit."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def make_trainer(folder: Path, steps: int, use_cpu: bool) -> ZeRO3Trainer:
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        max_steps=steps,
        save_strategy="epoch",
        logging_strategy="epoch",
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        use_cpu=use_cpu,
        report_to=[],
        disable_tqdm=True,
    )
    model = make_model()
    return ZeRO3Trainer(model, args, train_dataset=Counting(), eval_dataset=Counting())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="an even number")
    parser.add_argument("--out", type=Path, default=Path("out/train_hf"), help="where it writes")
    options = parser.parse_args()
    train(options.out, options.steps, use_cpu=not torch.cuda.is_available())
    dist.destroy_process_group()  # TrainingArguments made it.


def train(folder: Path, steps: int, use_cpu: bool) -> list[int]:
    make_trainer(folder, steps // 2, use_cpu).train()
    trainer = make_trainer(folder, steps, use_cpu)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{steps // 2}"))
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(folder / "model"))

    model = load_pretrained(LlamaForCausalLM, folder / "model", device=trainer.args.device)
    prompt = torch.tensor([[10, 12, 14]], device=trainer.args.device)
    counted = model.module.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)
    answer: list[int] = counted[0, 3:].tolist()
    if dist.get_rank() == 0:
        print(f"evaluation loss {loss:.3f}; goes on from 10 12 14 with", *answer)
    return answer


if __name__ == "__main__":
    main()
