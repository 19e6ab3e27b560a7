"""Float ONNX networks as `nn.Module`s that convert, train and pack: an ONNX file in, an OnnxNetwork out."""
