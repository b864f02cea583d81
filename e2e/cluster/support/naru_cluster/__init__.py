"""A real Kubernetes cluster on one Linux machine, without a container engine or an image registry.

Used by the fixtures in `e2e/conftest.py` and by hand as `python -m naru_cluster`. No part of Naru imports this.
"""
