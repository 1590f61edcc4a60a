"""Addresses that stay, and CUDA graphs of steps, which need them.

arena_layout.py   where each buffer lies in an arena: integers
arena.py          memory in which buffers keep their addresses (`arena=`)
capture.py        layerzero.capture, and what a graph forbids
"""
