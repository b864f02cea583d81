"""Decisions about WorkerPools: which pods there should be."""
