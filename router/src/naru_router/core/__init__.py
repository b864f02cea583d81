"""Pure decisions of the router: validation, routing, framing."""
