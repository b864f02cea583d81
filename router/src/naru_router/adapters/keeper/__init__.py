"""Carries out what the keeper decides: the lease, the commands to workers, the loop."""
