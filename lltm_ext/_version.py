"""The version, kept here alone. A wheel adds what it was built for: ``0.2.0+cu130torch2.11``."""

__version__ = "0.2.0"
