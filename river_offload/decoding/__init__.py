"""The river drafts, the streamed backbone checks whole blocks (lossless), or only has its say on unsure tokens (gated)."""
