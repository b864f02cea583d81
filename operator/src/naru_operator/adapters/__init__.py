"""What carries decisions out: processes, files, Redis, gRPC."""
