"""`ZeRO3(verify=...)`: bytes that are checked. docs/howto/verify.md says what is covered."""
