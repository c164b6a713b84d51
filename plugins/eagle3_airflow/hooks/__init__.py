"""Connections to GPU hosts."""
