"""Experts: units that only some ranks of the model have (docs/reference/parallelism.md).

units.py   which units are experts, what ranks check about them, their placement, their numbers
names.py   global names in state dicts and checkpoints
"""
