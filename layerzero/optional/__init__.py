"""Modules that a rank may skip (`optional_modules`): how ranks stay in step. Off by default.

Note [How ranks agree]
    Collectives of units that are not optional come in one order on every rank. Call them the
    *required* ones. Between two required gathers of a forward lies a *place*. At a place a rank may
    enter a region. Each rank says which one it enters, or that it goes on to the next required
    gather. If any enters one, all ranks gather its units, and they exchange again; once all go on,
    the place is over. A rank without a use for the region frees each unit at once.

    A rank that uses a region keeps its units until the backward of the forward has ended
    (`Hold.OPTIONAL`), so backward gathers none. Their gradients are reduced when the pass ends, by
    all ranks, if any has one. So nothing that a rank does with optional units alone starts a
    collective: such units are in no recorded order, no budget and no prefetch, and the gradient of
    their output finishes no other unit.

Note [What is learned]
    Once every region has been seen in forwards that took the same path, ranks exchange only at the
    places where one came, and where they are about to leave every recorded path. This depends on
    agreed facts alone, so every rank learns the same.
"""
