"""The wire formats between orchestrator and GPU host. Standard library only."""
