"""What a rank will hold: `plan_memory`. See docs/howto/memory.md."""

from layerzero.memory_plan.plan import MemoryPlan, plan_memory

__all__ = ["MemoryPlan", "plan_memory"]
