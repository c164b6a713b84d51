"""Operators that run jobs on GPU hosts."""
