"""What `ZeRO3` adds to the engine when it wraps a module: features, FSDP's arguments, a log; and
wrapping a module again."""
