"""Transport on gloo: named messages between pairs of ranks, which carry the collectives there."""
