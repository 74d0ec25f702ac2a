"""The ONNX graph: export, search for its parts, kernel fusion, vocabulary trimming."""
