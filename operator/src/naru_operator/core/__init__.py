"""Pure decisions of the control plane."""
