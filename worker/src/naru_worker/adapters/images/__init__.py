"""Packed images: a whole model in one file as the CPU engine wants it, packed once, mapped at each load."""
