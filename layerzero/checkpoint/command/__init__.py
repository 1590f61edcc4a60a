"""Commands of `python -m layerzero.checkpoint`: inspect, verify and convert."""
