"""A job's folder: find it, pack its code, make its image, read its script."""
