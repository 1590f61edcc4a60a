"""Turns a module into units: plans them, compares ranks, initialises values, installs hooks."""
