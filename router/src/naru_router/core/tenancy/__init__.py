"""Tenants: who asks, what they may see, what they share, how much they may use."""
