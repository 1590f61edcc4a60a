"""What `python -m layerzero.checkpoint` does: look at, verify and convert checkpoints."""
