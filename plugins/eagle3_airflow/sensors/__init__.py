"""Sensors: is the GPU host ready for the next stage?"""
