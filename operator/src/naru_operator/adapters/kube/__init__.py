"""The Kubernetes API as the operator uses it: watches, writes, the lease of the acting replica."""
