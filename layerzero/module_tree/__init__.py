"""The module tree after wrapping: whether it is as it was, and what is done to its modules."""
