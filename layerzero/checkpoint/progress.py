"""Reports the progress of saves and loads: a tqdm bar or a callback."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

ProgressOption = bool | Callable[[int, int], None]
"""True: a tqdm bar on the first rank. A callable gets (bytes done, total bytes) of its rank."""


class ProgressReport:
    """Counts this rank's bytes, and reports them if requested."""

    def __init__(self, option: ProgressOption, label: str, total_nbytes: int) -> None:
        self.done_nbytes = 0
        self.total_nbytes = total_nbytes
        self._call = option if callable(option) else None
        self._bar = None
        if option is True:
            from tqdm import tqdm  # type: ignore[import-untyped]

            self._bar = tqdm(
                total=total_nbytes, desc=label, unit="B", unit_scale=True, unit_divisor=1024
            )

    def __call__(self, nbytes: int) -> None:
        self.done_nbytes += nbytes
        if self._bar is not None:
            self._bar.update(nbytes)
        if self._call is not None:
            self._call(self.done_nbytes, self.total_nbytes)

    def __enter__(self) -> ProgressReport:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def check_progress(option: ProgressOption) -> None:
    """Check the option before a save or load begins.

    Raises:
        TypeError: neither a bool nor a callable.
        ImportError: True, and tqdm is not installed.
    """
    if not (isinstance(option, bool) or callable(option)):
        raise TypeError(f"progress: expected a bool or a callable(done, total), got {option!r}")
    if option is True:
        try:
            import tqdm  # noqa: F401
        except ImportError as error:
            raise ImportError(
                "progress=True shows a tqdm bar: pip install tqdm, or pass a "
                "callable(done_nbytes, total_nbytes)"
            ) from error
