"""Triggers that wait for GPU hosts."""
