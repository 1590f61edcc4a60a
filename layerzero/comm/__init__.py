"""How bytes move: collectives on 1-D tensors, the streams they run on, and what detects hangs."""
