"""Calls of tools and reasoning: what requests declare, what models write, and the grammars that hold them to it."""
