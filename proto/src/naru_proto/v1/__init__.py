"""Generated wire messages and gRPC stubs; print them anew with `make gen`."""
