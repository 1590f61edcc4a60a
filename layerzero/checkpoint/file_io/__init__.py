"""Moves bytes between memory and files."""
