"""The data plane edge: HTTP and gRPC in, one chosen worker out."""
