"""The Open Inference Protocol: tensors, what models take and give, requests and replies in JSON and binary."""
