"""Operators: one remote job a task."""
