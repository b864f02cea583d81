"""Sockets, Redis, gRPC and templates of the router."""
