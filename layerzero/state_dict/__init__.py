"""State dicts: what a rank's entries are, how they become full tensors and are loaded again."""
