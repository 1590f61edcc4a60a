"""Ranks with uneven numbers of batches: those that ran out follow the others. On by use only.

Note [How a rank follows]
    Before each forward, backward, clipping and step, ranks exchange what they want to do next, and
    all choose the same request. If it is the request of all, they run it as outside of a join. Else
    ranks with that request run it; the others take part in its collectives with nothing of their
    own (`Follower`), and exchange again, with the request that they had. A rank that is out of
    batches requests nothing any more. What needs the sum over all micro-batches is chosen only once
    every rank with batches left requests it; so ranks may differ in the number of micro-batches,
    too.
"""
