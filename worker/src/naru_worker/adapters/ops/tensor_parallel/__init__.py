"""One model over several processes, each with a device: every rank has a part of each matrix."""
