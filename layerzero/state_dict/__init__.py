"""State dicts: the entries of each rank, gathering them to full tensors, and loading them."""
