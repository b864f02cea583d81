"""The gRPC server of a worker: messages in, deltas out."""
