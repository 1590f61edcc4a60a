"""Every block of Python in docs/howto/*.md, and README's, runs on two ranks."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import layerzero
from layerzero import ZeRO3
from tests.harness.pages import DOCS, REPOSITORY, python_blocks, run_blocks, sections
from tests.harness.ranks import KeptRanks, on_ranks, run_ranks
from tests.harness.simulated_device import simulated_device

HOWTO = DOCS / "howto"
OF_THEIR_OWN = ("recipes.md", "from_fsdp2.md")
"""Pages with a test of their own."""
PAGES = sorted(path.name for path in HOWTO.glob("*.md") if path.name not in OF_THEIR_OWN)
NEEDS = {
    "hugging_face.md": ["transformers"],
    "lora.md": ["peft", "transformers"],
    "megatron.md": ["megatron.core"],
}

ALONE = ["hang.md", "logging.md", "npu_xpu.md", "several_machines.md", "wrap.md"]
"""Pages that leave their ranks as no other page finds them, as those of `NEEDS` do."""


@contextlib.contextmanager
def _surroundings(page: str, folder: str) -> Iterator[dict[str, Any]]:
    """What a page takes for granted beyond the names that all of them have."""
    if page in ("hugging_face.md", "lora.md"):
        yield _a_llama_folder(folder)
    elif page == "megatron.md":
        with _megatron() as names:
            yield names
    else:
        yield {}


def _a_llama_folder(folder: str) -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    # As torchrun sets them; accelerate reads these.
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ["HF_HUB_OFFLINE"] = "1"
    if dist.get_rank() == 0:
        config = LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
        LlamaForCausalLM(config).save_pretrained(f"{folder}/llama")
    dist.barrier()
    return {}


@contextlib.contextmanager
def _megatron() -> Iterator[dict[str, Any]]:
    from tests.integrations.megatron_ranks import LENGTH, VOCABULARY, gpt, megatron_on_cpu

    def model_provider(**place: Any) -> nn.Module:
        return gpt()

    def forward_step(data: Iterator[Tensor], model: Any) -> tuple[Tensor, Any]:
        tokens = next(data)
        seen, wanted = tokens[:, :-1], tokens[:, 1:].contiguous()
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
        output = model(seen, torch.arange(LENGTH).expand_as(seen), mask, labels=wanted)
        return output, lambda output: (output.mean(), {"loss": output.mean().detach()})

    def batches() -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(dist.get_rank())
        while True:
            yield torch.randint(VOCABULARY, (2, LENGTH + 1), generator=generator)

    with megatron_on_cpu():
        yield {
            "model_provider": model_provider,
            "config": gpt().config,
            "forward_step": forward_step,
            "data": batches(),
        }


def _run(page: str, folder: str) -> dict[str, Any]:
    blocks = python_blocks((HOWTO / page).read_text())
    if not hasattr(torch.UntypedStorage, "_swap_data_ptr_"):  # before torch 2.13
        blocks = [block for block in blocks if "arena=True" not in block]
    with _surroundings(page, folder) as more:
        names = run_blocks(blocks, page, folder, **more)
    plain = (str, int, float)
    return {name: value for name, value in names.items() if isinstance(value, plain)}


@pytest.mark.parametrize("page", PAGES)
def test_python_of_a_page_runs(page: str, tmp_path: Path, ranks: KeptRanks) -> None:
    for module in NEEDS.get(page, ()):
        pytest.importorskip(module)
    run = run_ranks if page in {*NEEDS, *ALONE} else ranks
    results = run(2, _run, page, str(tmp_path), timeout=120)
    if page == "hang.md":
        for each in results:
            assert "took different paths through the model" in each["report"]
            assert "all-gather of left" in each["report"]
            assert "all-gather of right" in each["report"]


def _ported(text: str) -> tuple[str, str]:
    """The page's script, before its diff and after it."""
    [script] = python_blocks(text)
    [diff] = re.findall(r"^```diff\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    lines = diff.splitlines()
    after = script
    for old, new in zip(lines[::2], lines[1::2], strict=True):
        assert (old[0], new[0], after.count(f"\n{old[1:]}\n")) == ("-", "+", 1), old
        after = after.replace(f"\n{old[1:]}\n", f"\n{new[1:]}\n")
    return script, after


@on_ranks(2, timeout=120)
def test_the_port_from_fsdp2_has_its_bits(tmp_path: Path) -> None:
    text = (HOWTO / "from_fsdp2.md").read_text()
    before, after = _ported(text)
    clip = "max_norm = 0.1"
    assert clip in before
    runs: list[dict[str, Any]] = []
    for name, script in (("torch", before), ("ours", after)):
        for max_norm in ("1e9", "0.1"):
            place = f"{tmp_path}/{name}"
            code = script.replace(clip, f"max_norm = {max_norm}").replace('"run"', repr(place))
            names: dict[str, Any] = {}
            with mock.patch.multiple(
                dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT
            ):
                exec(compile(code, name, "exec"), names)
            runs.append(names)
    torchs, torchs_clipped, ours, clipped = runs
    assert ours["losses"] == torchs["losses"] and ours["total"] == torchs["total"]
    assert max(clipped["norms"]) > 0.1, "clipping acts"
    assert ours["losses"] != clipped["losses"]
    assert clipped["losses"][:2] == torchs_clipped["losses"][:2]
    # A checkpoint of torch's engine is resumed by ours.
    for root in ("torch", "ours"):
        weights, state = ours["get_state_dict"](ours["model"], ours["optimizer"])
        ours["dcp"].load({"model": weights, "optimizer": state}, checkpoint_id=f"{tmp_path}/{root}")


def _readme(example: str, folder: Path) -> int:
    os.chdir(folder)
    names: dict[str, Any] = {}
    with mock.patch.object(dist, "init_process_group") as init:  # There is one.
        exec(compile(example, "README.md", "exec"), names)
    init.assert_called_once_with("gloo")
    assert not dist.is_initialized()
    return names["step"]


def _readme_on_gpus(example: str, folder: Path) -> None:
    """Its branches for GPUs, on a simulated device, whose memory is that of the CPU."""
    os.chdir(folder)
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    placed: list[str] = []

    def on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, device: str, **named: Any) -> Any:
            placed.append(device)
            return make(*args, device="cpu", **named)

        return made

    with (
        simulated_device() as device,
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "set_device") as set_device,
        # What optimizers of torch 2.11 ask CUDA itself.
        mock.patch.object(torch.cuda, "is_current_stream_capturing", bool),
        mock.patch.object(dist, "init_process_group") as init,
        mock.patch.object(dist, "destroy_process_group"),
        mock.patch.object(layerzero, "ZeRO3", on_cpu(ZeRO3)),
        mock.patch.object(torch, "randn", on_cpu(torch.randn)),
    ):
        exec(compile(example, "README.md", "exec"), {})
        assert not device.findings, "accesses that no wait orders"
    init.assert_called_once_with("nccl")
    set_device.assert_called_once_with(f"cuda:{dist.get_rank()}")
    assert placed == [f"cuda:{dist.get_rank()}"] * (1 + 10), "the model, and each step's batch"


