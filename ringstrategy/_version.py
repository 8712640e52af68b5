"""The version, readable from every floor."""

__version__ = "0.1.0"
