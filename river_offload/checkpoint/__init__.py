"""Bytes of a model at rest: where a checkpoint comes from, whether it is whole, and one tensor of it at a time."""
