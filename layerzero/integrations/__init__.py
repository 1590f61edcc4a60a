"""Adapters to other frameworks, imported on demand (docs/lightning.md, docs/transformers.md)."""
