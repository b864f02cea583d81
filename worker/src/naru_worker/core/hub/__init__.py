"""Residency of many models in one worker: what to bring, what to evict, and why. Pure; the shell carries it out."""
