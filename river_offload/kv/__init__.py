"""The KV cache that backbone and river share."""
