"""Bytes of captures: segments, receipts, manifests, verification."""
