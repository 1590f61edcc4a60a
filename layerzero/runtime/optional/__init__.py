"""Units that a rank may skip in a pass while other ranks run them."""
