"""Makes a bundle from a checkpoint: ONNX graphs in several precisions, the checks that they agree, and the folder to serve."""
