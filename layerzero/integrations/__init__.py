"""Adapters to other frameworks, imported on demand.

See docs/lightning.md, docs/megatron.md and docs/transformers.md.
"""
