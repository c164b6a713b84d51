"""Triggers: what waits for the GPU host without a worker."""
