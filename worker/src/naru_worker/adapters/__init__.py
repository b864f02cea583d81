"""Devices, files, sockets: everything of the worker that touches the world."""
