"""`ZeRO3(memory_budget=...)`: what stays full is chosen by memory. See docs/howto/memory.md."""

from layerzero.memory_budget.choice import MemoryChoice
from layerzero.memory_budget.learner import Learner

__all__ = ["Learner", "MemoryChoice"]
