"""How bytes move: collectives on 1-D tensors, and the streams that they run on."""
