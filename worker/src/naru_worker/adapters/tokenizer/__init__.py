"""Text to token ids and back, over the `tokenizers` library."""
