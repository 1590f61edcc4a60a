"""A decoder with the names of Llama's plan, for tensor- and context-parallel ranks."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.utils.checkpoint import checkpoint

VOCAB = 13  # The two parts of a table are unequal.


class Attention(nn.Module):
    """Causal; heads are what its rows make, and may share keys and values. With a `group` of
    context-parallel ranks: queries of a part of the sequence, keys and values of all of it."""

    group: dist.ProcessGroup | None = None

    def __init__(
        self,
        width: int,
        head_dim: int = 4,
        heads: int = 2,
        kv_heads: int = 2,
        bias: bool = False,
        out_bias: bool = True,
        norms: bool = False,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(width, heads * head_dim, bias)
        self.k_proj = nn.Linear(width, kv_heads * head_dim, bias)
        self.v_proj = nn.Linear(width, kv_heads * head_dim, bias)
        self.o_proj = nn.Linear(heads * head_dim, width, out_bias)
        if norms:
            self.q_norm, self.k_norm = (nn.RMSNorm(head_dim, eps=1e-6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (each(x).unflatten(-1, (-1, self.head_dim)) for each in projections)
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        length, start = x.shape[1], 0
        if self.group is not None:
            start = length * self.group.rank()
            # torch 2.11 gathers only what is contiguous.
            k, v = (all_gather_tensor_autograd(e.contiguous(), 1, self.group) for e in (k, v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        visible = torch.arange(k.shape[2]) <= torch.arange(length)[:, None] + start
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class GatedMlp(nn.Module):
    def __init__(self, width: int = 8, hidden: int = 12, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias)
        self.up_proj = nn.Linear(width, hidden, bias)
        self.down_proj = nn.Linear(hidden, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, *parts: nn.Module, recomputes: bool = False) -> None:
        """`parts`: in the order in which they run."""
        super().__init__()
        self.input_layernorm, self.self_attn, self.post_attention_layernorm, self.mlp = parts
        self.recomputes = recomputes

    def _run(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._run, x, use_reentrant=False) if self.recomputes else self._run(x)


class Decoder(nn.Module):
    """Takes [batch, length + 1] integers, or a part of them and of those that come next; returns
    the loss."""

    def __init__(
        self, width: int, layers: Sequence[nn.Module], norm: nn.Module, tied: bool = False
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, width)
        self.layers, self.norm = nn.ModuleList(layers), norm
        self.lm_head = nn.Linear(width, VOCAB, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, symbols: Tensor, following: Tensor | None = None) -> Tensor:
        if following is None:
            symbols, following = symbols[:, :-1], symbols[:, 1:]
        x = self.embed_tokens(symbols)
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), following.flatten())
