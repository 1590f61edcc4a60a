"""The fault matrix: `python -m tests.faults`, or `make faults`."""
