"""The control loop of a cluster: objects and leases in, plans carried out, status told."""
