"""The draft model: its architecture and the folder that engines serve."""
