"""Brings in what other programs made: their runs as records, their weights as checkpoints."""
