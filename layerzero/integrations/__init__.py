"""Adapters to other frameworks, one file each, imported on demand: docs/lightning.md."""
