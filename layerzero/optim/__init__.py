"""Between backward and the next forward: gradient clipping and loss scaling."""
