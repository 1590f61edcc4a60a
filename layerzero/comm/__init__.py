"""How bytes move: stateless verbs on 1-D tensors, and the streams they run on."""
