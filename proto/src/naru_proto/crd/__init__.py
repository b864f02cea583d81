"""Custom resources as pydantic models: the one source of `crds/` and of the reference page."""
