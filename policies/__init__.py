"""Decisions of river-offload: plain Python in, plain Python out.

Nothing in this package imports torch or `river_offload`, so every decision can be tested with numbers
alone and replayed from a trace.
"""
