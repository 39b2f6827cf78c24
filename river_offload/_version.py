"""The one place that knows the version: pyproject.toml, the command line and the trace header read it from here."""

__version__ = "0.1.0"
