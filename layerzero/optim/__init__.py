"""Between backward and the next forward: what needs more than this rank's pieces to be right.

An optimizer that treats each element by itself (SGD, Adam, AdamW, ...) needs nothing from here. A
norm, a rule by shape, a decision of all ranks does.
"""

# These wait for optimizers that get pieces.
from layerzero.optim import element_wise as element_wise
from layerzero.optim import foreign_norms as foreign_norms
from layerzero.optim import refused as refused
from layerzero.optim.decay import decay_groups
from layerzero.optim.norm import global_norm
from layerzero.optim.scaler import GradScaler

__all__ = ["GradScaler", "decay_groups", "global_norm"]
