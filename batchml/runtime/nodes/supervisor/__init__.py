"""The supervisors of a multi-node run: they start, watch and end the processes of its nodes."""
