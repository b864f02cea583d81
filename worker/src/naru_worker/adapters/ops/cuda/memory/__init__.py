"""Memory of a GPU: one pool of physical chunks, mapped where the weights and caches of many models lie."""
