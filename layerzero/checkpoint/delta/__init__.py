"""Weights out as deltas: patches of changed elements, their receiver, and ways to move them."""
