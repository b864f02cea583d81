"""Pure engine decisions: requests, blocks, prefix cache, scheduler, detokenizer. No torch, no numpy, no clock."""
