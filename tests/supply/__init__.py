"""What the images are made of: the bill of materials, and known weaknesses of it."""