def test_the_example_of_the_readme_takes_each_ranks_gpu(tmp_path: Path) -> None:
    [example] = python_blocks((REPOSITORY / "README.md").read_text())
    run_ranks(2, _readme_on_gpus, example, tmp_path)
    assert (tmp_path / "run" / "latest").read_text() == "step-00000010\n"


def test_the_example_of_the_readme_runs_on_two_ranks(tmp_path: Path) -> None:
    [example] = python_blocks((REPOSITORY / "README.md").read_text())
    assert len(example.splitlines()) <= 36
    assert run_ranks(2, _readme, example, tmp_path) == [10, 10]
    assert (tmp_path / "run" / "latest").read_text() == "step-00000010\n"
    assert run_ranks(3, _readme, example, tmp_path) == [20, 20, 20], "it resumes on other ranks"


PAGE = DOCS / "howto" / "recipes.md"
BLOCKS = {name: python_blocks(text) for name, text in sections(PAGE.read_text()).items()}


@pytest.mark.parametrize("heading", [name for name, blocks in BLOCKS.items() if blocks])
@on_ranks(2)
def test_recipe_runs(heading: str, tmp_path: Path) -> None:
    """The blocks of one section, one after the other, in one namespace."""
    run_blocks(BLOCKS[heading], f"{PAGE.name}, {heading}", str(tmp_path))
