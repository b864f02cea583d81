"""Commands about models in a Kubernetes cluster: `naru cluster …`, which `kubectl naru …` is short for."""
