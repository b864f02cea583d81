"""The engine around the pure core: batches, steps, the loop thread, loading and unloading of models."""
