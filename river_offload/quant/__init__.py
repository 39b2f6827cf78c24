"""The river: quantizing a layer, the linear that runs it, the kernels behind that linear, and its cache on disk."""
