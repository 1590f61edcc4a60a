"""Ranks with uneven numbers of batches: those that ran out shadow the others. On by use only.

    wishes.py      what a rank wants to do next, and which wish all ranks follow; pure Python
    optimizers.py  the optimizers of a joined loop, on a rank that follows the others
    scalers.py     the same for its gradient scalers
    seat.py        what a join keeps of this rank
    table.py       the exchange: what each rank brings
    meeting.py     what ranks make of it: what all do next, or an error on every rank
    agreement.py, scheduler.py, reducer.py, backward.py   the engine's classes inside a join
    shadow.py      how a rank takes part in what it does not run
    root.py        the root, which says what this rank wants; loan.py: its parts change classes
    joinable.py    ZeRO3 as a `torch.distributed.algorithms.join.Joinable`
    context.py     `layerzero.join`

Note [How a rank shadows]
    Inside a join all units are optional (see `layerzero.optional`), as one region. Before
    each forward, backward, clipping and step, ranks exchange what they want to do next, and all
    choose the same wish. Ranks with that wish run it. The others take part in its collectives with
    nothing of their own, and exchange again, with the wish that they had. A rank that is out of
    batches wants nothing any more. What needs the sum over all micro-batches is chosen only once
    every rank with batches left wants it; so ranks may differ in the number of micro-batches, too.
"""
