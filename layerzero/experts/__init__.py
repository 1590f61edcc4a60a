"""Experts: units that only some ranks of the model have (docs/reference/parallelism.md).

units.py     which units are experts, what ranks check about them, and their placement
numbers.py   global numbers of experts that have the same names on every rank
names.py     global names in state dicts and checkpoints
"""
