"""The command line: `river-offload generate|chat|prepare`. Nothing here is imported by the rest of the package."""
