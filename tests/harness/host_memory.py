"""A runtime that page-locks nothing, and knows what it was asked to."""

import ctypes


class FakeRuntime:
    """Stands in for `layerzero.flat.host_memory.DeviceRuntime`."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses
        self.held: dict[int, int] = {}
        """Address -> bytes, of what is registered now."""
        self.sizes: list[int] = []
        """Bytes of every registration, in order."""
        self.most_nbytes = 0

    def register(self, address: int, nbytes: int) -> None:
        if self.refuses:
            raise RuntimeError("out of locked memory")
        assert address not in self.held, "registered twice"
        self.held[address] = nbytes
        self.sizes.append(nbytes)
        self.most_nbytes = max(self.most_nbytes, sum(self.held.values()))

    def unregister(self, address: int) -> None:
        nbytes = self.held.pop(address)
        ctypes.string_at(address + nbytes - 1, 1)  # Ends the process if it is unmapped already.
