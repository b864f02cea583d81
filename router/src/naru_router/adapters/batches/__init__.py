"""Batches: who works on them, and how their lines are run."""
