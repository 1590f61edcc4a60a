"""What a rank hands to the network, counted below the engine, at torch's process group."""

from benchmarks import traffic


class SentBytes(traffic.SentBytes):
    """Counts the bytes this rank gives to collectives and sends while entered, in any thread."""

    counts_input = True
