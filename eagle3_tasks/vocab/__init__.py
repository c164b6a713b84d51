"""The draft vocabulary."""
