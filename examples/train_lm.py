"""Train a language model and see loss, lr, norm, tokens/s, memory and time left. Copy this one.

    torchrun --standalone --nproc-per-node 2 -- examples/train_lm.py --steps 50

Also runs as a single process, `python examples/train_lm.py`. Rank 0 prints progress, writes `--log`
(one JSON object a step) and calls `on_step`, where a tracker goes. Model, data, optimizer and
clipping are the same for every `--engine`, so loss, speed and memory can be compared line by line.
With `--checkpoint-dir`, a run may be killed at any time and resumed with `--resume`.
"""

import functools
import json
import math
import os
import sys
import time
from datetime import timedelta
from typing import Any, NamedTuple

if __name__ == "__main__" and "RANK" not in os.environ:
    print("Training a small language model: torch starts", flush=True)

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lm_engines import Wrapped, wrap
from lm_launcher import leave_with_launcher
from lm_model import ByteTransformer
from lm_options import Options, Place, load_options_on_rank
from lm_report import MemoryMeter, StepRecord, StepReport, save_loss_curve
from lm_resume import Checkpoints, Run
from torch import Tensor, nn

# Higher than ordinary steps reach. Engines sum the norm in different orders, so losses are bit for
# bit equal on two CPU ranks only while nothing is clipped.
MAX_GRAD_NORM = 100.0
WEIGHT_DECAY = 0.1
WARMUP_FRACTION = 0.25
FINAL_LR_FRACTION = 0.1
SAMPLE_PROMPT = b"\n    def "
SAMPLE_NUM_BYTES = 160
SAMPLE_TEMPERATURE = 0.8
# Far longer than any step of this example: a rank that waits this long waits for a dead rank.
COLLECTIVE_TIMEOUT = timedelta(minutes=2)


