"""The commands about environments and AWS resources: parse, make one call, print the answer."""
