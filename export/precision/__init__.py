"""Lower precision: calibration, smoothing, int8 and the search for what it breaks, fp16."""
