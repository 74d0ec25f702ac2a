"""What `/v1` takes: the bodies of its endpoints, checked."""
