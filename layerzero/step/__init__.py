"""Schedules the step: units, execution order, prefetching, reductions, and the root they share."""
