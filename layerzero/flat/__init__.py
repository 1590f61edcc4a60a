"""Sharded parameters: layout, buffers, views. No autograd, no policy."""
