"""The package's version, in the one place that the build and `layerzero.__version__` read."""

__version__ = "0.1.0"
