"""`wb bench`: measures a training step beside another one, in turn, each in its own process."""
