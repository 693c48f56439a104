"""The launch kind `mpi`: mpirun on the main node starts the ranks on all nodes, without ssh."""
