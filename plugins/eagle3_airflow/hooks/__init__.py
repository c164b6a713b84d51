"""Connections to the GPU host, and the agent behind them."""
