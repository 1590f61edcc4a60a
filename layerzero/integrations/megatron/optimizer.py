"""get_zero3_optimizer: a MegatronOptimizer that updates this rank's sharded parameters.

See docs/reference/megatron.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

import torch
from megatron.core.optimizer import _get_param_groups, get_standard_config_overrides
from megatron.core.optimizer.grad_scaler import (
    ConstantGradScaler,
    DynamicGradScaler,
    MegatronGradScaler,
)
from megatron.core.optimizer.optimizer import MegatronOptimizer

from layerzero import ZeRO3
from layerzero.checkpoint import CheckpointError
from layerzero.integrations.engine import Totals
from layerzero.integrations.megatron.arguments import check_chunks, check_optimizer_config
from layerzero.integrations.megatron.checkpoint import Shards, sharded_of, stand_ins
from layerzero.integrations.megatron.data_parallel import ZeRO3DataParallel
from layerzero.integrations.megatron.optimizer_checkpoint import (
    load_optimizer_state_dict,
    optimizer_sharded_state_dict,
)
from layerzero.integrations.megatron.several import AnyOptimizer, one_or_several

_SHARDS = "pieces"  # As in files that exist.
"""Key of our per-rank optimizer state; no Megatron format uses it."""
MakeOptimizer = Callable[
    [list[dict[str, Any]]], torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]
]


def get_zero3_optimizer(
    config: Any,
    model_chunks: Sequence[ZeRO3DataParallel],
    config_overrides: Any = None,
    use_gloo_process_groups: bool = True,
    pg_collection: Any = None,
    dump_param_to_param_group_map: str | None = None,
    *,
    make_optimizer: MakeOptimizer | None = None,
) -> ZeRO3Optimizer:
    """Make the optimizer for `ZeRO3DataParallel` chunks, in place of `get_megatron_optimizer`.

    Collective over all ranks.

    Args:
        config: Megatron's OptimizerConfig: 'adam' or 'sgd', clipping, loss scaling.
        model_chunks: chunks of this rank, in the order of virtual stages.
        config_overrides: Megatron's overrides for some parameters, matched with the shapes, names
            and attributes of the original parameters. None: Megatron's standard ones (no weight
            decay for vectors, `decoupled_lr` for embeddings and output).
        use_gloo_process_groups, dump_param_to_param_group_map: no effect.
        pg_collection: no effect: the process groups are those of the chunks.
        make_optimizer: called with the parameter groups to make the optimizer: an element-wise
            one, or a WholeTensorOptimizer of a single chunk without tensor-parallel parameters. Or
            several, as a dict by name, each with some of the parameters.

    Raises:
        ValueError, NotImplementedError: something is not supported; says what to use.
    """
    chunks = list(model_chunks)
    check_chunks(chunks[0].config, len(chunks))
    check_optimizer_config(config, make_optimizer is not None)
    groups = parameter_groups(chunks, config, config_overrides)
    optimizer = None
    if any(group["params"] for group in groups):
        names = {id(p): name for chunk in chunks for name, p in chunk.named_parameters()}
        # The dicts are the optimizer's from here on.
        given = [{**group, "params": list(group["params"])} for group in groups]
        made = (make_optimizer or _maker(config))(given)
        optimizer = one_or_several(made, groups, names, chunks[0].ranks.tensor.size())
    return ZeRO3Optimizer(optimizer, config, chunks, _make_grad_scaler(config))


def parameter_groups(
    chunks: Sequence[ZeRO3DataParallel], config: Any, config_overrides: Any
) -> list[dict[str, Any]]:
    """Megatron's parameter groups, chosen by the original parameters. Collective over all ranks.

    Every rank has the same groups, some of them empty, as Megatron's checkpoints require.
    """
    if config_overrides is None:  # Only some versions of `_get_param_groups` fill in the default.
        config_overrides = get_standard_config_overrides(config)
    shards: Shards = {}
    with ExitStack() as shown:
        for chunk in chunks:
            shards |= shown.enter_context(stand_ins(chunk.engine))
        groups: list[dict[str, Any]] = _get_param_groups(list(chunks), config, config_overrides)
    for group in groups:
        group["params"] = [sharded_of(each, shards) for each in group["params"]]
    return groups


def _maker(config: Any) -> MakeOptimizer:
    common = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.optimizer == "sgd":
        return lambda groups: torch.optim.SGD(groups, momentum=config.sgd_momentum, **common)
    kind = torch.optim.AdamW if config.decoupled_weight_decay else torch.optim.Adam
    betas = (config.adam_beta1, config.adam_beta2)
    return lambda groups: kind(groups, betas=betas, eps=config.adam_eps, **common)


def _make_grad_scaler(config: Any) -> MegatronGradScaler | None:
    if not (config.fp16 or config.bf16):
        return None
    if config.loss_scale:
        return ConstantGradScaler(config.loss_scale)
    if not config.fp16:
        return None
    return DynamicGradScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )


def _common_placement(chunks: Sequence[ZeRO3DataParallel]) -> Any:
    """The placement of the whole model, whose groups visit each shard, experts' as well, once."""
    placements = {each for chunk in chunks for each in chunk.root.placements}
    experts = {each for each in placements if each.data_parallel is not None}
    wholes = {each.data_parallel or each for each in placements}
    if len(wholes) > 1:
        raise NotImplementedError(
            "chunks with different shardings are not supported: give all chunks the same groups"
        )
    whole = wholes.pop()
    if experts and any(each.owned_slices > 1 for each in (whole, *experts)):
        raise NotImplementedError(
            "outer='replicate': a norm would count shards of experts too often; use outer='zero1'"
        )
    return whole


