"""Models of tensors in ONNX files, computed by onnxruntime."""
