"""Builds Naru's three images on this machine, from a base made here, without a registry or a container engine."""
