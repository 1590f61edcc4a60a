"""A device that page-locks nothing, and knows what it was asked to."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class FakeRuntime:
    """Stands in for the module of a device, such as `torch.cuda`."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses
        self.held: dict[int, int] = {}
        """Address -> bytes, of what is registered now."""
        self.sizes: list[int] = []
        """Bytes of every registration, in order."""
        self.most_nbytes = 0
        self.log: list[Any] = []

    def cudart(self) -> "FakeRuntime":
        return self

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        self.log.append(device)
        yield
        self.log.append("left")

    def synchronize(self, device: Any) -> None:
        self.log.append("synchronize")

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> str:
        self.log.append("register")
        if self.refuses:
            return "712"  # As torch's enum: equal to no integer, but convertible to one.
        assert flags == 1 and address not in self.held, "registered twice"
        self.held[address] = nbytes
        self.sizes.append(nbytes)
        self.most_nbytes = max(self.most_nbytes, sum(self.held.values()))
        return "0"

    def cudaHostUnregister(self, address: int) -> None:
        self.log.append("unregister")
        nbytes = self.held.pop(address)
        ctypes.string_at(address + nbytes - 1, 1)  # Ends the process if it is unmapped already.
