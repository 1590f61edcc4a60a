"""From a module to units: what to wrap, what ranks must have alike, values, hooks."""
