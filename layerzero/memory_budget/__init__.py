"""`ZeRO3(memory_budget=...)`: what stays full is chosen by memory. See docs/howto/memory.md."""

from layerzero.memory_budget.learner import Learner, MemoryChoice

__all__ = ["Learner", "MemoryChoice"]
