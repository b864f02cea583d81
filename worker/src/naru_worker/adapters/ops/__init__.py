"""The operations a decoder is written against, and their backends: `ref` (torch, the oracle), `cpu` (C++, a tape)."""
