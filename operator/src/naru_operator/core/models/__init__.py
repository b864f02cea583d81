"""Decisions about ModelDeployments: registry, placement, revisions, status."""
