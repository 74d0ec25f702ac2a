"""`/v2`, the Open Inference Protocol (KServe v2): its routes and its tensors."""
