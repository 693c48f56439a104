"""The sweep file: read with every mistake reported at once, and compared with its job."""
