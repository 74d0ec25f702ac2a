"""The ONNX graph: exporting it, finding its parts, joining kernels, trimming its vocabulary."""
