"""Modules that a rank may skip (`optional_modules`): how ranks stay in step. Off by default.

    optional_units.py   the extension that a model with optional units has; makes its root
    places.py      where in a pass optional units came before; pure Python
    agreement.py   what all ranks do next; one small exchange on the host
    meeting.py     the same without anything learned, for `uneven/`
    schedule.py, reductions.py   what the scheduler and the reducer consult before collectives
    creation_times.py   which units are done when a recomputation begins; pure Python

Note [How ranks agree]
    Collectives of units that are not optional come in one order on every rank. Call them the
    *required* ones. Between two of them lies a *place*. At a place a rank may want collectives of
    optional units: a gather, in backward also a reduction. Each rank says what it wants, or that
    it goes on to the next required collective. If any wants one, all ranks take part in it, and
    they exchange again; once all go on, the place is over. A rank that takes part in a gather
    without a use for it frees the unit at once; to a reduction it brings zeros.

Note [What is learned]
    After one exchange the ranks also follow, without another, what came next the last time in the
    same region (the *contract*). Whoever wants something else first takes part in the rest. And
    once every optional unit has been seen in passes that took the same path, ranks exchange only
    at the places where one came, and where they are about to leave every recorded path. All of
    this depends on agreed facts alone, so every rank learns the same.

    In backward they exchange nothing at such a place: from what ranks called in forward, all know
    which optional units may be reached, and where, and they take part in these. So they prefetch in
    the order of a model without optional units. One exchange at the end settles what came late, and
    which gradients exist, also of required units, which need no exchange of their own then. In a
    backward that reaches no optional unit on any rank there is nothing to agree on.

    If several ranks request units at one place, the request that comes first in the recorded order
    is followed, in forward behind the latest event there.

    In forward they prefetch what the contract has, and the required unit behind it; the first unit
    of a region only once a rank has said that it enters. A place that a rank enters costs a second
    exchange when all go on: until then a rank may enter it again.
"""
