"""The decoder, and the opening of whole models."""
