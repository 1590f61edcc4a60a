"""Nothing hangs: watches collectives, and says which rank waits for what."""
