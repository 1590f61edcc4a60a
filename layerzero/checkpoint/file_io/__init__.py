"""Bytes between memory and files."""
