"""Conversations to samples: text in, token ids and loss masks out."""
