"""WholeTensorOptimizer: any torch optimizer, on whole tensors with one owner rank each."""

from layerzero.optim.whole_tensor.optimizer import WholeTensorOptimizer as WholeTensorOptimizer
