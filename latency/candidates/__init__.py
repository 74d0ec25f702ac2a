"""Candidates: a model in torch, onnxruntime or OpenVINO, alone or from text to answer."""
