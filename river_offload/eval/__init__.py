"""Measuring a loaded model: how fast it is, and how fast the machine would let it be."""
