"""A checkpoint becomes a bundle: an ONNX graph, its int8 copy, the proof that they agree, and the folder to serve."""
