"""What runs on the GPU host, and the contracts both machines share."""
