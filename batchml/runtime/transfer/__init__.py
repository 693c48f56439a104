"""Archive a folder and restore it: on this machine, in S3, on a file system of AWS."""
