"""The machine: files, processes, GPUs, disk, and the jobs that run on it."""
