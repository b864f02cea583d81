"""The worker: one process, many models, one paged-attention engine."""
