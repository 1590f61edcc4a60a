"""Adapters to other frameworks, imported on demand.

See docs/reference/lightning.md, docs/reference/megatron.md and docs/reference/transformers.md.
"""
