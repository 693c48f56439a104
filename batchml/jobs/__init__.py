"""A job's folder: find it, pack its code, make its image; and scripts that are submitted."""
