"""A package index and a model hub on this machine, for clusters without a way out and for tests of broken sources."""
