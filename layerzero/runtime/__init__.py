"""When it happens: units, the recorded order, hooks, and what the root adds."""
