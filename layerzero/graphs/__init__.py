"""Addresses that stay, and CUDA graphs of steps, which need them."""
