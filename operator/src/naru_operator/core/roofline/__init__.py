"""What a model on a GPU could reach at best: bytes and operations of each kernel against what the GPU can do."""
