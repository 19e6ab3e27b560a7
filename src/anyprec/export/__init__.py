"""Model files for other engines: a model file in, ONNX models out, one for each profile; checked there. No torch."""
