"""The package's version; the build and `layerzero.__version__` read it here."""

__version__ = "0.1.0"
