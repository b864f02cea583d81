"""The OpenAPI description of everything that the router answers over HTTP, served at /openapi.json."""