def join_group(place: Place) -> torch.device:
    """Join the ranks of the launcher, or a group of one; returns the device to compute on."""
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= place.local_world_size
    device = torch.device("cuda", place.local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    backend = "nccl" if on_gpu else "gloo"
    if place.world_size > 1:
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    else:
        # A single process may have no launcher, and so no address for a rendezvous.
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


class Batches:
    """Random windows of the text.

    Every rank draws the offsets of the whole global batch and keeps its own slice, so the data of a
    step depends on the seed and the global batch, not on the number of ranks. The position in the
    data is therefore the same on all ranks: the generator's state. A run resumed at another number
    of ranks gets the same windows if ranks x batch is the same, otherwise the next windows in
    batches of another size.
    """

    def __init__(self, corpus: bytearray, options: Options, place: Place) -> None:
        self._corpus = torch.frombuffer(corpus, dtype=torch.uint8)
        self._window = torch.arange(options.seq + 1)
        self._num_global = place.world_size * options.batch
        self._mine = slice(place.rank * options.batch, (place.rank + 1) * options.batch)
        self._generator = torch.Generator().manual_seed(options.seed)

    def draw(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Inputs and the bytes that follow them, each int64 [batch, seq]."""
        num_starts = len(self._corpus) - len(self._window) + 1
        starts = torch.randint(num_starts, (self._num_global, 1), generator=self._generator)
        windows = self._corpus[starts[self._mine] + self._window].long().to(device)
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self._generator.set_state(state["generator"])


def build_optimizer(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """AdamW with weight decay for matrices.

    Matrices are found by name, because a sharded parameter may have another shape.
    """
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (plain if "norm" in name else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": WEIGHT_DECAY},
        {"params": plain, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.99))


def lr_factor(step: int, num_steps: int) -> float:
    """Linear warm-up, then a cosine down to `FINAL_LR_FRACTION`; `step` counts from 0."""
    num_warmup = max(1, round(WARMUP_FRACTION * num_steps))
    if step < num_warmup:
        return (step + 1) / num_warmup
    progress = (step - num_warmup) / max(1, num_steps - num_warmup)
    return FINAL_LR_FRACTION + (1 - FINAL_LR_FRACTION) * 0.5 * (1 + math.cos(math.pi * progress))


def on_step(record: StepRecord) -> None:
    """Rank 0 calls this after each step. For a tracker: `wandb.log(record._asdict(), record.step)`,
    or `writer.add_scalar("loss", record.loss, record.step)` of a TensorBoard SummaryWriter."""


class Gathered(NamedTuple):
    rank_losses: list[float]
    peak_nbytes: int


def gather_over_ranks(loss: Tensor, peak_nbytes: int) -> Gathered:
    """Every rank's loss and the largest peak. Collective. float64 holds both exactly."""
    mine = torch.stack((loss.detach().double(), loss.new_tensor(peak_nbytes, dtype=torch.float64)))
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    losses, peaks = torch.stack(everyones).t().tolist()
    return Gathered(losses, int(max(peaks)))


class Outcome(NamedTuple):
    losses: list[float]
    """Loss of each step, including those before a resume."""
    tokens_per_s: float | None
    """Speed of all ranks in this process's steps; None if a resumed run had none left to do."""
    peak_nbytes: int | None


def train(
    wrapped: Wrapped, corpus: bytearray, meter: MemoryMeter, options: Options, place: Place
) -> Outcome:
    """Run all steps; only rank 0 reports. Collective over the default group."""
    model = wrapped.model.train()
    batches = Batches(corpus, options, place)
    optimizer = build_optimizer(model, options.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_factor(step, options.steps)
    )
    run = Run(model, optimizer, schedule, batches, meter.device)
    checkpoints = Checkpoints(options, place, corpus, run)
    losses = checkpoints.resume()
    num_done = len(losses)
    report = StepReport(options.steps, options.log, num_done) if place.rank == 0 else None
    step_tokens = place.world_size * options.batch * options.seq
    peak_nbytes = None
    run_started = time.perf_counter()
    for step in range(num_done + 1, options.steps + 1):
        step_started = time.perf_counter()
        inputs, targets = batches.draw(meter.device)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        grad_norm = wrapped.clip_grad_norm(MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        lr = schedule.get_last_lr()[0]
        schedule.step()

        rank_losses, peak_nbytes = gather_over_ranks(loss, meter.peak_nbytes())
        losses.append(sum(rank_losses) / len(rank_losses))
        if report is not None:
            tokens_per_s = step_tokens / (time.perf_counter() - step_started)
            record = StepRecord(
                step, losses[-1], rank_losses, lr, grad_norm.item(), tokens_per_s, peak_nbytes
            )
            report.add(record)
            on_step(record)
        checkpoints.save_if_due(losses)
    run_s = time.perf_counter() - run_started
    if report is not None:
        report.close()
    num_steps = options.steps - num_done
    return Outcome(losses, num_steps * step_tokens / run_s if num_steps else None, peak_nbytes)


@torch.no_grad()
def sample(model: nn.Module, options: Options, place: Place, device: torch.device) -> None:
    """Let the model continue a prompt; rank 0 prints each byte as it comes.

    Collective: all ranks run each forward, on equal bytes.
    """
    say = functools.partial(print, end="", flush=True) if place.rank == 0 else lambda _: None
    say(f"Sampling {SAMPLE_NUM_BYTES} bytes from the trained model:{SAMPLE_PROMPT.decode()}")
    model.eval()
    generator = torch.Generator().manual_seed(options.seed)
    text = torch.tensor([list(SAMPLE_PROMPT)])
    for _ in range(SAMPLE_NUM_BYTES):
        logits = model(text[:, -options.seq :].to(device))[:, -1].float().cpu()
        weights = torch.softmax(logits / SAMPLE_TEMPERATURE, dim=-1)
        byte = torch.multinomial(weights, 1, generator=generator)
        text = torch.cat((text, byte), dim=1)
        # Control codes are left out: a terminal would obey them.
        char = chr(int(byte))
        say(char if char == "\n" or " " <= char <= "~" else "\N{REPLACEMENT CHARACTER}")
    say("\n")


def publish(outcome: Outcome, options: Options) -> None:
    """Write the curve and the results to `--out`; print the results."""
    save_loss_curve(
        outcome.losses, f"Byte-level transformer under {options.engine}", options.out / "loss.png"
    )
    results = json.dumps(
        {
            "engine": options.engine,
            "steps": options.steps,
            "first_loss": outcome.losses[0],
            "last_loss": outcome.losses[-1],
            "tokens_per_s": outcome.tokens_per_s,
            "peak_bytes": outcome.peak_nbytes,
        }
    )
    (options.out / "results.json").write_text(results + "\n")
    print(f"Loss curve: {options.out / 'loss.png'}")
    print(results, flush=True)


def header(wrapped: Wrapped, num_parameters: int, options: Options, place: Place) -> str:
    """What is trained, by what, on what, and where results go."""
    device = next(wrapped.model.parameters()).device.type
    outputs = [options.out / "loss.png", options.out / "results.json"]
    outputs += [path for path in (options.log, options.checkpoint_dir) if path is not None]
    return (
        f"Model: {options.layers} layers of width {options.width}, {num_parameters:,} parameters\n"
        f"Engine: {options.engine}, {wrapped.layout}\n"
        f"Ranks: {place.world_size} on {device} ({dist.get_backend()})\n"
        f"Output: {', '.join(map(str, outputs))}"
    )


def train_and_sample(
    options: Options, corpus: bytearray, place: Place, device: torch.device
) -> Outcome:
    """Build, train and sample. Collective over the default group."""
    meter = MemoryMeter(device)
    torch.manual_seed(options.seed)
    model = ByteTransformer(options.layers, options.width, options.seq)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    wrapped = wrap(options.engine, model, device)
    if place.rank == 0:
        print(header(wrapped, num_parameters, options, place), flush=True)
    outcome = train(wrapped, corpus, meter, options, place)
    sample(wrapped.model, options, place, device)
    return outcome


def main() -> None:
    place = Place.from_environment()
    options, corpus = load_options_on_rank(sys.argv[1:], place)
    if options.checkpoint_dir is not None:
        leave_with_launcher()
    device = join_group(place)
    outcome = train_and_sample(options, corpus, place, device)
    # Not in a `finally`: a failed rank must end at once, but destroying a group may wait for other
    # ranks.
    dist.destroy_process_group()
    if place.rank == 0:
        publish(outcome, options)


if __name__ == "__main__":
    main()
