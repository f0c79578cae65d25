"""The object tier (G4): the disk tier's core over a bucket of an S3-compatible store."""
