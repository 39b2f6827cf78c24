"""The river drafts, the streamed backbone checks whole blocks (lossless), or decides unsure tokens only (gated)."""
