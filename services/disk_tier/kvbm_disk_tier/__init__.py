"""The disk tier (G3): slots in a file, a journal, verified reads."""
