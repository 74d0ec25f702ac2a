"""Which student meets a latency budget on this machine: what shapes cost here, and short trainings of those that fit."""
