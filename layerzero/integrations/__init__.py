"""Adapters to other frameworks; import each by itself.

See docs/reference/lightning.md, docs/reference/megatron.md and docs/reference/transformers.md.
"""