class ZeRO3Optimizer(MegatronOptimizer):
    """Updates the sharded parameters of a rank's chunks; made by `get_zero3_optimizer`.

    Attributes:
        optimizer: torch optimizer of the sharded parameters, or SeveralOptimizers; None if the rank
            trains none.
        grad_scaler: Megatron's grad scaler, or None.
        chunks: the wrapped chunks.
    """

    def __init__(
        self,
        optimizer: AnyOptimizer | None,
        config: Any,
        chunks: Sequence[ZeRO3DataParallel],
        grad_scaler: MegatronGradScaler | None,
    ) -> None:
        super().__init__(optimizer, config, lambda *_: None)
        self.is_stub_optimizer = optimizer is None
        self.grad_scaler = grad_scaler
        self.chunks = list(chunks)
        self._device = self.chunks[0].root.device
        self._one = torch.ones(1, device=self._device)
        self._ranks = self.chunks[0].ranks
        groups = _common_placement(self.chunks).norm_groups
        self._totals = Totals(self.chunks[0].root, groups, self._ranks.model)

    def _gradients(self, of_copies: bool) -> list[list[torch.Tensor]]:
        """Gradients of the optimizer's parameters, grouped by device (some may be offloaded);
        `of_copies`: also those whose elements are counted on another rank."""
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for sharded_param in self.get_parameters():
            gradient = sharded_param.grad
            is_counted = of_copies or self._ranks.counts(sharded_param)
            if gradient is not None and gradient.numel() and is_counted:
                by_device.setdefault(gradient.device, []).append(gradient)
        return list(by_device.values())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters of all chunks."""
        for chunk in self.chunks:
            chunk.engine.zero_grad(set_to_none)

    def get_loss_scale(self) -> torch.Tensor:
        """The factor for losses, a tensor of shape [1]."""
        return self._one if self.grad_scaler is None else self.grad_scaler.scale

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Divide gradients by the loss scale, and update the scale.

        With a grad scaler, collective over all ranks of the model (data-, tensor-, pipeline- and
        context-parallel), and blocks the host.

        Returns:
            Whether any gradient is not finite; the same on all ranks of the model.
        """
        if self.grad_scaler is None:
            return False
        found = torch.zeros(1, device=self._device)
        for gradients in self._gradients(of_copies=True):
            here = torch.zeros(1, device=gradients[0].device)
            inverse = self.grad_scaler.inv_scale.to(here.device)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, here, inverse)
            torch.autograd.graph.increment_version(gradients)  # The op does not.
            found += here.to(self._device)
        overflows = bool(self._totals.sum("overflow agreement", found).item() > 0)
        self.grad_scaler.update(overflows)
        return overflows

    @torch.no_grad()
    def get_grad_norm(self) -> float:
        """L2 norm of all gradients of the model, each element counted once.

        Collective over all ranks of the model; blocks the host.
        """
        power = torch.zeros((), dtype=torch.float64, device=self._device)
        for gradients in self._gradients(of_copies=False):
            norms = torch._foreach_norm(gradients, 2.0, dtype=torch.float32)
            power += torch.stack(norms).double().square().sum().to(self._device)
        return math.sqrt(self._totals.sum("gradient norm", power).item())

    @torch.no_grad()
    def clip_grad_norm(self, clip_grad: float) -> float:
        """Scale gradients to a norm of at most `clip_grad`; returns the norm before.

        Collective over all ranks of the model; blocks the host.
        """
        norm = self.get_grad_norm()
        scale = clip_grad / (norm + 1e-6)
        if scale < 1.0:
            for chunk in self.chunks:
                chunk.scale_gradients(scale)
        return norm

    def get_grad_stats_parallel_group(self) -> NoReturn:
        """Called by a ChainedOptimizer of several, which would sum norms over this group alone.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "ChainedOptimizer: its gradient norm leaves out the data-parallel ranks; make one "
            "ZeRO3Optimizer, whose make_optimizer returns a dict of optimizers by name"
        )

    @torch.no_grad()
    def count_zeros(self) -> float:
        """Number of zero elements in all gradients of the model. Collective; blocks the host."""
        zeros = torch.zeros((), dtype=torch.int64, device=self._device)
        for gradients in self._gradients(of_copies=False):
            others = torch.stack([gradient.count_nonzero() for gradient in gradients]).sum()
            zeros += sum(gradient.numel() for gradient in gradients) - others.to(self._device)
        return float(self._totals.sum("count of zeros", zeros).item())

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Step the torch optimizer. Collective with a WholeTensorOptimizer only. Returns True."""
        if self.optimizer is not None:
            self.optimizer.step()
        return True

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, float | None]:
        """Unscale, clip, count zeros, step. Collective over all ranks of the model.

        Returns:
            Whether the step was made (False if a gradient was not finite); the norm before
            clipping, None without clipping; the number of zeros, None unless
            `log_num_zeros_in_grad`.
        """
        if self.prepare_grads():
            return False, None, None
        clip = self.config.clip_grad
        norm = self.clip_grad_norm(clip) if clip > 0.0 else None
        zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else None
        return self.step_with_ready_grads(), norm, zeros

    def reload_model_params(self, state_dict: Mapping[str, Any] | None = None) -> None:
        """Load the chunks from a state dict. Not collective.

        Without one it does nothing: model and optimizer share the sharded parameters, so loading
        the model has loaded them.

        Args:
            state_dict: a checkpoint of this rank's stage and tensor-parallel part, with what
                `load_state_dict` of a chunk takes under "model", or "model0", "model1", ... for
                several chunks.
        """
        for number, chunk in enumerate(self.chunks if state_dict is not None else ()):
            key = f"model{number}" if len(self.chunks) > 1 else "model"
            chunk.load_state_dict((state_dict or {})[key])

    def state_dict(self) -> dict[str, Any]:
        """State of this rank's shards. Not collective; loads only with the same ranks and units."""
        state: dict[str, Any] = {}
        if self.optimizer is not None:
            state[_SHARDS] = self.optimizer.state_dict()
        return {**state, **self._scaler_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, or what was loaded for `sharded_state_dict`.

        Not collective.

        Raises:
            ValueError: it is the state of other parameters, ranks or units.
        """
        if self.optimizer is not None and _SHARDS in state_dict:
            try:
                self.optimizer.load_state_dict(state_dict[_SHARDS])
            except (CheckpointError, ValueError) as error:
                raise ValueError(
                    f"{error}; it belongs to another rank, or to other units"
                ) from error
        elif self.optimizer is not None:
            load_optimizer_state_dict(self._engines, self.optimizer, state_dict)
        if self.grad_scaler is not None and "grad_scaler" in state_dict:
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])

    def sharded_state_dict(
        self,
        model_sharded_state_dict: Any,
        is_loading: bool = False,
        metadata: dict[str, Any] | None = None,
        **_: Any,
    ) -> dict[str, Any]:
        """State dict for Megatron's distributed checkpoints, in its format. Not collective."""
        state = optimizer_sharded_state_dict(
            self._engines, self.optimizer, model_sharded_state_dict, is_loading, metadata
        )
        return {**state, **self._scaler_state()}

    @property
    def _engines(self) -> list[ZeRO3]:
        return [chunk.engine for chunk in self.chunks]

    def _scaler_state(self) -> dict[str, Any]:
        return {} if self.grad_scaler is None else {"grad_scaler": self.grad_scaler.state_dict()}
