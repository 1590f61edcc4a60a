"""The error of checkpoints."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or is damaged, or does not fit. Says which and why."""
