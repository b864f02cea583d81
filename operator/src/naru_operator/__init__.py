"""The control plane: what should run, and the `naru` command."""
