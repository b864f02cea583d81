"""One gRPC stream over one HTTP/2 connection, without I/O."""
